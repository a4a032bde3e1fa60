"""Open tasks over the network: they stay with their clients between rounds and end in order of arrival."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from dpcfl_net.federation.asynchronous import Outcome, Participation
from dpcfl_net.federation.call_state import CallState
from dpcfl_net.federation.network import NetworkFederation
from dpcfl_net.transport.endpoint import Payload


class AsynchronousNetworkFederation(NetworkFederation):
    """Federation over the network that can also keep tasks open; args and errors as `NetworkFederation`.

    The deadline of an open task is that of a call: `timeout_s` from the client's turn.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._open: dict[int, Participation] = {}
        self._call = CallState([])

    def _submit(self, work: Participation) -> None:
        """See `Federation`."""
        if work.client not in self._open:
            self._open[work.client] = work
            self._call.queue.append(work.client)

    def _next_outcome(self, among: Collection[int] | None) -> Outcome:
        """See `Federation`."""
        call, payloads = self._call, dict[tuple[Any, ...], Payload]()
        while not (ended := self._ended(among)):
            self._advance(call, self._task, payloads)
        client = ended[0]
        del self._open[client]
        call.met.discard(client)
        call.sent.discard(client)
        if client in call.overdue:
            call.overdue.discard(client)
            self.endpoint.cancel(client)
        lost, call.lost = client in call.lost, [other for other in call.lost if other != client]
        return Outcome(client, call.answers.pop(client, None), lost)

    def _ended(self, among: Collection[int] | None) -> list[int]:
        """Clients whose open task has ended, those with an answer first, in order of arrival.

        The task of an unreachable client ends once no other is open: at once, it would take the place of an answer in each version.
        """
        call = self._call
        pending = call.waiting.keys() | call.queue
        ended = [*call.answers, *(self._open.keys() - pending)]
        if pending if among is None else pending.intersection(among):
            ended = [client for client in ended if client in call.answers or client not in self._unreachable]
        return [client for client in ended if among is None or client in among]

    def _task(self, client: int) -> tuple[int, str, Mapping[str, np.ndarray]]:
        work = self._open[client]
        return work.participation, work.kind, work.tensors
