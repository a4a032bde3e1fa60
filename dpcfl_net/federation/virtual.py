"""Federation in one process that computes how long its calls would take over the clients' links."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.tensors import describe
from dpcfl_net.core.types import Answer, Task
from dpcfl_net.federation.base import Arrays
from dpcfl_net.federation.client_host import ClientHost
from dpcfl_net.federation.in_order import Take
from dpcfl_net.federation.in_process import InProcessFederation
from dpcfl_net.federation.release_check import ReleaseCheck
from dpcfl_net.federation.secure.stages import answer_interval_s
from dpcfl_net.federation.virtual_clock import Trip, VirtualClock, Work, trips
from dpcfl_net.transport.messages import CREDIT_CHUNKS, plain
from dpcfl_net.transport.wire_size import MessageBytes, control_bytes, message_bytes

HEARTBEAT_S = 2.0  # interval of both sides
PHASES = ("receiving", "computing")  # heartbeats that a client sends in a call besides; other phases go with its messages
OnSpan = Callable[[str, str, int, float, float], None]


class VirtualFederation(InProcessFederation):
    """In-process federation with a virtual clock: the same answers, and the time and bytes that a network would have cost.

    Args:
        protocol: The signed protocol.
        hosts: Client runtimes by client id.
        clock: The clock, with the links of the clients; calls advance it.
        quorum: Fraction of the asked clients that must answer.
        check: As for `InProcessFederation`.

    Attributes:
        clock: The clock.
        on_span: Called with (who, what, round, start, end) for each part of a client's work, in seconds since the epoch.
        on_message: Called with a line of messages.jsonl for each task and result.
        on_late: Called with a warning when a client's answer takes longer than a real run would wait.
    """

    def __init__(
        self,
        protocol: Protocol,
        hosts: Mapping[int, ClientHost],
        clock: VirtualClock,
        *,
        quorum: float = 1.0,
        check: ReleaseCheck | None = None,
    ) -> None:
        super().__init__(protocol, hosts, quorum=quorum, check=check)
        self.clock = clock
        self.on_span: OnSpan = lambda who, what, t, start, end: None
        self.on_message: Callable[[dict[str, Any]], None] = lambda line: None
        self.on_late: Callable[[str], None] = lambda text: None
        self._answers: dict[int, tuple[Answer, float]] = {}
        self._up = self._down = 0
        self._late: set[int] = set()

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent so far, as a network federation would count them."""
        return self._up, self._down

    def _exchange(self, kind: str, tasks: Mapping[int, dict[str, np.ndarray]], take: Take, window: int | None) -> None:
        start_s, self._answers = self.clock.now(), {}
        shapes: dict[int, Arrays] = {}

        def describe_and_take(client: int, tensors: Arrays) -> None:
            shapes[client] = {name: np.broadcast_to(np.empty((), array.dtype), array.shape) for name, array in tensors.items()}
            take(client, tensors)

        with self.clock.paused():
            super()._exchange(kind, tasks, describe_and_take, window)
            tasks_bytes = {client: self._size("TASK", kind, tensors) for client, tensors in tasks.items()}
            results_bytes = {
                client: self._result(kind, answer, shapes.get(client, {})) for client, (answer, _) in self._answers.items()
            }
            work = {
                client: Work(tasks_bytes[client].parts, seconds, results_bytes[client].parts)
                for client, (_, seconds) in self._answers.items()
            }
            found = trips(start_s, work, self.clock.network, answer_interval_s(self.protocol, kind))
            for client, trip in sorted(found.items()):
                self._record(client, kind, trip, tasks_bytes[client], results_bytes[client])
        self.clock.advance(max((trip.answered for trip in found.values()), default=start_s))

    def _answer(self, client: int, task: Task) -> Answer:
        host = self.hosts[client]
        started = time.thread_time()
        answer = host.answer(task)
        self._answers[client] = replace(answer, release=b""), time.thread_time() - started
        return answer

    def _size(self, kind: Any, task: str, tensors: Mapping[str, np.ndarray], **about: Any) -> MessageBytes:
        about |= {"run": self.protocol.run, "round": self.round, "task": task}
        return message_bytes(kind, describe(tensors), security=self.protocol.security, **about)

    def _result(self, task: str, answer: Answer, tensors: Arrays) -> MessageBytes:
        reason = f"{answer.code}: {answer.reason}" if answer.code else answer.reason
        return self._size("RESULT", task, tensors, status=answer.status, reason=plain(reason))

    def _record(self, client: int, name_of_task: str, trip: Trip, task: MessageBytes, result: MessageBytes) -> None:
        """Pass on spans and messages of one client, and count its bytes."""
        name, epoch = f"client {client}", self.clock.epoch
        for what, start, end in trip.spans():
            self.on_span(name, what, self.round, epoch(start), epoch(end))
        for at, direction, kind, size in ((trip.asked, "down", "TASK", task), (trip.answered, "up", "RESULT", result)):
            about = {"time": epoch(at), "direction": direction, "peer": name, "kind": kind, "task": name_of_task}
            self.on_message({**about, "round": self.round, "bytes": size.logged})
        beats = (trip.answered - trip.asked) / HEARTBEAT_S
        self._down += task.counted + round(self._control("ACK", result) + beats * self._heartbeat("idle"))
        phases = sum(map(self._heartbeat, PHASES))
        self._up += result.counted + round(
            self._control("ACK", task, code="waiting") + phases + beats * self._heartbeat("computing")
        )
        self._warn_if_late(client, trip.answered - trip.asked)

    def _warn_if_late(self, client: int, taken_s: float) -> None:
        limit_s = self.clock.network.timeout_s
        if taken_s > limit_s and client not in self._late:
            self._late.add(client)
            self.on_late(
                f"client {client} answered after {taken_s:.0f} s of virtual time in round {self.round}: over a real network it "
                f"would be missing, since runtime.round_timeout_s is {limit_s:g}"
            )

    def _control(self, kind: str, about: MessageBytes, **more: str) -> int:
        """Bytes of the acknowledgement of a message and of the confirmations of its chunks."""
        credits = max(0, len(about.parts) - 2) // CREDIT_CHUNKS
        run, parent = self.protocol.run, "0" * 32
        return control_bytes(kind, run, parent=parent, **more) + credits * control_bytes("CREDIT", run, parent=parent, index=8)

    def _heartbeat(self, phase: str) -> int:
        return control_bytes("HEARTBEAT", self.protocol.run, code=phase)
