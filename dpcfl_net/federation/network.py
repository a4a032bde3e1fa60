"""Clients as processes: tasks and releases over the wire, in client order whatever the order of arrival."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dpcfl_net.errors import RunFailed
from dpcfl_net.federation.base import Arrays, Federation
from dpcfl_net.job import Protocol
from dpcfl_net.wire.endpoint import Payload, ServerEndpoint, ServerEvent

Report = Callable[[str], None]


class NetworkFederation(Federation):
    """Drives the coordinator's endpoint while a call is under way; between calls nothing is read."""

    def __init__(
        self,
        protocol: Protocol,
        endpoint: ServerEndpoint,
        *,
        quorum: float = 1.0,
        timeout_s: float = 600,
        warn: Report = lambda text: None,
    ) -> None:
        super().__init__(protocol, quorum=quorum)
        self.endpoint, self.timeout_s, self._warn = endpoint, timeout_s, warn
        self.missing: list[int] = []

    def join(self, timeout_s: float) -> None:
        """Wait until every client is here; RunFailed names those that are not when the quorum is not reached in time."""
        deadline = time.monotonic() + timeout_s
        while len(self.endpoint.ready) < len(self.clients) and time.monotonic() < deadline:
            self.endpoint.poll(min(0.5, max(0.0, deadline - time.monotonic())))
        absent = sorted(set(self.clients) - set(self.endpoint.ready))
        if len(self.clients) - len(absent) < int(np.ceil(self.quorum * len(self.clients))):
            raise RunFailed(f"clients {absent} did not join within {timeout_s:g} s")
        if absent:
            self._warn(f"clients {absent} did not join within {timeout_s:g} s; the run goes on without them")

    def goodbye(self, patience_s: float = 5.0) -> None:
        """Tell everybody that the run is over until everybody has left: a goodbye is lost when a connection is reset."""
        deadline = time.monotonic() + patience_s
        while self.endpoint.ready and time.monotonic() < deadline:
            self.endpoint.bye()
            again = time.monotonic() + 1.0
            while self.endpoint.ready and time.monotonic() < again:
                self.endpoint.poll(0.1)

    def _exchange(self, kind: str, tasks: Mapping[int, dict[str, np.ndarray]]) -> dict[int, Arrays]:
        payloads: dict[tuple[Any, ...], Payload] = {}
        waiting = set()
        for client, tensors in tasks.items():
            same = tuple((name, a.__array_interface__["data"][0], a.shape, a.strides) for name, a in sorted(tensors.items()))
            if same not in payloads:  # one payload, hashed once, however many clients get it
                payloads[same] = Payload.of(tensors)
            self.endpoint.send_task(client, self.round, kind, payloads[same])
            waiting.add(client)
        answers: dict[int, Arrays] = {}
        deadline = time.monotonic() + self.timeout_s
        while waiting and time.monotonic() < deadline:
            for event in self.endpoint.poll(min(1.0, max(0.0, deadline - time.monotonic()))):
                self._take(event, waiting, answers)
        for client in sorted(waiting):
            self._warn(f"client {client} did not answer round {self.round} within {self.timeout_s:g} s")
            self.endpoint.cancel(client)
        self.missing = sorted(set(tasks) - set(answers))
        return answers

    def _take(self, event: ServerEvent, waiting: set[int], answers: dict[int, Arrays]) -> None:
        client = event.client
        if client is None or client not in waiting:
            return
        if event.kind == "result":
            waiting.discard(client)
            if event.status == "release":
                answers[client] = event.tensors
            else:
                self._warn(f"client {client} answered round {self.round}: {event.status} {event.reason}".rstrip())
        elif event.kind == "failed" and event.task:
            # The answer itself was refused (not finite, out of bounds): the client is out of this round, which goes on.
            waiting.discard(client)
            self.endpoint.cancel(client)
            self._warn(f"client {client} is out of round {self.round}: {event.code} {event.reason}")
