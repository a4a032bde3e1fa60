"""A connection that says what it is given, well-formed or not, and keeps all that it hears: the hostile worker's mouth."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from dpcfl_net.core.protocol import Protocol, digest
from dpcfl_net.transport import keys
from dpcfl_net.transport.channel import Stamp
from dpcfl_net.transport.messages import Header, Template, decode, encode, resolve
from dpcfl_net.transport.sockets import join_curve

Found = TypeVar("Found")
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


@dataclass(frozen=True)
class Target:
    """Whom to attack, and as whom.

    connect: the coordinator's "tcp://host:port". run, job: hex. client: the roster's number that the keys belong to; other:
    one that they do not. releases: task name -> the tensors that a release must hold. keys: (public, secret), z85.
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
        """A client of a job; KeyError for one that is not in its roster."""
        from dpcfl_net.algorithms.base import algorithm_of
        from dpcfl_net.federation.capabilities import client_steps, tensor_sides
        from dpcfl_net.transport.keys import client_key

        algorithm, name = algorithm_of(protocol), client_key(protocol.client(client).id)
        return cls(
            connect,
            protocol.run,
            digest(protocol),
            client,
            next((entry.id for entry in protocol.roster if entry.id != client), client),
            {task: resolve(step.gives, tensor_sides(algorithm)) for task, step in client_steps(algorithm).items()},
            protocol.security,
            protocol.coordinator_key,
            (keys.read_public(key_folder, name), keys.read_secret(key_folder, name)),
        )


class HostileConnection:
    """One DEALER socket with a context of its own. `heard` holds every header that came, `closed` says how it ended.

    keys, security: in place of the target's; routing_id: asked for, as no honest client does. closed: "" while nothing happened to the connection, "handshake" if it was
    never let in, "cut" if it was ended by the other side.
    """

    def __init__(
        self, target: Target, keys: tuple[str, str] | None = None, security: str | None = None, routing_id: bytes = b""
    ) -> None:
        self.target, self.stamp = target, Stamp(target.run, target.job)
        self.heard: list[Header] = []
        self.sent: list[list[bytes]] = []
        self.closed = ""
        self._through = False
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        if routing_id:
            self.socket.routing_id = routing_id
        if (security or target.security) == "curve":
            join_curve(self.socket, keys or target.keys, target.server_key)
        self._monitor = self.socket.get_monitor_socket()
        self.socket.connect(target.connect)

    def say(self, kind: str, chunk: bytes | memoryview | None = None, **fields: Any) -> Header:
        """Send one well-formed message, with a header of this line's own stamp."""
        header = self.stamp.header(kind=kind, **fields)
        self.send([encode(header)] if chunk is None else [encode(header), chunk])
        return header

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Send one message of any frames, unless the connection has ended; short ones are kept in `sent`, to be replayed."""
        if sum(len(frame) for frame in frames) < 1 << 16:
            self.sent.append([bytes(frame) for frame in frames])
        while not self.closed:
            try:
                self.socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
            except zmq.Again:  # a full queue, or a handshake that has just failed
                self.listen(0.01)
            else:
                return

    def listen(self, timeout_s: float = 0.0) -> None:
        """Read all that is there, after waiting for something for at most `timeout_s` seconds."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.poll(int(timeout_s * 1000))
        while self.socket.poll(0):
            self.heard.append(decode(self.socket.recv_multipart()[0]))
        while self._monitor.poll(0):
            self._note(int(recv_monitor_message(self._monitor)["event"]))

    def wait(self, found: Callable[[], Found], limit_s: float) -> Found:
        """Listen until `found` finds something, the connection has ended, or time is up; what it finds then."""
        deadline = time.monotonic() + limit_s
        while not (got := found()) and not self.closed and time.monotonic() < deadline:
            self.listen(min(0.1, max(0.0, deadline - time.monotonic())))
        return got or found()

    def hears(self, **wanted: Any) -> list[Header]:
        """All headers heard so far with these fields."""
        self.listen()
        return [header for header in self.heard if all(getattr(header, name) == value for name, value in wanted.items())]

    def close(self) -> None:
        """End the connection at once."""
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> HostileConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._through = True
        elif event in _HANDSHAKE_FAILED:
            self.closed = self.closed or "handshake"
        elif event == zmq.EVENT_DISCONNECTED:
            self.closed = self.closed or ("cut" if self._through else "handshake")
