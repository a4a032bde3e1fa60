"""Clients as processes: tasks and releases over the wire, in client order whatever the order of arrival."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpcfl_net.core.clock import AwakeClock
from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.federation.base import Arrays, Federation
from dpcfl_net.federation.client_pool import ClientPool, Word
from dpcfl_net.transport.endpoint import Payload, ServerEndpoint, ServerEvent

Report = Callable[[str], None]
NAMED = 20
WAITS = 10


@dataclass
class _Call:
    """One call in progress: clients still to ask, deadlines and start times of those asked, answers so far."""

    queue: list[int]
    waiting: dict[int, float] = field(default_factory=dict)
    asked: dict[int, float] = field(default_factory=dict)
    met: set[int] = field(default_factory=set)  # connected since being asked: reconnecting does not extend the deadline
    answers: dict[int, Arrays] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class CallLimits:
    """Limits on the calls of a run.

    Attributes:
        quorum: Fraction of the asked clients that must answer.
        timeout_s: Seconds for an answer, from the client's turn. Not counted: time that the client waits for a core of its
            host (at most `WAITS` times as long) and time that this process was suspended.
        join_timeout_s: Seconds for a started client to connect; after that it is missing from the round.
        max_live: Most clients connected at once; a larger call runs in waves, and clients are started when they are asked.
            None: all clients.
    """

    quorum: float = 1.0
    timeout_s: float = 600
    join_timeout_s: float = 120
    max_live: int | None = None


@dataclass(frozen=True)
class LauncherLink:
    """The federation's connection to the launcher of its clients.

    Attributes:
        tell: Passes the word to start or stop a client to the launcher; None: no launcher listens.
        lost: Returns clients that became unreachable since the last call; the round does not wait for them.
    """

    tell: Callable[[Word, int], None] | None = None
    lost: Callable[[], Iterable[int]] = tuple


class NetworkFederation(Federation):
    """Federation over the network: drives the coordinator's endpoint during a call; between calls nothing is read.

    Args:
        protocol: The signed protocol.
        endpoint: The coordinator's endpoint.
        limits: Quorum, timeouts, and number of connections.
        launcher: Connection to the launcher.
        warn: Receives warnings.
    """

    def __init__(
        self,
        protocol: Protocol,
        endpoint: ServerEndpoint,
        limits: CallLimits = CallLimits(),
        launcher: LauncherLink = LauncherLink(),
        warn: Report = lambda text: None,
    ) -> None:
        super().__init__(protocol, quorum=limits.quorum)
        self.endpoint, self.timeout_s, self.join_timeout_s = endpoint, limits.timeout_s, limits.join_timeout_s
        self._warn, self._learn, self._gone = warn, launcher.lost, set[int]()
        self._clock = AwakeClock()
        self._pool: ClientPool | None = None
        if launcher.tell is not None and limits.max_live is not None and limits.max_live < len(self.clients):
            self._pool = ClientPool(limits.max_live, launcher.tell, endpoint.bye)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes up and down on the wire so far."""
        return self.endpoint.bytes_up, self.endpoint.bytes_down

    @property
    def live(self) -> int:
        """Clients that are connected now."""
        return len(self.endpoint.ready)

    @property
    def started(self) -> int:
        """How often a client was started so far."""
        return self._pool.started if self._pool is not None else 0

    def join(self) -> None:
        """Wait until every client is here, unless they come when they are started.

        RunFailed names those who are not here within join_timeout_s when the quorum is not reached.
        """
        if self._pool is not None:
            return
        deadline = self._clock.now() + self.join_timeout_s
        while set(self.clients) - set(self.endpoint.ready) - self._gone and self._clock.now() < deadline:
            self._gone.update(self._learn())
            self.endpoint.poll(min(0.5, max(0.0, deadline - self._clock.now())))
        absent = sorted(set(self.clients) - set(self.endpoint.ready))
        said = f"clients {_named(absent)} did not join within {self.join_timeout_s:g} s"
        if len(self.clients) - len(absent) < int(np.ceil(self.quorum * len(self.clients))):
            raise RunFailed(said)
        if absent:
            self._warn(f"{said}; the run goes on without them")

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
        call = _Call(self._pool.in_turn(tasks) if self._pool is not None else list(tasks))
        while call.queue or call.waiting:
            self._give_up_the_lost(call)
            for client in self._admit(call):
                tensors = tasks[client]
                same = tuple(
                    (name, a.__array_interface__["data"][0], a.shape, a.strides) for name, a in sorted(tensors.items())
                )
                if same not in payloads:  # one payload, hashed once, however many clients get it
                    payloads[same] = Payload.of(tensors)
                self.endpoint.send_task(client, self.round, kind, payloads[same])
            nearest = min(call.waiting.values(), default=0.0) - self._clock.now()
            for event in self.endpoint.poll(min(1.0, max(0.0, nearest)) if call.waiting else 0.1):
                self._take(event, call)
            self._miss_the_late(call)
        self.lost = sorted(call.lost)
        self.missing, self.answered = sorted(set(tasks) - set(call.answers)), len(call.answers)
        return call.answers

    def _admit(self, call: _Call) -> list[int]:
        """Take those who can be given their task now from the queue; their time begins when they are connected."""
        admitted, now = call.queue, self._clock.now()
        if self._pool is not None:
            self._pool.tend()
            admitted = self._pool.admit(call.queue, call.waiting)
        for client in admitted:
            if self._pool is None or self._pool.here(client):
                call.met.add(client)
            call.asked[client] = now
            call.waiting[client] = now + (self.timeout_s if client in call.met else self.join_timeout_s)
        call.queue = [client for client in call.queue if client not in call.waiting]
        return admitted

    def _follow(self, pool: ClientPool, kind: str, client: int, call: _Call) -> None:
        """What somebody's coming and going means for the places, and for the time to answer."""
        if kind == "joined":
            pool.joined(client)
            if client in call.waiting and client not in call.met:
                call.met.add(client)
                call.asked[client] = self._clock.now()
                call.waiting[client] = call.asked[client] + self.timeout_s
        elif kind == "left":
            pool.left(client, busy=client in call.waiting)

    def _give_up_the_lost(self, call: _Call) -> None:
        self._gone.update(self._learn())
        call.queue = [client for client in call.queue if client not in self._gone]
        for client in sorted(self._gone & set(call.waiting)):
            del call.waiting[client]
            self.endpoint.cancel(client)
            if self._pool is not None:
                self._pool.give_up(client)
            self._warn(f"client {client} is lost: round {self.round} goes on without it")

    def _miss_the_late(self, call: _Call) -> None:
        now = self._clock.now()
        for client in sorted(client for client, deadline in call.waiting.items() if deadline <= now):
            if self.endpoint.waits(client) and now < call.asked[client] + WAITS * self.timeout_s:
                call.waiting[client] = now + 1.0  # its time has not begun
                continue
            del call.waiting[client]
            self.endpoint.cancel(client)
            if self._pool is not None and not self._pool.here(client):
                self._pool.give_up(client)
            if self._pool is None or client in call.met:
                self._warn(f"client {client} did not answer round {self.round} within {self.timeout_s:g} s")
            else:
                self._warn(f"client {client} did not come within {self.join_timeout_s:g} s for round {self.round}")

    def _take(self, event: ServerEvent, call: _Call) -> None:
        client = event.client
        if client is None:
            return
        if self._pool is not None:
            self._follow(self._pool, event.kind, client, call)
        if client not in call.waiting:
            return
        if event.kind == "phase" and event.phase == "computing" and client in call.met:
            latest = call.asked[client] + WAITS * self.timeout_s
            call.waiting[client] = min(self._clock.now() + self.timeout_s, latest)
        closes = event.kind == "result" or (event.kind == "failed" and bool(event.task))
        if closes:
            del call.waiting[client]
            if self._pool is not None:
                self._pool.done(client)
        if event.kind == "result":
            if event.status == "release":
                call.answers[client] = event.tensors
            else:
                if event.status == "lost":
                    call.lost.append(client)
                self._warn(f"client {client} answered round {self.round}: {event.status} {event.reason}".rstrip())
        elif closes:
            # The answer itself was refused (not finite, out of bounds): the client is out of this round, which goes on.
            self.endpoint.cancel(client)
            self._warn(f"client {client} is out of round {self.round}: {event.code} {event.reason}")


def _named(clients: list[int]) -> str:
    """A list of client ids that stays readable with a thousand clients."""
    return f"{clients}" if len(clients) <= NAMED else f"{clients[:NAMED]} and {len(clients) - NAMED} more"
