"""A worker's end of the wire: one DEALER to a coordinator that is checked as strictly as it checks the worker."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from dpcfl_net.core.clock import AwakeClock
from dpcfl_net.core.errors import ConfigError, Refused, RunFailed
from dpcfl_net.transport.channel import Channel, Stamp, Stream, remember
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
from dpcfl_net.transport.sockets import BYE_LINGER_MS, Arrived, dial, join_curve, new_socket, receive, require_safe

BATCH = 256  # messages read before what waits is sent
HANDSHAKES = 5  # failed ones in a row after which the server is taken for another one
HELLO_S = 1.0
PASSING = ("no-hello", "boot", "sequence", "stale-boot")  # what a message meets that crosses a reconnection: it is sent again
_FAILED = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)


@dataclass(frozen=True)
class ClientEvent:
    """What `poll` reports: welcome (after each new connection), a task, a message that the coordinator turned down, bye."""

    kind: Literal["welcome", "task", "error", "bye"]
    id: str = ""
    round: int = 0
    task: str = ""
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    code: str = ""
    reason: str = ""
    arrived: float = 0.0  # of a task: when it was complete, by the monotonic clock


@dataclass
class _Task:
    """A task that was delivered; `answered` once `send_result` was called for it."""

    round: int
    task: str
    answered: bool = False


class ClientEndpoint:
    """Takes tasks, sends results, each until it is acknowledged; on a new connection it says HELLO with a new boot id.

    connect: the coordinator's "tcp://host:port". run, job: hex; a coordinator with others is left.
    task_template: task name -> the tensors it must hold, None for a task that does not exist.
    server_key: the coordinator's public CURVE key; keys: this side's (public, secret) pair.
    check: called with (task name, tensors) before a task is delivered; raises Refused to turn it down.
    One thread at a time may use it: the worker's I/O thread, with `register` to be woken by other threads.
    """

    def __init__(
        self,
        connect: str,
        *,
        run: str,
        job: str,
        client: int,
        task_template: Callable[[str], Template | None],
        security: str = "curve",
        server_key: str | None = None,
        keys: tuple[str, str] | None = None,
        check: Callable[[str, dict[str, np.ndarray]], None] | None = None,
        on_failure: Callable[[dict[str, Any]], None] | None = None,
        context: zmq.Context | None = None,
        heartbeat_s: float = 2.0,
        resend_s: float = 30.0,
        orphan_timeout_s: float = 300.0,
        handshake_limit_s: float = 30.0,
        duplicate_grace_s: float = 35.0,
    ) -> None:
        require_safe(connect, security)
        if security == "curve" and (keys is None or server_key is None):
            raise ConfigError("a worker with security curve needs its key pair and the coordinator's public key")
        self.welcomed = False
        self._message_log = MessageLog(on_failure)
        self.failures = self._message_log.failures
        self._client, self._template, self._check = client, task_template, check
        self._heartbeat_s, self._resend_s, self._orphan_s = heartbeat_s, resend_s, orphan_timeout_s
        self._handshake_s, self._grace_s = handshake_limit_s, duplicate_grace_s
        self._stamp = Stamp(run, job)
        self._channel = Channel(self._stamp, self._send)
        self._phase = "idle"
        self._tasks: OrderedDict[str, _Task] = OrderedDict()
        self._results: dict[str, Stream] = {}
        self._events: list[ClientEvent] = []
        self._sources: dict[Any, Callable[[], None]] = {}
        self._connected, self._server_boot, self._hellos = False, "", set[str]()
        self._handshakes, self._handshake_since, self._duplicate_since = 0, 0.0, 0.0
        self._next_heartbeat = self._next_hello = 0.0
        self._clock = AwakeClock()  # a pause of this process is no silence of the coordinator
        self._heard = self._clock.now()
        self._own_context = context is None
        self._context = context or zmq.Context()
        self._socket = new_socket(self._context, zmq.DEALER)
        if keys is not None and server_key is not None and security == "curve":
            join_curve(self._socket, keys, server_key)
        self._monitor = self._socket.get_monitor_socket()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        dial(self._socket, connect)

    # the owner's side

    @property
    def pending(self) -> int:
        """Results that the coordinator has not yet acknowledged."""
        return len(self._results)

    def poll(self, timeout_s: float) -> list[ClientEvent]:
        """Move messages for at most `timeout_s` seconds; returns at once on news or when a source is readable.

        Raises Refused "handshake" if no coordinator with the right key is there or it does not know this key, Refused
        with the coordinator's code if it turns HELLO down, and RunFailed if nothing was heard for orphan_timeout_s.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            blocked = self._tend()
            wait = max(0.0, min(deadline - time.monotonic(), 0.02 if blocked else 0.25))
            readable = dict(self._poller.poll(0 if self._events else int(wait * 1000)))
            if self._monitor in readable:
                self._watch()
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
        """Answer a delivered task: "release" with tensors (bytes: as `tensors.pack` made them), "lost", "stale" or "refused"
        without. ValueError for a task that was never delivered."""
        task = self._tasks.get(task_id)
        if task is None or status not in STATUSES:
            raise ValueError(f"no task {task_id} was delivered, or {status!r} is no status")
        task.answered = True
        fields = {"kind": "RESULT", "parent": task_id, "round": task.round, "task": task.task}
        stream = Stream({**fields, "code": status, "reason": plain(reason)}, as_payload(release))
        self._results[stream.id] = stream
        self.heartbeat("sending")
        if self.welcomed:
            self._channel.push(stream)
        self._pump()

    def heartbeat(self, phase: str) -> None:
        """Say what the worker is doing; a delivered task and an acknowledged result set it by themselves."""
        if phase not in PHASES:
            raise ValueError(f"a phase is one of {', '.join(PHASES)}, got {phase!r}")
        if phase != self._phase:
            self._phase = phase
            self._next_heartbeat = 0.0

    def register(self, source: Any, callback: Callable[[], None]) -> None:
        """Wake `poll` when the descriptor or socket is readable and call back; the callback must read it empty."""
        key = source if isinstance(source, (int, zmq.Socket)) else source.fileno()
        self._poller.register(key, zmq.POLLIN)
        self._sources[key] = callback

    def unregister(self, source: Any) -> None:
        key = source if isinstance(source, (int, zmq.Socket)) else source.fileno()
        self._poller.unregister(key)
        del self._sources[key]

    def bye(self) -> None:
        """Tell the coordinator that this worker leaves."""
        if self.welcomed:
            self._channel.say("BYE")
            self._pump()

    def close(self, abort: bool = False) -> None:
        """Close the socket; what is queued still leaves for up to 5 s unless `abort`."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0 if abort else BYE_LINGER_MS)
        if self._own_context:
            self._context.term()

    def __enter__(self) -> ClientEndpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(abort=kind is not None)

    # connection

    def _watch(self) -> None:
        """Read what the socket reports about its connection."""
        while self._monitor.poll(0):
            event = int(recv_monitor_message(self._monitor)["event"])
            if event == zmq.EVENT_CONNECTED and not self._handshake_since:
                self._handshake_since = time.monotonic()
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._handshakes, self._handshake_since = 0, 0.0
                self._greet()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise Refused("handshake", "the coordinator does not know this worker's key")
            elif event in _FAILED:
                self._handshakes += 1
            elif event == zmq.EVENT_CLOSED:  # nobody listens there (any more): a coordinator that is not up is no wrong one
                self._handshakes, self._handshake_since = 0, 0.0
            elif event == zmq.EVENT_DISCONNECTED:
                self._connected = self.welcomed = False

    def _greet(self) -> None:
        """A new connection: new boot id, HELLO, and nothing of the old connection counts any more."""
        self._stamp.renew()
        self._channel.restart()
        self._connected, self.welcomed, self._server_boot = True, False, ""
        self._hellos.clear()
        self._next_hello = 0.0

    def _hello(self, now: float) -> None:
        self._next_hello = now + HELLO_S
        header = self._stamp.header(kind="HELLO", client=self._client)
        if self._send(header, encode(header), None):
            self._hellos.add(header.id)

    def _tend(self) -> bool:
        """What time brings: limits, HELLO, heartbeats, repetitions; then send. True if the socket refused something."""
        now = time.monotonic()
        stuck = self._handshake_since and now - self._handshake_since > self._handshake_s
        if self._handshakes >= HANDSHAKES or stuck:
            raise Refused("handshake", "no coordinator with the expected key answers at this address")
        if self._clock.now() - self._heard > self._orphan_s:
            raise RunFailed(f"nothing was heard from the coordinator for {self._orphan_s:g} s")
        if self._connected and not self.welcomed and now >= self._next_hello:
            self._hello(now)
        if self.welcomed and now >= self._next_heartbeat:
            self._next_heartbeat = now + self._heartbeat_s
            self._channel.say("HEARTBEAT", code=self._phase)
        if self.welcomed:
            for stream in self._results.values():
                if not self._channel.sending(stream.id) and now - stream.handed_over > self._resend_s:
                    self._channel.push(stream)
        return self._pump()

    def _pump(self) -> bool:
        return self.welcomed and not self._channel.pump()

    def _send(self, header: Header, data: bytes, chunk: memoryview | None) -> bool:
        try:
            self._socket.send_multipart([data] if chunk is None else [data, chunk], zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return False
        return True

    # in

    def _read(self) -> None:
        for _ in range(BATCH):
            arrived = receive(self._socket)
            if arrived is None:
                return
            self._handle(arrived)

    def _handle(self, arrived: Arrived) -> None:
        header: Header | None = None
        try:
            if arrived.odd:
                raise WireError("multipart", "a message is a header, or a header and one chunk")
            header = decode(arrived.header)
            if not self.welcomed:
                self._answered_hello(header)
                return
            self._stamp.require_same(header)
            if header.boot != self._server_boot:
                raise WireError("boot", "a message of another boot than the connection's WELCOME")
            self._channel.admit(header)
            if (header.kind == "CHUNK") != (arrived.chunk is not None):
                raise WireError("multipart", f"a {header.kind} with a wrong number of frames")
            self._heard = self._clock.now()
            self._act(header, arrived.chunk)
        except WireError as error:
            self._refuse(header, error)

    def _answered_hello(self, header: Header) -> None:
        """Before WELCOME only an answer to this boot's HELLO counts; anything else is left of an older connection."""
        if header.kind not in ("WELCOME", "ERROR") or header.parent not in self._hellos:
            raise WireError("no-welcome", f"a {header.kind} before WELCOME")
        if header.kind == "ERROR" and header.code == "duplicate":
            now = time.monotonic()
            self._duplicate_since = self._duplicate_since or now
            if now - self._duplicate_since < self._grace_s:
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
        kind = header.kind
        if kind == "TASK":
            self._task(header)
        elif kind == "CHUNK" and chunk is not None:
            complete = self._channel.take(header, chunk)
            if complete is not None:
                self._deliver(complete)
        elif kind == "CREDIT":
            self._channel.credit(header.parent, header.index)
        elif kind == "ACK":
            self._settle(header.parent)
        elif kind == "ERROR":
            if header.code not in PASSING:
                self._settle(header.parent)
                self._events.append(ClientEvent("error", header.parent, code=header.code, reason=header.reason))
        elif kind == "BYE":
            self._events.append(ClientEvent("bye"))
        elif kind not in ("HEARTBEAT", "WELCOME"):
            raise WireError("kind", f"a coordinator does not send {kind}")

    def _settle(self, result_id: str) -> None:
        """The coordinator has the result, or does not want it: it need not be kept."""
        self._channel.drop(result_id)
        if self._results.pop(result_id, None) is not None and not self._results and self._phase == "sending":
            self.heartbeat("idle")

    def _task(self, header: Header) -> None:
        known = self._tasks.get(header.id)
        if known is not None and (known.answered or self._phase != "idle"):
            self._channel.ignore(header.id)
            self._channel.say("ACK", parent=header.id)
            return
        template = self._template(header.task)
        if template is None:
            raise WireError("unknown-task", f"no task {header.task!r} in this job")
        match_template(header, template)
        complete = self._channel.begin(header)
        if complete is not None:
            self._deliver(complete)
        elif self._phase == "idle":
            self.heartbeat("receiving")

    def _deliver(self, complete: Assembly) -> None:
        header = complete.header
        tensors = checked(complete, self._check, header.task)
        remember(self._tasks, header.id, _Task(header.round, header.task))
        self._channel.say("ACK", parent=header.id)
        self.heartbeat("waiting")
        self._events.append(ClientEvent("task", header.id, header.round, header.task, tensors, arrived=time.monotonic()))

    def _refuse(self, header: Header | None, error: WireError) -> None:
        """Count and log a broken message; tell the coordinator if it was a task, so that it need not wait."""
        self._message_log.failed("coordinator", error)
        if header is None or not self.welcomed or header.kind not in ("TASK", "CHUNK") or error.code in PASSING:
            return
        about = header.parent if header.kind == "CHUNK" else header.id
        self._channel.ignore(about)
        self._channel.say("ERROR", parent=about, code=word(error.code), reason=plain(error.reason))
        if self._phase == "receiving":
            self.heartbeat("idle")
