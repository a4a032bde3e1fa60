"""Federation over the network: clients are processes, and results are in client order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dpcfl_net.core import buffers
from dpcfl_net.core.clock import AwakeClock
from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.tensors import memory_of
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.call_limits import NO_LAUNCHER, USUAL_LIMITS, WAITS, CallLimits, LauncherLink
from dpcfl_net.federation.call_state import CallState
from dpcfl_net.federation.client_pool import ClientPool
from dpcfl_net.federation.in_order import InOrder, Take
from dpcfl_net.federation.late_answer import LateAnswer
from dpcfl_net.federation.pause import UNHEARD, Pause, PauseListener, below_quorum
from dpcfl_net.federation.round_counts import answers_needed
from dpcfl_net.transport.endpoint import Payload, ServerEndpoint, ServerEvent

_log = logging.getLogger(__name__)

Report = Callable[[str], None]
MOST_LISTED = 20  # client ids in a message
GOODBYE_S = 5.0
SILENT_S = 5.0  # without all clients, after which the log says who is missing
RETURN_S = 5.0  # time for clients to come back to a coordinator that was restarted after the last round


class NetworkFederation(Federation):
    """Federation over the network: drives the coordinator's endpoint during a call; between calls nothing is read.

    Args:
        protocol: The signed protocol.
        endpoint: The coordinator's endpoint.
        limits: Quorum, timeouts, and number of connections.
        launcher: Connection to the launcher.
        warn: Receives warnings.
        pauses: Receives the beginning and the end of pauses below the quorum.
    """

    peers = "clients"  # their name in the log

    def __init__(
        self,
        protocol: Protocol,
        endpoint: ServerEndpoint,
        limits: CallLimits = USUAL_LIMITS,
        launcher: LauncherLink = NO_LAUNCHER,
        warn: Report = lambda text: None,
        pauses: PauseListener = UNHEARD,
    ) -> None:
        super().__init__(protocol, quorum=limits.quorum)
        self.pause_s, self._pauses = limits.pause_s, pauses
        self.endpoint, self.timeout_s, self.join_timeout_s = endpoint, limits.timeout_s, limits.join_timeout_s
        self._warn, self._read_lost, self._unreachable = warn, launcher.lost, set[int]()
        self._clock = AwakeClock()
        self._moved = self._clock.now()  # time of the newest result
        self._pool: ClientPool | None = None
        if launcher.tell is not None and limits.max_live is not None and limits.max_live < len(self.clients):
            self._pool = ClientPool(limits.max_live, launcher.tell, endpoint.bye)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent so far."""
        return self.endpoint.bytes_up, self.endpoint.bytes_down

    @property
    def live(self) -> int:
        """Number of connected clients."""
        return len(self.endpoint.ready)

    @property
    def started(self) -> int:
        """Number of client starts so far."""
        return self._pool.started if self._pool is not None else 0

    def join(self, t: int = 1) -> None:
        """Wait until every client that is there in round t has connected, unless clients are started on demand.

        After the last round it waits at most RETURN_S: clients that were told to leave do not connect again.

        Args:
            t: First round to run.

        Raises:
            RunFailed: If fewer clients than the quorum connect within `join_timeout_s`; names the missing ones.
        """
        if self._pool is not None:
            return
        if t > self.protocol.rounds:
            self._wait_for(set(self.clients), len(self.clients), RETURN_S)
            return
        expected = set(self.clients) - set(self.away(t))
        needed = answers_needed(self.quorum, len(expected))
        absent = self._wait_for(expected, len(expected), min(SILENT_S, self.join_timeout_s))
        if absent - self._unreachable and self.join_timeout_s > SILENT_S:
            self._say_missing(absent, len(expected))
            absent = self._wait_for(expected, len(expected), self.join_timeout_s - SILENT_S)
        problem = self._not_joined(absent, self.join_timeout_s)
        if len(expected) - len(absent) < needed <= len(expected) - len(absent & self._unreachable) and self.pause_s:
            joined = f"{problem}: {len(expected) - len(absent)} of {len(expected)} have joined, the quorum is {needed}"
            pause = Pause(0, f"{joined}: paused, waiting up to {self.pause_s:g} s for more", self.pause_s)
            started = self._clock.now()
            self._pauses.begin(pause)
            absent = self._wait_for(expected, needed, self.pause_s)
            self._pauses.end(pause, self._clock.now() - started)
            problem = self._not_joined(absent, self.join_timeout_s + self.pause_s)
        if len(expected) - len(absent) < needed:
            raise RunFailed(problem)
        if absent:
            self._warn(f"clients {_listed(sorted(absent))} have not joined; the run continues without them")

    def _not_joined(self, absent: set[int], seconds: float) -> str:
        """Say who has not joined in time, and who is lost, for whom nothing waits."""
        late, lost = absent - self._unreachable, absent & self._unreachable
        said = [f"clients {_listed(sorted(late))} did not join within {seconds:g} s"] if late else []
        return ", ".join([*said, *([f"clients {_listed(sorted(lost))} are lost"] if lost else [])])

    def _say_missing(self, absent: set[int], expected: int) -> None:
        """Write to the log which clients have not joined so far."""
        there = f"{expected - len(absent)} of {expected} {self.peers} have joined"
        _log.info("%s: waiting up to %g s for %s %s", there, self.join_timeout_s, self.peers, _listed(sorted(absent)))

    def _wait_for(self, expected: set[int], count: int, seconds: float) -> set[int]:
        """Wait until `count` of the expected clients have connected or no more can; return those that have not."""
        deadline = self._clock.now() + seconds
        while (absent := expected - set(self.endpoint.ready)) - self._unreachable and self._clock.now() < deadline:
            if len(expected) - len(absent) >= count:
                break
            self._unreachable.update(self._read_lost())
            self.endpoint.poll(min(0.5, max(0.0, deadline - self._clock.now())))
        return absent

    def goodbye(self) -> None:
        """Send goodbyes until all clients have left, for `GOODBYE_S` at most; a reset connection loses messages."""
        deadline = time.monotonic() + GOODBYE_S
        while self.endpoint.ready and time.monotonic() < deadline:
            self.endpoint.bye()
            again = time.monotonic() + 1.0
            while self.endpoint.ready and time.monotonic() < again:
                for event in self.endpoint.poll(0.1):
                    self._set_aside(event)

    def _exchange(self, kind: str, tasks: Mapping[int, dict[str, np.ndarray]], take: Take, window: int | None) -> None:
        payloads: dict[tuple[Any, ...], Payload] = {}
        queue = self._pool.in_turn(tasks) if self._pool is not None else list(tasks)
        order = InOrder(tasks, take, window)
        _log.debug("round %d: %s asked of %d clients", self.round, kind, len(tasks))
        call = CallState(queue, order)
        while self._continues(call, len(tasks)):
            self._advance(call, lambda client: (self.round, kind, tasks[client]), payloads)
        for client in call.overdue | set(call.waiting):
            self.endpoint.cancel(client)
            if self._pool is not None:
                self._pool.give_up(client)  # a pause may end before the client has connected
        order.end()
        self.lost, self.refused = sorted(call.lost), sorted(call.refused)
        _log.debug(
            "round %d: %s answered by %d clients; lost %s, refused %s", self.round, kind, call.count, self.lost, self.refused
        )

    def _continues(self, call: CallState, asked: int) -> bool:
        """Return True while the call waits for answers; begins and ends its pause."""
        pending = len(call.queue) + len(call.waiting)
        if call.pause is not None:
            if call.count < self.needed <= call.count + pending:
                return True
            paused_s = self._clock.now() - call.paused_at
            self.counts.paused_s += paused_s
            self._pauses.end(call.pause, paused_s)
            return False
        if pending:
            return True
        back = sorted(call.overdue - self._unreachable)
        if not self.pause_s or not call.count < self.needed <= call.count + len(back):
            return False
        call.pause, call.paused_at = below_quorum(self.round, call.count, asked, self.needed, self.pause_s), self._clock.now()
        self._pauses.begin(call.pause)
        call.overdue -= set(back)
        if self._pool is not None:
            call.queue = back
        else:
            call.asked.update(dict.fromkeys(back, call.paused_at))
            for client in back:
                call.wait_until(client, call.deadline(0.0))
        return True

    def _advance(
        self,
        call: CallState,
        task: Callable[[int], tuple[int, str, Mapping[str, np.ndarray]]],
        payloads: dict[tuple[Any, ...], Payload],
    ) -> None:
        """Send tasks to admitted clients, move messages for at most a second, and drop clients that are lost or late."""
        self._drop_lost(call)
        for client in self._admit(call):
            if client in call.sent:  # before a pause: the endpoint still has the task
                continue
            call.sent.add(client)
            number, kind, tensors = task(client)
            arrays = tuple((name, memory_of(array)) for name, array in sorted(tensors.items()))
            if arrays not in payloads:  # a payload that many clients get is hashed once
                payloads[arrays] = Payload.of(tensors)
            self.endpoint.send_task(client, number, kind, payloads[arrays])
        nearest = call.earliest - self._clock.now()
        for event in self.endpoint.poll(min(1.0, max(0.0, nearest)) if call.waiting else 0.1):
            self._handle(event, call)
        if self._clock.now() > self._moved + buffers.IDLE_S:
            buffers.give_back()
        self._drop_late(call)

    def _admit(self, call: CallState) -> list[int]:
        """Remove clients that can get their task from the queue; their time begins when they are connected."""
        admitted, now = [client for client in call.queue if call.admits(client)], self._clock.now()
        if call.order is not None and call.queue and not admitted and call.order.head in call.overdue:
            self._give_up(call, call.order.head)  # the window waits for a client past its deadline
        if self._pool is not None:
            self._pool.tend()
            admitted = self._pool.admit(admitted, call.waiting)
        if not admitted:
            return []
        for client in admitted:
            if self._pool is None or self._pool.here(client):
                call.met.add(client)
            call.asked[client] = now
            call.wait_until(client, call.deadline(now + (self.timeout_s if client in call.met else self.join_timeout_s)))
        call.queue = [client for client in call.queue if client not in call.waiting]
        return admitted

    def _give_up(self, call: CallState, client: int) -> None:
        """Wait no longer for a client's answer."""
        call.overdue.discard(client)
        call.close(client)
        self.endpoint.cancel(client)

    def _update_pool(self, pool: ClientPool, kind: str, client: int, call: CallState) -> None:
        """Update pool and deadlines when a client connects or disconnects."""
        if kind == "joined":
            pool.joined(client)
            if client in call.waiting and client not in call.met:
                call.met.add(client)
                call.asked[client] = self._clock.now()
                call.wait_until(client, call.deadline(call.asked[client] + self.timeout_s))
        elif kind == "left":
            pool.left(client, busy=client in call.waiting)

    def _drop_lost(self, call: CallState) -> None:
        self._unreachable.update(self._read_lost())
        if not self._unreachable:
            return
        for client in self._unreachable.intersection(call.queue):
            call.close(client)
        call.queue = [client for client in call.queue if client not in self._unreachable]
        for client in sorted(self._unreachable & set(call.waiting)):
            del call.waiting[client]
            self._give_up(call, client)
            if self._pool is not None:
                self._pool.give_up(client)
            self._warn(f"client {client} is lost: round {self.round} continues without it")

    def _drop_late(self, call: CallState) -> None:
        now = self._clock.now()
        for client in call.late(now):
            if self.endpoint.waits(client) and now < call.asked[client] + WAITS * self.timeout_s:
                call.wait_until(client, now + 1.0)  # it waits for a core: its time has not begun
                continue
            del call.waiting[client]
            call.overdue.add(client)
            if self._pool is not None and not self._pool.here(client):
                self._pool.give_up(client)
            if call.pause is not None:
                continue  # it was reported when its deadline passed, before the pause
            if self._pool is None or client in call.met:
                self._warn(f"client {client} did not answer round {self.round} within {self.timeout_s:g} s")
            else:
                self._warn(f"client {client} did not connect within {self.join_timeout_s:g} s for round {self.round}")

    def _handle(self, event: ServerEvent, call: CallState) -> None:
        client = event.client
        if client is None or self._set_aside(event):
            return
        if self._pool is not None:
            self._update_pool(self._pool, event.kind, client, call)
        if client not in call.waiting and client not in call.overdue:
            return
        if event.kind == "phase" and event.phase == "computing" and client in call.met and client in call.waiting:
            limit = call.asked[client] + WAITS * self.timeout_s
            call.wait_until(client, call.deadline(min(self._clock.now() + self.timeout_s, limit)))
        closes = event.kind == "result" or (event.kind == "failed" and bool(event.task))
        if closes:
            call.waiting.pop(client, None)
            call.overdue.discard(client)
            if self._pool is not None:
                self._pool.done(client)
        if event.kind == "result":
            self._moved = self._clock.now()
            if event.status == "release":
                call.put(client, event.tensors)
            else:
                call.close(client)
                (call.lost if event.status == "lost" else call.refused).append(client)
                self.reasons[client] = f"{event.status} {event.reason}".rstrip()
                self._warn(f"client {client} answered round {self.round}: {self.reasons[client]}")
        elif closes:
            # The answer was refused (not finite, out of bounds): the round continues without this client.
            self._give_up(call, client)
            self.reasons[client] = f"{event.code}: {event.reason}"
            self._warn(f"client {client} is out of round {self.round}: {self.reasons[client]}")

    def _set_aside(self, event: ServerEvent) -> bool:
        """Count a late answer and warn; return True for one."""
        if event.kind != "late" or event.client is None:
            return False
        self.counts.late.append(event.client)
        self._warn(str(LateAnswer(event.client, event.round, event.task, event.status, self.round, event.blake3)))
        return True


def _listed(clients: list[int]) -> str:
    """Format client ids, the first `MOST_LISTED` of them."""
    return f"{clients}" if len(clients) <= MOST_LISTED else f"{clients[:MOST_LISTED]} and {len(clients) - MOST_LISTED} more"
