"""The coordinator's end of the wire: one ROUTER socket for all workers, none of them trusted."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType

import numpy as np
import zmq

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.transport.channel import DAMAGED, PASSING, REPEATS, Stamp, Stream, remember
from dpcfl_net.transport.faults import FaultInjector
from dpcfl_net.transport.message_log import CLIENT_PREFIX, MessageLog
from dpcfl_net.transport.messages import Header, Template, WireError, decode, encode, match_template, plain, word
from dpcfl_net.transport.payload import Assembly, Payload, as_payload, checked
from dpcfl_net.transport.peers import OpenTask, Peer, ServerEvent
from dpcfl_net.transport.sockets import BYE_LINGER_MS, Arrived, Link, Listener, receive

Frame = bytes | memoryview
BATCH = 256  # messages read before queued messages are sent
FRESH_BEATS = 5  # missed heartbeats after which a client's phase is outdated
FAILURES = 200  # broken messages after which a connection is cut


class ServerEndpoint:
    """Sends tasks and receives results.

    Every broken rule is counted in `failures` by its code, logged and reported to the sender; no message from outside raises.
    Not thread-safe.

    Args:
        bind: "tcp://host:port", port * or 0 for a free one.
        link: Run, job, keys and security.
        clients: Public CURVE key by client id, z85; unused with security "none".
        result_template: Returns the tensors of a "release" by the name of its task; other answers hold none.
        check: Called with (client, task name, tensors) before a result is accepted; raises Refused to reject it.
        log: Receives failures, messages and the transcript.
        faults: Injects faults into the messages of known clients, for tests; None: no faults.
        heartbeat_s: Interval of heartbeats, seconds.
        resend_s: Time without progress after which a task is sent again to a client that does not work on it, seconds; it
            doubles with each repetition.

    Attributes:
        ready: Connected clients.
        failures: Number of broken messages by code.
        bytes_up: Bytes received.
        bytes_down: Bytes sent.
        address: Bound address with its real port.

    Raises:
        ConfigError: For an address that is taken or, with security "none", not loopback.
    """

    def __init__(
        self,
        bind: str,
        link: Link,
        *,
        clients: Mapping[int, str],
        result_template: Callable[[str], Template | None],
        check: Callable[[int, str, dict[str, np.ndarray]], None] | None = None,
        log: MessageLog | None = None,
        faults: FaultInjector | None = None,
        heartbeat_s: float = 2.0,
        resend_s: float = 2.0,
    ) -> None:
        self.ready: set[int] = set()
        self._message_log = log or MessageLog()
        self.failures = self._message_log.failures
        self.bytes_up = self.bytes_down = 0
        self._stamp = Stamp(link.run, link.job)
        self._template, self._check, self._faults = result_template, check, faults
        self._heartbeat_s, self._resend_s = heartbeat_s, resend_s
        self._curve = link.security == "curve"
        self._by_key = {key: client for client, key in clients.items()} if self._curve else {}
        if self._curve and len(self._by_key) != len(clients):
            raise ConfigError("two clients of the roster have the same public key")
        self._by_route: dict[bytes, int] = {}
        self._route_failures: OrderedDict[bytes, int] = OrderedDict()
        self._events: list[ServerEvent] = []
        self._next_heartbeat = 0.0
        self._peers = {client: Peer(client, self._stamp, self._send) for client in sorted(clients)}
        self._listener = Listener(zmq.ROUTER, bind, link, clients.values())
        self._socket, self.address = self._listener.socket, self._listener.address

    @property
    def phases(self) -> dict[int, str]:
        """Last reported phase of each connected client: idle, receiving, waiting, computing or sending."""
        return {client: self._peers[client].phase for client in sorted(self.ready)}

    def waits(self, client: int) -> bool:
        """Return True if a client has recently reported that it waits for a core of its host."""
        peer = self._peers[client]
        return (
            client in self.ready and peer.phase == "waiting" and time.monotonic() - peer.heard < FRESH_BEATS * self._heartbeat_s
        )

    def send_task(self, client: int, round: int, task: str, tensors: Payload | Mapping[str, np.ndarray]) -> str:
        """Give a client a task in place of its open one.

        The task is kept, sent again over new connections or to an idle client, until it is answered or cancelled. A Payload may
        be shared by many clients; its arrays must not change meanwhile.

        Args:
            client: Client id.
            round: Round of the task.
            task: Name of the task.
            tensors: Tensors of the task.

        Returns:
            Message id of the task.
        """
        peer = self._peers[client]
        if self._faults is not None:
            self._faults.begin(round)
        self.cancel(client)
        stream = Stream({"kind": "TASK", "round": round, "task": task}, as_payload(tensors))
        peer.open = OpenTask(round, task, stream)
        if peer.route is not None:
            peer.channel.push(stream)
            peer.channel.pump()
        return stream.id

    def cancel(self, client: int) -> None:
        """Close the client's open task; a later answer is acknowledged, reported as "late" and set aside."""
        peer = self._peers[client]
        if peer.open is not None:
            peer.channel.drop(peer.open.id)
            remember(peer.cancelled, peer.open.id, (peer.open.round, peer.open.task))
            self._close_task(peer)

    def poll(self, timeout_s: float) -> list[ServerEvent]:
        """Move messages; return at once on an event.

        Args:
            timeout_s: Longest wait in seconds.

        Returns:
            Events since the last call.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._read()  # first: an acknowledgement may have arrived since the last read
            blocked = self._tend()
            wait = max(0.0, min(deadline - time.monotonic(), 0.02 if blocked else 0.25))
            if self._socket.poll(0 if self._events else int(wait * 1000)):
                self._read()
                self._pump()
            if self._events or time.monotonic() >= deadline:
                found, self._events = self._events, []
                return found

    def bye(self, client: int | None = None) -> None:
        """Tell a client, or all connected ones, to leave."""
        for receiver in sorted(self.ready if client is None else self.ready & {client}):
            self._peers[receiver].channel.say("BYE")
        self._pump()

    def close(self, abort: bool = False) -> None:
        """Close the socket; queued messages are sent for up to 5 s unless `abort`."""
        self._listener.close(0 if abort else BYE_LINGER_MS)
        self._message_log.tick(flush=True)

    def __enter__(self) -> ServerEndpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(abort=kind is not None)

    def _send(self, peer: Peer, header: Header, data: bytes, chunk: memoryview | None) -> bool:
        """Pass a peer's message to the socket; False if the peer's queue is full."""
        route = peer.route
        if route is None:
            return True
        if self._faults is not None:
            self._faults.carry("down", peer.client, header, data, chunk, partial(self._forward, peer, route))
        elif not self._forward(peer, route, data, chunk):
            return False
        if peer.route == route:
            self.bytes_down += len(data) + (chunk.nbytes if chunk is not None else 0)
            self._message_log.crossed("down", peer.name, data, chunk)
            self._message_log.message("down", peer.name, header, len(data) + header.size)
            if header.kind == "TASK":
                # On file before its chunks leave, so that no crash makes an answer to an unknown task.
                self._message_log.tick(flush=True)
        return True

    def _forward(self, peer: Peer, route: bytes, data: Frame, chunk: Frame | None) -> bool:
        """Pass a message to the connection that it was written for; False if its queue is full."""
        sent = self._send_to(route, data, chunk)
        if sent is None and peer.route == route:
            self._left(peer)
        return sent is not False

    def _send_to(self, route: bytes, data: Frame, chunk: Frame | None) -> bool | None:
        """True if the socket accepted it, False if the peer's queue is full, None if the peer has left."""
        try:
            self._socket.send_multipart([route, data] if chunk is None else [route, data, chunk], zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return None
            raise
        return True

    def _pump(self) -> bool:
        """Send queued messages of all peers; True if a socket refused one."""
        refused = [client for client in sorted(self.ready) if not self._peers[client].channel.pump()]
        return bool(refused)

    def _tend(self) -> bool:
        """Send heartbeats (which detect lost peers) and repetitions when due; True if messages wait."""
        now = time.monotonic()
        held = self._faults is not None and self._faults.release()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._heartbeat_s
            for client in sorted(self.ready):
                self._peers[client].channel.say("HEARTBEAT", code="idle")
        for client in sorted(self.ready):
            peer = self._peers[client]
            task = peer.open
            if task is not None and task.is_overdue(peer.phase, now, self._resend_s):
                peer.channel.repeat_overdue(task.stream)
        for error in self._listener.news():
            self._message_log.failed("unknown", error)
        self._message_log.tick()
        return self._pump() or held

    def _read(self) -> None:
        for _ in range(BATCH):
            arrived = receive(self._socket, self._listener.guard)
            if arrived is None:
                return
            self.bytes_up += arrived.header.nbytes + (arrived.chunk.nbytes if arrived.chunk is not None else 0)
            if self._faults is None:
                self._handle(arrived)
            else:
                self._handle_with_faults(self._faults, arrived)

    def _handle_with_faults(self, faults: FaultInjector, arrived: Arrived) -> None:
        """Handle a message of a known client as the faults decide; any other is handled at once."""
        client = self._client_of(arrived)
        try:
            header = decode(arrived.header) if client is not None and not arrived.malformed else None
        except WireError:
            header = None
        if client is None or header is None:
            self._handle(arrived)
            return

        def forward(data: Frame, chunk: Frame | None) -> bool:
            parts = memoryview(data), None if chunk is None else memoryview(chunk)
            self._handle(replace(arrived, header=parts[0], chunk=parts[1]))
            return True

        faults.carry("up", client, header, arrived.header, arrived.chunk, forward)

    def _client_of(self, arrived: Arrived) -> int | None:
        return self._by_key.get(arrived.user) if self._curve else self._by_route.get(arrived.route)

    def _handle(self, arrived: Arrived) -> None:
        """Check one message in the order of the threat model and act on it; messages of a cut connection are dropped."""
        if self._route_failures.get(arrived.route, 0) > FAILURES:
            return
        header: Header | None = None
        client = self._client_of(arrived)
        try:
            if self._curve and client is None:
                raise WireError("unknown-key", "a message without an authenticated key of the roster")
            if arrived.malformed:
                raise WireError("multipart", "a message is a header, or a header and one chunk")
            header = decode(arrived.header)
            self._message_log.crossed("up", self._name(client), arrived.header, arrived.chunk)
            self._stamp.require_same(header)
            if (header.kind == "CHUNK") != (arrived.chunk is not None):
                raise WireError("multipart", f"a {header.kind} with a wrong number of frames")
            if header.kind == "HELLO":
                self._hello(arrived.route, client, header)
            else:
                self._act(self._known(arrived.route, client, header), header, arrived.chunk)
        except WireError as error:
            self._refuse(arrived, client, header, error)

    def _known(self, route: bytes, client: int | None, header: Header) -> Peer:
        """Peer of a message on a connection that said HELLO, after the checks of boot and sequence."""
        peer = self._peers.get(client) if client is not None else None
        if peer is None or peer.route != route:
            raise WireError("no-hello", f"a {header.kind} before HELLO")
        if header.boot != peer.boot:
            raise WireError("boot", "a message of another boot than the connection's HELLO")
        peer.channel.admit(header)
        peer.heard = time.monotonic()
        return peer

    def _hello(self, route: bytes, client: int | None, header: Header) -> None:
        if not self._curve:
            if client not in (None, header.client):
                raise WireError("identity", f"this connection is client {client} already")
            client = header.client
        elif header.client != client:
            claim = f"claims to be client {header.client}; its key is that of client {client}"
            self._message_log.failed(self._name(client), WireError("identity", claim))
        peer = self._peers.get(client) if client is not None else None
        if peer is None:
            raise WireError("unknown-client", f"no client {client} in this job")
        if peer.route == route and peer.boot == header.boot:
            peer.channel.admit(header)
            peer.channel.say("WELCOME", parent=header.id)
            return
        if header.boot in peer.boots:
            raise WireError("stale-boot", "a boot id that was used before")
        if peer.route not in (None, route) and self._alive(peer):
            raise WireError("duplicate", f"client {client} is connected already")
        self._join(peer, route, header)

    def _alive(self, peer: Peer) -> bool:
        """True if the peer's connection still exists; if not, it is marked as left."""
        if peer.route is not None and self._there(peer.route):
            return True
        self._left(peer)
        return False

    def _there(self, route: bytes) -> bool:
        """True if a connection still exists."""
        header = self._stamp.header(kind="HEARTBEAT", code="idle")
        return self._send_to(route, encode(header), None) is not None

    def _join(self, peer: Peer, route: bytes, header: Header) -> None:
        peer.channel.restart()
        peer.route, peer.boot, peer.phase = route, header.boot, "idle"
        peer.heard = time.monotonic()
        peer.channel.sequence = header.sequence
        remember(peer.boots, header.boot, None)
        self._by_route[route] = peer.client
        self._message_log.message("up", peer.name, header, len(encode(header)))
        peer.channel.say("WELCOME", parent=header.id)
        if peer.open is not None:
            peer.open.arrived = False
            peer.channel.push(peer.open.stream)
        if peer.client not in self.ready:
            self.ready.add(peer.client)
            self._events.append(ServerEvent("joined", peer.client))

    def _left(self, peer: Peer) -> None:
        if peer.route is not None:
            self._by_route.pop(peer.route, None)
        peer.route = None
        peer.channel.restart()
        if peer.client in self.ready:
            self.ready.discard(peer.client)
            self._events.append(ServerEvent("left", peer.client))

    def _act(self, peer: Peer, header: Header, chunk: memoryview | None) -> None:
        kind = header.kind
        if kind == "RESULT":
            self._result(peer, header)
        elif kind == "CHUNK" and chunk is not None:
            complete = peer.channel.take(header, chunk)
            if complete is not None:
                self._deliver(peer, complete)
        elif kind == "CREDIT":
            peer.channel.credit(header.parent, header.index)
        elif kind == "ACK":
            peer.channel.drop(header.parent)
            if peer.open is not None and peer.open.id == header.parent:
                peer.open.arrived, peer.open.stream.moved = True, time.monotonic()
        elif kind == "HEARTBEAT":
            if header.code != peer.phase:
                peer.phase = header.code
                self._events.append(ServerEvent("phase", peer.client, phase=header.code))
        elif kind == "ERROR":
            self._client_refused(peer, header)
        elif kind == "BYE":
            self._left(peer)
        else:
            raise WireError("kind", f"a client does not send {kind}")

    def _result(self, peer: Peer, header: Header) -> None:
        if header.id in peer.delivered:
            peer.channel.ignore(header.id)
            peer.channel.say("ACK", parent=header.id)
            return
        task = peer.open
        if header.parent in peer.cancelled:
            self._set_aside(peer, header)
            return
        if task is None or header.parent != task.id:
            peer.channel.ignore(header.id)
            raise WireError("task-closed", "an answer to a task that is not open")
        peer.answering = header.id
        if (header.round, header.task) != (task.round, task.task):
            raise WireError("round", f"an answer for {header.task or 'no task'} in round {header.round}")
        match_template(header.tensors, (self._template(task.task) or {}) if header.code == "release" else {})
        complete = peer.channel.begin(header)
        if complete is not None:
            self._deliver(peer, complete)

    def _deliver(self, peer: Peer, complete: Assembly) -> None:
        header, task = complete.header, peer.open
        if header.parent in peer.cancelled:
            self._set_aside(peer, header)
            return
        if task is None or header.parent != task.id:
            raise WireError("task-closed", "the task was closed while its answer arrived")
        tensors = checked(complete, self._check if header.code == "release" else None, peer.client, task.task)
        self._close_task(peer)
        remember(peer.delivered, header.id, None)
        peer.channel.say("ACK", parent=header.id)
        size = len(encode(header)) + header.size
        self._message_log.message("up", peer.name, header, size)
        self._events.append(
            ServerEvent(
                "result",
                peer.client,
                header.round,
                header.task,
                header.parent,
                status=header.code,
                tensors=tensors,
                reason=header.reason,
                bytes=size,
            )
        )

    def _set_aside(self, peer: Peer, header: Header) -> None:
        """Acknowledge the answer to a cancelled task, so that it is not sent again; its payload is not taken."""
        if (header.round, header.task) != peer.cancelled.pop(header.parent):
            raise WireError("round", f"an answer for {header.task or 'no task'} in round {header.round}")
        remember(peer.delivered, header.id, None)
        peer.channel.ignore(header.id)
        peer.channel.say("ACK", parent=header.id)
        self._message_log.message("up", peer.name, header, len(encode(header)))
        late = ServerEvent("late", peer.client, header.round, header.task, header.parent, status=header.code)
        self._events.append(replace(late, bytes=len(encode(header)) + header.size, sha256=header.sha256))

    def _client_refused(self, peer: Peer, header: Header) -> None:
        """Handle a client's ERROR; if it concerns the open task, no answer will come, unless the task arrived damaged."""
        error = WireError(header.code, header.reason)
        self._message_log.failed(peer.name, WireError(f"{CLIENT_PREFIX}{header.code}"[:64], header.reason))
        concerned = peer.open is not None and peer.open.id == header.parent
        again = concerned and self._once_more(peer, header.code)
        if again and peer.open is not None:
            peer.channel.repeat(peer.open.stream)
        self._events.append(self._failed(peer, error, concerned and not again))

    def _once_more(self, peer: Peer, code: str) -> bool:
        """Return True if the open task stays open after damage, so that the damaged message is sent again."""
        if peer.open is None or code not in DAMAGED or peer.open.damaged >= REPEATS:
            return False
        peer.open.damaged += 1
        return True

    def _refuse(self, arrived: Arrived, client: int | None, header: Header | None, error: WireError) -> None:
        """Count, log and answer a broken message; close the task that it answered."""
        peer = self._peers.get(client) if client is not None else None
        if peer is not None and peer.route != arrived.route:
            peer = None
        self._message_log.failed(self._name(client), error)
        about = "" if header is None else header.parent if header.kind == "CHUNK" else header.id
        remember(self._route_failures, arrived.route, self._route_failures.get(arrived.route, 0) + 1)
        if self._route_failures[arrived.route] > FAILURES and self._there(arrived.route):
            self._listener.guard.cut(arrived.fd)  # only a live connection: the descriptor of an ended one may be reused
        if header is None or header.kind != "ERROR":
            answer = {"kind": "ERROR", "parent": about, "code": word(error.code), "reason": plain(error.reason)}
            if peer is not None:
                peer.channel.say(**answer)
            else:
                self._send_to(arrived.route, encode(self._stamp.header(**answer)), None)
        if peer is None:
            self._events.append(ServerEvent("failed", client, code=error.code, reason=error.reason))
            return
        if error.code in PASSING:
            about = ""  # the message that is arriving goes on
        if about and header is not None:
            peer.channel.ignore(about, header.index if header.kind == "CHUNK" else -1)
        concerned = bool(about) and about == peer.answering and peer.open is not None
        self._events.append(self._failed(peer, error, concerned and not self._once_more(peer, error.code)))

    def _failed(self, peer: Peer, error: WireError, closes: bool) -> ServerEvent:
        task = peer.open
        if task is None or not closes:
            return ServerEvent("failed", peer.client, code=error.code, reason=error.reason)
        peer.channel.drop(task.id)
        self._close_task(peer)
        return ServerEvent("failed", peer.client, task.round, task.task, task.id, code=error.code, reason=error.reason)

    def _close_task(self, peer: Peer) -> None:
        peer.open, peer.answering = None, ""

    def _name(self, client: int | None) -> str:
        return "unknown" if client is None else f"client {client}"
