"""Open tasks over the network: they stay with their clients between rounds and end in order of arrival."""

from __future__ import annotations

from typing import Any

from dpcfl_net.federation.asynchronous import Outcome, Participation
from dpcfl_net.federation.network import NetworkFederation, _Call
from dpcfl_net.transport.endpoint import Payload


class AsynchronousNetworkFederation(NetworkFederation):
    """Federation over the network that can also keep tasks open; args and errors as `NetworkFederation`.

    The deadline of an open task is that of a call: `timeout_s` from the client's turn.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._open: dict[int, Participation] = {}
        self._call = _Call([])

    def submit(self, work: Participation) -> None:
        """See `Federation`."""
        if work.client not in self._open:
            self._open[work.client] = work
            self._call.queue.append(work.client)

    def next_outcome(self) -> Outcome:
        """See `Federation`."""
        call = self._call
        while not (ended := [*call.answers, *(self._open.keys() - call.queue - call.waiting.keys())]):
            self._advance(call)
        client = ended[0]
        del self._open[client]
        call.met.discard(client)
        lost, call.lost = client in call.lost, [other for other in call.lost if other != client]
        return Outcome(client, call.answers.pop(client, None), lost)

    def _advance(self, call: _Call) -> None:
        """Send the tasks of admitted clients, move messages for at most a second, and drop clients that are lost or late."""
        self._drop_lost(call)
        payloads: dict[int, Payload] = {}
        for work in map(self._open.__getitem__, self._admit(call)):
            shared = id(work.tensors)
            if shared not in payloads:  # tensors that many clients get are hashed once
                payloads[shared] = Payload.of(work.tensors)
            self.endpoint.send_task(work.client, work.participation, work.kind, payloads[shared])
        nearest = min(call.waiting.values(), default=0.0) - self._clock.now()
        for event in self.endpoint.poll(min(1.0, max(0.0, nearest)) if call.waiting else 0.1):
            self._handle(event, call)
        self._drop_late(call)
