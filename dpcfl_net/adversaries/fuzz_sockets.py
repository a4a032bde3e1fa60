"""Endpoints without a network: in-memory sockets with fed and recorded frames, and chunks of a few bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import zmq

from dpcfl_net.transport import client, messages, payload, server_line, sockets

SMALL_CHUNK = 64  # bytes, so that a few hundred bytes give many chunks


class FakeFrame:
    """One frame as pyzmq returns it; `user` is the authenticated CURVE key, "" for none."""

    def __init__(self, data: bytes, more: bool, user: str) -> None:
        self.bytes, self.buffer, self.more, self._user = data, memoryview(data), more, user

    def __len__(self) -> int:
        return len(self.bytes)

    def get(self, what: Any) -> Any:
        if what == zmq.SRCFD:
            return 7
        if not self._user:
            raise zmq.ZMQError(zmq.EINVAL)
        return self._user


class FakeSocket:
    """In-memory socket: receives fed frames, records sent ones; routes in `gone` are unreachable, `full` refuses all."""

    def __init__(self, kind: int) -> None:
        self.type = kind
        self.frames: deque[FakeFrame] = deque()
        self.sent: list[list[bytes]] = []
        self.gone: set[bytes] = set()
        self.full = False
        self._begun: list[bytes] = []  # frames of a message that is not complete

    def feed(self, frames: list[bytes], user: str = "") -> None:
        self.frames.extend(FakeFrame(data, k + 1 < len(frames), user) for k, data in enumerate(frames))

    def recv(self, flags: int, copy: bool) -> FakeFrame:
        if not self.frames:
            raise zmq.Again
        return self.frames.popleft()

    def send(self, frame: Any, flags: int, copy: bool) -> None:
        if self.full:
            raise zmq.Again
        if self.type == zmq.ROUTER and not self._begun and bytes(frame) in self.gone:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self._begun.append(bytes(frame))
        if not flags & zmq.SNDMORE:
            self.sent.append(self._begun)
            self._begun = []

    def get(self, option: int) -> int:
        return int(zmq.POLLIN) if self.frames else 0

    def taken(self) -> list[list[bytes]]:
        """Return the messages sent since the last call."""
        found, self.sent = self.sent, []
        return found

    def poll(self, timeout: int = 0, flags: int = 0) -> int:
        return bool(self.frames)

    def get_monitor_socket(self) -> FakeSocket:
        return FakeSocket(zmq.PAIR)

    def connect(self, address: str) -> None:
        """Do nothing."""


class FakeGuard:
    """Guard without connections."""

    def delivered(self, fd: int, size: int, key: str) -> None:
        """Do nothing."""

    def cut(self, fd: int) -> None:
        """Do nothing."""


class FakeListener:
    """Listener of a server's end."""

    def __init__(self, kind: int, address: str, *_: Any) -> None:
        self.socket, self.address, self.guard = FakeSocket(kind), address, FakeGuard()

    def receive(self) -> sockets.Arrived | None:
        return sockets.receive(self.socket, True, True, self.guard)  # type: ignore[arg-type]

    def news(self) -> list[Any]:
        return []


class FakePoller:
    """Poller that reports a socket while it has unread frames."""

    def __init__(self, socket: FakeSocket) -> None:
        self._socket = socket

    def poll(self, timeout: int) -> list[tuple[Any, int]]:
        return [(self._socket, zmq.POLLIN)] if self._socket.frames else []


@contextmanager
def fake_sockets() -> Iterator[None]:
    """Create endpoints without sockets and with chunks of SMALL_CHUNK bytes inside the context; all other code is unchanged."""
    with ExitStack() as stack:
        for module in (messages, payload):
            stack.enter_context(mock.patch.object(module, "CHUNK", SMALL_CHUNK))
        stack.enter_context(mock.patch.object(server_line, "Listener", FakeListener))
        stack.enter_context(mock.patch.object(client, "new_socket", lambda context, kind: FakeSocket(kind)))
        stack.enter_context(mock.patch.object(client, "join_curve"))
        yield
