"""Connection of a hostile worker: sends any frames and records all headers it receives."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.frozen import digest
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.transport import keys
from dpcfl_net.transport.channel import Stamp
from dpcfl_net.transport.messages import Header, Template, decode, encode
from dpcfl_net.transport.sockets import Link, dial, join_curve, require_safe

T = TypeVar("T")
SEND_S = 60.0  # for the other side to make room for one message
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


@dataclass(frozen=True)
class Target:
    """Target of an attack.

    Attributes:
        connect: "tcp://host:port" of the coordinator, or of the client's aggregator.
        run: Run id, hex.
        job: Hash of the job, hex.
        client: Client id that the keys belong to.
        other: Another client id.
        releases: Tensors of a release by task name.
        security: "curve" or "none".
        server_key: Public key of the listening side, z85.
        keys: The client's (public, secret) pair, z85.
    """

    connect: str
    run: str
    job: str
    client: int
    other: int
    releases: Mapping[str, Template] = field(default_factory=dict)
    security: str = "curve"
    server_key: str = ""
    keys: tuple[str, str] = ("", "")

    @classmethod
    def of(cls, protocol: Protocol, client: int, connect: str, key_folder: Path) -> Target:
        """Create the target for a client of a job.

        Args:
            protocol: The job's protocol.
            client: Client id.
            connect: Address of the coordinator, or of the client's aggregator.
            key_folder: Folder of all keys.

        Raises:
            KeyError: If the client is not in the roster.
            ConfigError: If the address is malformed, or a key cannot be read.
        """
        from dpcfl_net.algorithms.base import algorithm_of
        from dpcfl_net.federation.capabilities import client_steps
        from dpcfl_net.federation.message_encoding import MessageEncoding
        from dpcfl_net.transport.keys import client_key

        require_safe(connect, "curve")  # the form of the address; a step may connect without encryption
        algorithm, name = algorithm_of(protocol), client_key(protocol.client(client).id)
        encoding = MessageEncoding(algorithm)
        return cls(
            connect,
            protocol.run,
            digest(protocol),
            client,
            next((entry.id for entry in protocol.roster if entry.id != client), client),
            {task: encoding.release_template(step) for task, step in client_steps(algorithm).items()},
            protocol.security,
            protocol.server_key(client),
            (keys.read_public(key_folder, name), keys.read_secret(key_folder, name)),
        )


class HostileConnection:
    """One DEALER socket with its own context.

    Args:
        target: Target of the attack.
        keys: CURVE pair in place of the target's.
        security: Security in place of the target's.
        routing_id: Routing id to request, which no honest client does.

    Attributes:
        heard: Headers received.
        sent: Short messages sent, for replay.
        closed: "" while connected, "handshake" if rejected, "cut" if ended by the other side, "stalled" if it takes no more messages.
        reached: True once something at the address has accepted a connection.
    """

    def __init__(
        self, target: Target, keys: tuple[str, str] | None = None, security: str | None = None, routing_id: bytes = b""
    ) -> None:
        self.target, self.stamp = target, Stamp(target.run, target.job)
        self.heard: list[Header] = []
        self.sent: list[list[bytes]] = []
        self.closed, self.reached = "", False
        self._through = False
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        if routing_id:
            self.socket.routing_id = routing_id
        link = Link(target.run, target.job, keys or target.keys, target.server_key, security or target.security)
        join_curve(self.socket, link)
        self._monitor = self.socket.get_monitor_socket()
        try:
            dial(self.socket, target.connect)
        except ConfigError:
            self.close()
            raise

    def say(self, kind: str, chunk: bytes | memoryview | None = None, **fields: Any) -> Header:
        """Send a well-formed message and return its header."""
        header = self.stamp.header(kind=kind, **fields)
        self.send([encode(header)] if chunk is None else [encode(header), chunk])
        return header

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Send any frames as one message unless the connection has ended; waits at most SEND_S seconds for room."""
        if sum(len(frame) for frame in frames) < 1 << 16:
            self.sent.append([bytes(frame) for frame in frames])
        deadline = time.monotonic() + SEND_S
        while not self.closed:
            try:
                self.socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
            except zmq.Again:  # a full queue, or a handshake that has just failed
                self.listen(0.01)
                if time.monotonic() > deadline:  # as for a server that is stopped
                    self.closed = self.closed or "stalled"
            else:
                return

    def listen(self, timeout_s: float = 0.0) -> None:
        """Read all messages, waiting for at most `timeout_s` seconds for the first."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.poll(int(timeout_s * 1000))
        while self.socket.poll(0):
            self.heard.append(decode(self.socket.recv_multipart()[0]))
        while self._monitor.poll(0):
            self._note(int(recv_monitor_message(self._monitor)["event"]))

    def wait(self, found: Callable[[], T], limit_s: float) -> T:
        """Listen until `found` returns a true value, the connection ends or `limit_s` seconds pass; returns its last value."""
        deadline = time.monotonic() + limit_s
        while not (got := found()) and not self.closed and time.monotonic() < deadline:
            self.listen(min(0.1, max(0.0, deadline - time.monotonic())))
        return got or found()

    def hears(self, **wanted: Any) -> list[Header]:
        """Return all received headers with the given field values."""
        self.listen()
        return [header for header in self.heard if all(getattr(header, name) == value for name, value in wanted.items())]

    def close(self) -> None:
        """Close the connection immediately."""
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> HostileConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, event: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self.reached = True
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._through = True
        elif event in _HANDSHAKE_FAILED:
            self.closed = self.closed or "handshake"
        elif event == zmq.EVENT_DISCONNECTED:
            self.closed = self.closed or ("cut" if self._through else "handshake")
