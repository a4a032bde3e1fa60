"""Fake sockets that take frames and record sent messages, so that endpoints run without a network, with small chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import zmq

from dpcfl_net.transport import client, messages, payload, server

SMALL_CHUNK = 64  # bytes, so that a few hundred bytes give many chunks


class FakeFrame:
    """One received frame as in pyzmq.

    Args:
        data: Bytes of the frame.
        more: Whether the message has further frames.
        user: Key that CURVE would have authenticated; "" for none.
    """

    def __init__(self, data: bytes, more: bool, user: str) -> None:
        self.bytes, self.buffer, self.more, self._user = data, memoryview(data), more, user

    def get(self, what: Any) -> Any:
        """Return a property of the frame: descriptor or authenticated key."""
        """Return a property of the frame: descriptor or authenticated key."""
        if what == zmq.SRCFD:
            return 7
        if not self._user:
            raise zmq.ZMQError(zmq.EINVAL)
        return self._user


class FakeSocket:
    """Socket without a network.

    Attributes:
        frames: Frames to receive.
        sent: Sent messages.
        gone: Routes that cannot be reached.
        full: Whether the socket accepts no message.
    """

    def __init__(self, kind: int) -> None:
        self.type = kind
        self.frames: deque[FakeFrame] = deque()
        self.sent: list[list[bytes]] = []
        self.gone: set[bytes] = set()
        self.full = False

    def feed(self, frames: list[bytes], user: str = "") -> None:
        """Queue one message for reception."""
        """Queue one message for reception."""
        self.frames.extend(FakeFrame(data, k + 1 < len(frames), user) for k, data in enumerate(frames))

    def recv(self, flags: int, copy: bool) -> FakeFrame:
        """Return the next frame, as zmq.Socket.recv."""
        """Return the next frame, as zmq.Socket.recv."""
        if not self.frames:
            raise zmq.Again
        return self.frames.popleft()

    def send_multipart(self, frames: list[Any], flags: int, copy: bool) -> None:
        """Record one message, as zmq.Socket.send_multipart."""
        """Record one message, as zmq.Socket.send_multipart."""
        if self.full:
            raise zmq.Again
        if self.type == zmq.ROUTER and bytes(frames[0]) in self.gone:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self.sent.append([bytes(frame) for frame in frames])

    def taken(self) -> list[list[bytes]]:
        """Return the messages sent since the last call."""
        found, self.sent = self.sent, []
        return found

    def poll(self, timeout: int = 0, flags: int = 0) -> int:
        """Return whether a frame is queued."""
        """Return whether a frame is queued."""
        return bool(self.frames)

    def get_monitor_socket(self) -> FakeSocket:
        """Return a monitor without events."""
        """Return a monitor without events."""
        return FakeSocket(zmq.PAIR)

    def connect(self, address: str) -> None:
        """Connect to nothing."""


class FakeGuard:
    """Connection guard without connections."""

    def delivered(self, fd: int, size: int) -> None:
        """Ignore a frame."""

    def cut(self, fd: int) -> None:
        """Ignore a request to cut a connection."""


class FakeListener:
    """Listener of a server endpoint, on a fake socket."""

    def __init__(self, kind: int, address: str, *_: Any) -> None:
        self.socket, self.address, self.guard = FakeSocket(kind), address, FakeGuard()

    def news(self) -> list[Any]:
        """Return no events."""
        """Return no events."""
        return []


class FakePoller:
    """Poller of one fake socket: readable while frames are queued."""

    def __init__(self, socket: FakeSocket) -> None:
        self._socket = socket

    def poll(self, timeout: int) -> list[tuple[Any, int]]:
        """Return the socket if it is readable."""
        """Return the socket if it is readable."""
        return [(self._socket, zmq.POLLIN)] if self._socket.frames else []


@contextmanager
def fake_sockets() -> Iterator[None]:
    """Make endpoints use fake sockets and chunks of SMALL_CHUNK bytes; all other code is unchanged."""
    with ExitStack() as stack:
        for module in (messages, payload):
            stack.enter_context(mock.patch.object(module, "CHUNK", SMALL_CHUNK))
        stack.enter_context(mock.patch.object(server, "Listener", FakeListener))
        stack.enter_context(mock.patch.object(client, "new_socket", lambda context, kind: FakeSocket(kind)))
        stack.enter_context(mock.patch.object(client, "join_curve"))
        yield
