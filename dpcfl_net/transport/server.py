"""The coordinator's end of the wire: one ROUTER socket for all workers, none of them trusted."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from dpcfl_net.transport.channel import PASSING, remember
from dpcfl_net.transport.connections import Connections, keys_of
from dpcfl_net.transport.faults import FaultInjector
from dpcfl_net.transport.message_log import MessageLog
from dpcfl_net.transport.messages import Header, Template, WireError, decode, plain, word
from dpcfl_net.transport.open_tasks import OpenTasks
from dpcfl_net.transport.payload import Payload, as_payload
from dpcfl_net.transport.peers import Peer, ServerEvent
from dpcfl_net.transport.server_line import ServerLine
from dpcfl_net.transport.sockets import Arrived, Link

FRESH_BEATS = 5  # missed heartbeats after which a client's phase is outdated
FAILURES = 200  # broken messages after which a connection is cut
LONGEST_WAIT_S = 0.25  # between looks at what the threads of the socket report
BLOCKED_WAIT_S = 0.02  # while a connection takes no more


@dataclass(frozen=True)
class ServerTimes:
    """Intervals of a ServerEndpoint, in seconds.

    Attributes:
        heartbeat_s: Interval of heartbeats.
        resend_s: Time without progress after which a task is sent again to a client that does not work on it; it doubles with
            each repetition.
    """

    heartbeat_s: float = 2.0
    resend_s: float = 2.0


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
        times: Intervals.

    Attributes:
        ready: Connected clients.
        failures: Number of broken messages by code.
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
        times: ServerTimes = ServerTimes(),
    ) -> None:
        self._log, self._times, self._curve = log or MessageLog(), times, link.security == "curve"
        self.failures = self._log.failures
        self._events: list[ServerEvent] = []
        self._route_failures: OrderedDict[bytes, int] = OrderedDict()
        self._waking: dict[int, Peer] = {}  # clients for which something waits to be sent
        self._tasks = OpenTasks(result_template, check, self._log, self._events, times.resend_s)
        by_key = keys_of(clients) if self._curve else None
        self._line = ServerLine(bind, link, clients.values(), self._log, faults, self._left)
        self._connections = Connections(by_key, self._line, self._log, self._events, times.heartbeat_s)
        self._peers = self._connections.peers
        self._peers |= {client: Peer(client, self._line.stamp, self._send, self._wake) for client in sorted(clients)}
        self.ready, self.address = self._connections.ready, self._line.address

    @property
    def bytes_up(self) -> int:
        """Bytes received."""
        return self._line.bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes sent."""
        return self._line.bytes_down

    @property
    def phases(self) -> dict[int, str]:
        """Last reported phase of each connected client: idle, receiving, waiting, computing or sending."""
        return {client: self._peers[client].phase for client in sorted(self.ready)}

    def waits(self, client: int) -> bool:
        """Return True if a client has recently reported that it waits for a core of its host."""
        peer = self._peers[client]
        fresh = time.monotonic() - peer.heard < FRESH_BEATS * self._times.heartbeat_s
        return client in self.ready and peer.phase == "waiting" and fresh

    def send_task(self, client: int, round: int, task: str, tensors: Payload | Mapping[str, np.ndarray]) -> str:
        """Give a client a task in place of its open one; the next `poll` sends it.

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
        self._line.begin(round)
        return self._tasks.open(self._peers[client], round, task, as_payload(tensors))

    def cancel(self, client: int) -> None:
        """Close the client's open task; a later answer is acknowledged, reported as "late" and set aside."""
        self._tasks.cancel(self._peers[client])

    def poll(self, timeout_s: float) -> list[ServerEvent]:
        """Move messages; return at once on an event.

        Args:
            timeout_s: Longest wait in seconds.

        Returns:
            Events since the last call.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._line.read(self._connections.client_of, self._handle)  # first: an acknowledgement may have arrived
            blocked = self._tend()
            now = time.monotonic()
            if self._events or now >= deadline:
                found = self._events.copy()
                self._events.clear()
                return found
            due = min(deadline, self._connections.next_beat, self._tasks.next_look, now + LONGEST_WAIT_S)
            self._line.wait(min(due - now, BLOCKED_WAIT_S) if blocked else due - now)

    def bye(self, client: int | None = None) -> None:
        """Tell a client, or all connected ones, to leave."""
        for receiver in sorted(self.ready if client is None else self.ready & {client}):
            self._peers[receiver].channel.say("BYE")
        self._pump()

    def close(self, abort: bool = False) -> None:
        """Close the socket; queued messages are sent for up to 5 s unless `abort`."""
        self._line.close(abort)

    def __enter__(self) -> ServerEndpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(abort=kind is not None)

    def _send(self, peer: Peer, header: Header, data: bytes, chunk: memoryview | None) -> bool:
        """Pass a client's message to the socket; False if the client's queue is full."""
        return self._line.send(peer, header, data, chunk)

    def _wake(self, peer: Peer) -> None:
        self._waking[peer.client] = peer

    def _left(self, peer: Peer) -> None:
        self._connections.left(peer)

    def _tend(self) -> bool:
        """Send heartbeats (which detect lost clients), repetitions and all that waits; True if messages are left."""
        now = time.monotonic()
        held = self._line.release()
        self._connections.beat(now)
        self._tasks.repeat(self._peers, now)
        blocked = self._pump()
        self._line.tend()  # after the messages, which it writes
        return blocked or held

    def _pump(self) -> bool:
        """Send queued messages; True if the socket refused one."""
        peers, self._waking = self._waking, {}
        self._waking |= {client: peer for client, peer in peers.items() if not peer.channel.pump()}
        return bool(self._waking)

    def _handle(self, arrived: Arrived) -> None:
        """Check one message in the order of the threat model and act on it; messages of a cut connection are dropped."""
        if self._route_failures.get(arrived.route, 0) > FAILURES:
            return
        header: Header | None = None
        client = self._connections.client_of(arrived)
        try:
            if self._curve and client is None:
                raise WireError("unknown-key", "a message without an authenticated key of the roster")
            arrived.require_frames()
            header = decode(arrived.header)
            self._log.crossed("up", _name(client), arrived.header, arrived.chunk)
            self._line.stamp.require_same(header)
            arrived.require_frames_of(header.kind)
            if header.kind == "HELLO":
                joined = self._connections.hello(arrived.route, client, header)
                if joined is not None:
                    self._tasks.connected(joined)
            else:
                self._act(self._connections.known(arrived.route, client, header), header, arrived.chunk)
        except WireError as error:
            self._refuse(arrived, client, header, error)

    def _act(self, peer: Peer, header: Header, chunk: memoryview | None) -> None:
        kind = header.kind
        if kind == "RESULT":
            self._tasks.answer(peer, header)
        elif kind == "CHUNK" and chunk is not None:
            complete = peer.channel.take(header, chunk)
            if complete is not None:
                self._tasks.deliver(peer, complete)
        elif kind == "CREDIT":
            peer.channel.credit(header.parent, header.index)
        elif kind == "ACK":
            self._tasks.acknowledged(peer, header)
            if header.code:
                self._note_phase(peer, header.code)
        elif kind == "HEARTBEAT":
            self._note_phase(peer, header.code)
        elif kind == "ERROR":
            self._client_refused(peer, header)
        elif kind == "BYE":
            self._connections.left(peer)
        else:
            raise WireError("kind", f"a client does not send {kind}")

    def _note_phase(self, peer: Peer, phase: str) -> None:
        if phase != peer.phase:
            peer.phase = phase
            self._events.append(ServerEvent("phase", peer.client, phase=phase))
            if phase == "idle":
                self._tasks.look(peer)

    def _client_refused(self, peer: Peer, header: Header) -> None:
        """Handle a client's ERROR."""
        self._tasks.client_refused(peer, header)

    def _refuse(self, arrived: Arrived, client: int | None, header: Header | None, error: WireError) -> None:
        """Count, log and answer a broken message; close the task that it answered."""
        peer = self._peers.get(client) if client is not None else None
        if peer is not None and peer.route != arrived.route:
            peer = None
        self._log.failed(_name(client), error)
        about = "" if header is None else header.parent if header.kind == "CHUNK" else header.id
        remember(self._route_failures, arrived.route, self._route_failures.get(arrived.route, 0) + 1)
        if self._route_failures[arrived.route] > FAILURES and self._line.is_there(arrived.route):
            self._line.cut(arrived)  # only a live connection: the descriptor of an ended one may be reused
        if header is None or header.kind != "ERROR":
            answer = {"kind": "ERROR", "parent": about, "code": word(error.code), "reason": plain(error.reason)}
            if peer is not None:
                peer.channel.say(**answer)
            else:
                self._line.answer(arrived.route, **answer)
        if peer is None:
            self._events.append(ServerEvent("failed", client, code=error.code, reason=error.reason))
            return
        if error.code in PASSING:
            about = ""  # the message that is arriving goes on
        if about and header is not None:
            peer.channel.ignore(about, header.index if header.kind == "CHUNK" else -1)
        self._tasks.refused(peer, about, error)


def _name(client: int | None) -> str:
    return "unknown" if client is None else f"client {client}"
