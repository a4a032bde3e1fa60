"""A worker's end of the wire: one DEALER socket to a coordinator that is not trusted."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import zmq

from dpcfl_net.core.clock import AwakeClock
from dpcfl_net.core.errors import ConfigError, Refused, RunFailed
from dpcfl_net.transport.channel import DAMAGED, PASSING, Channel, Stamp, Stream, remember
from dpcfl_net.transport.client_events import ClientEvent, ClientTimes
from dpcfl_net.transport.dialed import DialedConnection
from dpcfl_net.transport.message_log import MessageLog
from dpcfl_net.transport.messages import (
    PHASES,
    STATUSES,
    Header,
    Template,
    WireError,
    decode,
    encode,
    match_template,
    plain,
    word,
)
from dpcfl_net.transport.payload import Assembly, Payload, as_payload, checked
from dpcfl_net.transport.sockets import (
    BATCH,
    BYE_LINGER_MS,
    Arrived,
    Link,
    dial,
    has_more,
    join_curve,
    new_socket,
    receive,
    require_safe,
    send,
)

_log = logging.getLogger(__name__)

HELLO_S = 1.0
DEFAULT_TIMES = ClientTimes()
SILENT_S = 5.0  # without a first connection, after which the log says so
WATCH_S = 0.1  # between looks at the connection, which a system call answers
LOOK_S, BLOCKED_S = 0.25, 0.02  # longest sleep on a connection in use, and while the socket refuses a message
LATE_BEAT = 1.25  # intervals without a heartbeat of the coordinator, after which the client sends one of its own accord
QUIET_S = 1.0  # after the last message of a task or result the connection is out of use
MOST_RESULTS = 2  # without a receipt: that of the last task and one of a task before it, which may be late


@dataclass
class _Task:
    """A delivered task; `answered` once `send_result` was called for it."""

    round: int
    task: str
    answered: bool = False


class ClientEndpoint:
    """Receives tasks and sends results, each until it is acknowledged; says HELLO with a new boot id on each new connection.

    Not thread-safe: one thread (the worker's I/O thread) uses it, and `register` lets other threads wake it.

    Args:
        connect: The coordinator's "tcp://host:port".
        link: Run, job, keys and security.
        client: Client id.
        task_template: Returns the tensors of a task by its name, None for an unknown task.
        check: Called with (task name, tensors) before a task is delivered; raises Refused to reject it.
        on_failure: Called with {"time", "peer", "code", "reason"} for each broken message.
        times: Time limits and intervals.
        announces: False: connect, and say HELLO after `announce`. Until then a connection that is up counts as heard.

    Attributes:
        welcomed: True if the coordinator has accepted this connection.
        failures: Number of broken messages by code.

    Raises:
        ConfigError: If an address is not allowed or a key is missing.
    """

    def __init__(
        self,
        connect: str,
        link: Link,
        *,
        client: int,
        task_template: Callable[[str], Template | None],
        check: Callable[[str, dict[str, np.ndarray]], None] | None = None,
        on_failure: Callable[[dict[str, Any]], None] | None = None,
        times: ClientTimes = DEFAULT_TIMES,
        announces: bool = True,
    ) -> None:
        require_safe(connect, link.security)
        if link.security == "curve" and (link.keys is None or link.server_key is None):
            raise ConfigError("a worker with security curve needs its key pair and the coordinator's public key")
        self.welcomed = False
        self._message_log = MessageLog(on_failure)
        self.failures = self._message_log.failures
        self._client, self._template, self._check = client, task_template, check
        self._times, self._announces = times, announces
        self._stamp = Stamp(link.run, link.job)
        self._channel = Channel(self._stamp, self._send)
        self._phase = self._told_phase = "idle"
        self._unacknowledged: tuple[str, float] | None = None  # id of a task, and the time of its ACK
        self._tasks: OrderedDict[str, _Task] = OrderedDict()
        self._results: dict[str, Stream] = {}
        self._events: list[ClientEvent] = []
        self._sources: dict[Any, Callable[[], None]] = {}
        self._connected, self._server_boot, self._hellos = False, "", set[str]()
        self._next_heartbeat = self._next_hello = self._next_watch = self._task_begun = self._duplicate_since = 0.0
        self._in_use_until = 0.0
        self._clock = AwakeClock()  # a pause of this process does not count as silence of the coordinator
        self._heard = self._clock.now()
        self._tell_silence = True  # once, before the first connection
        self._own_context = link.context is None
        self._context = link.context or zmq.Context()
        self._socket = new_socket(self._context, zmq.DEALER)
        self._curve, self._connection = link.security == "curve", DialedConnection(self._socket, times.handshake_limit_s)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._connection.monitor, zmq.POLLIN)
        try:
            join_curve(self._socket, link)
            dial(self._socket, connect)
        except BaseException:
            self.close(abort=True)
            raise

    @property
    def pending(self) -> int:
        """Number of results that the coordinator has not acknowledged."""
        return len(self._results)

    def poll(self, timeout_s: float) -> list[ClientEvent]:
        """Move messages; return at once on an event or when a registered source is readable.

        Args:
            timeout_s: Longest wait in seconds; infinite: until then.

        Returns:
            Events since the last call.

        Raises:
            Refused: "handshake" if a server with another key answers or it does not know this key; the coordinator's code if it
                rejects HELLO.
            RunFailed: If nothing was heard for `orphan_timeout_s`, or no handshake was completed within `handshake_limit_s`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            blocked = self._tend()
            due = deadline if self._unacknowledged is None else min(deadline, self._unacknowledged[1])
            readable = self._sleep(min(due, time.monotonic() + BLOCKED_S) if blocked else due)
            if self._connection.monitor in readable:
                self._follow()
            if self._socket in readable:
                self._read()
            woken = [callback for source, callback in list(self._sources.items()) if source in readable]
            for callback in woken:
                callback()
            if woken or self._events or time.monotonic() >= deadline:
                self._pump()
                found, self._events = self._events, []
                return found

    def send_result(
        self, task_id: str, status: str, release: Payload | Mapping[str, np.ndarray] | bytes = b"", reason: str = ""
    ) -> None:
        """Answer a delivered task. Of results without a receipt only the last `MOST_RESULTS` are kept and sent again.

        Args:
            task_id: Message id of the task.
            status: "release" with tensors; "lost", "stale" or "refused" without.
            release: Tensors, or bytes from `tensors.pack`.
            reason: Reason for a status without tensors.

        Raises:
            ValueError: For an unknown task or status.
        """
        task = self._tasks.get(task_id)
        if task is None or status not in STATUSES:
            raise ValueError(f"no task {task_id} was delivered, or {status!r} is no status")
        task.answered = True
        if self._unacknowledged is not None and self._unacknowledged[0] == task_id:
            self._unacknowledged = None
        fields = {"kind": "RESULT", "parent": task_id, "round": task.round, "task": task.task}
        stream = Stream({**fields, "code": status, "reason": plain(reason)}, as_payload(release))
        while len(self._results) >= MOST_RESULTS:  # a server that acknowledges nothing must not fill the memory
            self._settle(next(iter(self._results)))
        self._results[stream.id] = stream
        self._phase = "sending"
        if self.welcomed:
            self._told_phase = "sending"  # the result says so
            self._channel.push(stream)
        self._pump()

    def heartbeat(self, phase: str) -> None:
        """Report the worker's phase; delivered tasks and acknowledged results set it automatically.

        Args:
            phase: One of `PHASES`.

        Raises:
            ValueError: For an unknown phase.
        """
        if phase not in PHASES:
            raise ValueError(f"a phase is one of {', '.join(PHASES)}, got {phase!r}")
        self._phase = phase

    def register(self, source: Any, callback: Callable[[], None]) -> None:
        """Wake `poll` when a source is readable.

        Args:
            source: A descriptor or socket.
            callback: Called then; must read the source until it is empty.
        """
        key = source if isinstance(source, (int, zmq.Socket)) else source.fileno()
        self._poller.register(key, zmq.POLLIN)
        self._sources[key] = callback

    def announce(self) -> None:
        """Say HELLO on this connection and on later ones, if `announces` was False."""
        self._announces = True

    def bye(self) -> None:
        """Tell the coordinator that this worker leaves."""
        if self.welcomed:
            self._channel.say("BYE")
            self._pump()

    def close(self, abort: bool = False) -> None:
        """Close the socket; queued messages are sent for up to 5 s unless `abort`."""
        self._connection.close()
        self._socket.close(linger=0 if abort else BYE_LINGER_MS)
        if self._own_context:
            self._context.term()

    def __enter__(self) -> ClientEndpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(abort=kind is not None)

    def _sleep(self, due: float) -> dict[Any, int]:
        """Wait for something to read, at most until `due`; return what is readable.

        A message that never ends is not readable, so a connection in use is looked at several times a second. One out of use sleeps
        until its next heartbeat, or until bytes come: a thousand idle workers of a host would else take a third of two cores.
        """
        now, stirs = time.monotonic(), -1
        if self._events:
            due = now
        elif now < self._in_use_until or not self.welcomed or self._results or self._channel.assembly is not None:
            due = min(due, now + LOOK_S)
        else:
            due, stirs = min(due, self._next_heartbeat), self._connection.fd
        if stirs >= 0:
            self._poller.register(stirs, zmq.POLLIN)
        readable = dict(self._poller.poll(math.ceil(1000 * max(0.0, due - now))))
        if stirs >= 0:
            self._poller.unregister(stirs)
        if stirs in readable:
            self._in_use_until, self._next_watch = time.monotonic() + LOOK_S, 0.0
        return readable

    def _follow(self) -> None:
        """Greet on each new connection; after its end nothing can be sent."""
        for up in self._connection.changes():
            if up:
                self._greet()
            else:
                self._connected = self.welcomed = False

    def _greet(self) -> None:
        """Start a new connection: new boot id, empty state, HELLO."""
        self._stamp.renew()
        self._channel.restart()
        self._connected, self.welcomed, self._server_boot, self._tell_silence = True, False, "", False
        self._hellos.clear()
        self._unacknowledged = None  # the task comes again
        self._next_hello = 0.0

    def _hello(self, now: float) -> None:
        self._next_hello = now + HELLO_S
        header = self._stamp.header(kind="HELLO", client=self._client)
        if self._send(header, encode(header), None):
            self._hellos.add(header.id)

    def _tend(self) -> bool:
        """Check limits, send HELLO, heartbeats and repetitions when due; True if the socket refused a message."""
        now = time.monotonic()
        if now >= self._next_watch:
            self._next_watch = now + WATCH_S
            self._watch()
        if self._connected and self._announces and not self.welcomed and now >= self._next_hello:
            self._hello(now)
        if self._unacknowledged is not None:
            if now >= self._unacknowledged[1]:
                self._acknowledge(self._unacknowledged[0])
        elif self.welcomed and (now >= self._next_heartbeat or self._has_news(now)):
            self._next_heartbeat = now + LATE_BEAT * self._times.heartbeat_s
            self._told_phase = self._phase
            self._channel.say("HEARTBEAT", code=self._phase)
        if self.welcomed:
            for stream in self._results.values():
                if now > stream.due(self._times.resend_s) and self._channel.was_read(stream):
                    self._channel.repeat_overdue(stream)
        return self._pump()

    def _has_news(self, now: float) -> bool:
        """Return True if the phase has changed; not while a task arrives that may be complete at once."""
        just_begun = self._phase == "receiving" and now < self._task_begun + self._times.ack_delay_s
        return self._phase != self._told_phase and not just_begun

    def _watch(self) -> None:
        """Check the connection's unread bytes and handshakes, and that the coordinator is not silent."""
        if (flood := self._connection.flood()) is not None:
            self._message_log.failed("coordinator", WireError("flood", flood))
        self._connection.require_handshake()
        now, limit_s = self._clock.now(), self._times.orphan_timeout_s
        if self._connected and not self._announces:
            self._heard = now
        silent_s = now - self._heard
        if silent_s > limit_s:
            raise RunFailed(f"nothing was heard from the coordinator at {self._where()} for {limit_s:g} s")
        if self._tell_silence and silent_s > SILENT_S:
            self._tell_silence = False
            _log.warning("nothing is heard from the coordinator at %s: waiting up to %g s for it", self._where(), limit_s)

    def _where(self) -> str:
        """Address of the coordinator."""
        return self._socket.get_string(zmq.LAST_ENDPOINT)

    def _pump(self) -> bool:
        return self.welcomed and not self._channel.pump()

    def _send(self, header: Header, data: bytes, chunk: memoryview | None) -> bool:
        try:
            send(self._socket, *([data] if chunk is None else [data, chunk]))
        except zmq.Again:
            return False
        return True

    def _read(self) -> None:
        for _ in range(BATCH):
            arrived = receive(self._socket, curve=self._curve, guard=self._connection)
            if arrived is None:
                return
            self._handle(arrived)
            if self._events or not has_more(self._socket):
                return  # of a batch of whole tasks the owner would drop all but the last, after all were in memory

    def _handle(self, arrived: Arrived) -> None:
        header: Header | None = None
        try:
            arrived.require_frames()
            header = decode(arrived.header)
            if not self.welcomed:
                self._answered_hello(header)
                return
            self._stamp.require_same(header)
            if header.boot != self._server_boot:
                raise WireError("boot", "a message of another boot than the connection's WELCOME")
            self._channel.admit(header)
            arrived.require_frames_of(header.kind)
            self._heard = self._clock.now()
            self._act(header, arrived.chunk)
        except WireError as error:
            self._refuse(header, error)

    def _answered_hello(self, header: Header) -> None:
        """Handle a message before WELCOME: only an answer to this boot's HELLO counts."""
        if header.kind not in ("WELCOME", "ERROR") or header.parent not in self._hellos:
            raise WireError("no-welcome", f"a {header.kind} before WELCOME")
        if header.kind == "ERROR" and header.code == "sequence":
            return  # a HELLO arrived twice; the answer to the first one, or to the next HELLO, counts
        if header.kind == "ERROR" and header.code == "duplicate":
            now = self._clock.now()
            self._duplicate_since = self._duplicate_since or now
            if now - self._duplicate_since < self._times.duplicate_grace_s:
                return
        if header.kind == "ERROR":
            raise Refused(header.code, f"the coordinator refused this worker: {header.reason}")
        try:
            self._stamp.require_same(header)
        except WireError as error:
            raise Refused(error.code, error.reason) from None
        self._heard, self._duplicate_since = self._clock.now(), 0.0
        self.welcomed, self._server_boot, self._channel.sequence = True, header.boot, header.sequence
        self._next_heartbeat = 0.0
        for stream in self._results.values():
            self._channel.push(stream)
        self._events.append(ClientEvent("welcome"))

    def _act(self, header: Header, chunk: memoryview | None) -> None:
        kind, now = header.kind, time.monotonic()
        if kind == "HEARTBEAT":
            self._in_use_until = 0.0  # it is what stirred
            if self._next_heartbeat - now < (LATE_BEAT - 0.5) * self._times.heartbeat_s:
                self._next_heartbeat = now  # awake anyway
            return
        self._in_use_until = now + QUIET_S
        if kind == "TASK":
            self._task(header)
        elif kind == "CHUNK" and chunk is not None:
            complete = self._channel.take(header, chunk)
            if complete is not None:
                self._deliver(complete)
        elif kind == "CREDIT":
            self._channel.credit(header.parent, header.index)
        elif kind == "ACK":
            self._confirmed(header.parent)
        elif kind == "ERROR":
            self._refused(header)
        elif kind == "BYE":
            self._events.append(ClientEvent("bye"))
        elif kind != "WELCOME":
            raise WireError("kind", f"a coordinator does not send {kind}")

    def _refused(self, header: Header) -> None:
        """Send a damaged result again; forget one that is refused for another reason."""
        damaged = self._results.get(header.parent) if header.code in DAMAGED else None
        if damaged is not None:
            self._channel.repeat(damaged)
        elif header.code not in PASSING:
            self._settle(header.parent)
            self._events.append(ClientEvent("error", header.parent, code=header.code, reason=header.reason))

    def _confirmed(self, result_id: str) -> None:
        """Report a result that the coordinator has received, and forget it."""
        if (result := self._results.get(result_id)) is not None:
            about, now = result.fields, time.monotonic()
            if self._told_phase == "sending":
                self._told_phase = "idle"  # as the coordinator assumes once it has the answer
            self._events.append(
                ClientEvent("sent", result_id, about["round"], about["task"], begun=result.created, arrived=now)
            )
        self._settle(result_id)

    def _settle(self, result_id: str) -> None:
        """Forget a result that the coordinator has received or refused."""
        self._channel.drop(result_id)
        if self._results.pop(result_id, None) is not None and not self._results and self._phase == "sending":
            newest = next(reversed(self._tasks.values()), None)
            self._phase = "idle" if newest is None or newest.answered else "waiting"  # a task came before the late answer

    def _task(self, header: Header) -> None:
        known = self._tasks.get(header.id)
        if known is not None and (known.answered or self._phase != "idle"):
            self._channel.ignore(header.id)
            self._acknowledge(header.id)
            return
        template = self._template(header.task)
        if template is None:
            raise WireError("unknown-task", f"no task {header.task!r} in this job")
        match_template(header.tensors, template)
        self._task_begun = time.monotonic()
        complete = self._channel.begin(header)
        if complete is not None:
            self._deliver(complete)
        elif self._phase == "idle":
            self.heartbeat("receiving")

    def _deliver(self, complete: Assembly) -> None:
        header = complete.header
        tensors = checked(complete, self._check, header.task)
        remember(self._tasks, header.id, _Task(header.round, header.task))
        self._phase = self._told_phase = "waiting"
        self._unacknowledged = header.id, time.monotonic() + self._times.ack_delay_s
        event = ClientEvent(
            "task",
            header.id,
            header.round,
            header.task,
            tensors,
            blake3=header.blake3,
            begun=self._task_begun,
            arrived=time.monotonic(),
        )
        self._events.append(event)

    def _acknowledge(self, task_id: str) -> None:
        """Say that a task has arrived, and the worker's phase with it."""
        self._unacknowledged, self._told_phase = None, self._phase
        self._channel.say("ACK", parent=task_id, code=self._phase)

    def _refuse(self, header: Header | None, error: WireError) -> None:
        """Count and log a broken message; report it to the coordinator if it belongs to a task."""
        self._message_log.failed("coordinator", error)
        if header is None or not self.welcomed or header.kind not in ("TASK", "CHUNK") or error.code in PASSING:
            return
        about = header.parent if header.kind == "CHUNK" else header.id
        self._channel.ignore(about, header.index if header.kind == "CHUNK" else -1)
        self._channel.say("ERROR", parent=about, code=word(error.code), reason=plain(error.reason))
        if self._phase == "receiving":
            self.heartbeat("idle")
