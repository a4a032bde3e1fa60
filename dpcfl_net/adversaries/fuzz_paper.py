"""Endpoints without a network: sockets of paper that are fed frames and keep what is sent, and chunks of a few bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import zmq

from dpcfl_net.transport import client, messages, payload, server

SMALL_CHUNK = 64  # bytes; a payload of a few hundred is then a long sequence


class PaperFrame:
    """One frame as pyzmq hands it over; `user` is the key that CURVE would have authenticated, "" for none."""

    def __init__(self, data: bytes, more: bool, user: str) -> None:
        self.bytes, self.buffer, self.more, self._user = data, memoryview(data), more, user

    def get(self, what: Any) -> Any:
        if what == zmq.SRCFD:
            return 7
        if not self._user:
            raise zmq.ZMQError(zmq.EINVAL)
        return self._user


class PaperSocket:
    """What is fed is received, what is sent is kept in `sent`; a route in `gone` cannot be reached, `full` takes nothing."""

    def __init__(self, kind: int) -> None:
        self.type = kind
        self.frames: deque[PaperFrame] = deque()
        self.sent: list[list[bytes]] = []
        self.gone: set[bytes] = set()
        self.full = False

    def feed(self, frames: list[bytes], user: str = "") -> None:
        self.frames.extend(PaperFrame(data, k + 1 < len(frames), user) for k, data in enumerate(frames))

    def recv(self, flags: int, copy: bool) -> PaperFrame:
        if not self.frames:
            raise zmq.Again
        return self.frames.popleft()

    def send_multipart(self, frames: list[Any], flags: int, copy: bool) -> None:
        if self.full:
            raise zmq.Again
        if self.type == zmq.ROUTER and bytes(frames[0]) in self.gone:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self.sent.append([bytes(frame) for frame in frames])

    def taken(self) -> list[list[bytes]]:
        """What was sent since the last call."""
        found, self.sent = self.sent, []
        return found

    def poll(self, timeout: int = 0, flags: int = 0) -> int:
        return bool(self.frames)

    def get_monitor_socket(self) -> PaperSocket:
        return PaperSocket(zmq.PAIR)

    def connect(self, address: str) -> None:
        """Nobody is there."""


class PaperGuard:
    """A guard that has no connections to watch."""

    def delivered(self, fd: int, size: int) -> None:
        """A frame was read."""

    def cut(self, fd: int) -> None:
        """A connection is to be cut."""


class PaperListener:
    """What the server's end listens with."""

    def __init__(self, kind: int, address: str, *_: Any) -> None:
        self.socket, self.address, self.guard = PaperSocket(kind), address, PaperGuard()

    def news(self) -> list[Any]:
        return []


class PaperPoller:
    """Says that a socket is readable while something that was fed to it is unread."""

    def __init__(self, socket: PaperSocket) -> None:
        self._socket = socket

    def poll(self, timeout: int) -> list[tuple[Any, int]]:
        return [(self._socket, zmq.POLLIN)] if self._socket.frames else []


@contextmanager
def on_paper() -> Iterator[None]:
    """Inside, endpoints are made without sockets and a chunk has SMALL_CHUNK bytes; all their other code is as it is."""
    with ExitStack() as stack:
        for module in (messages, payload):
            stack.enter_context(mock.patch.object(module, "CHUNK", SMALL_CHUNK))
        stack.enter_context(mock.patch.object(server, "Listener", PaperListener))
        stack.enter_context(mock.patch.object(client, "new_socket", lambda context, kind: PaperSocket(kind)))
        stack.enter_context(mock.patch.object(client, "join_curve"))
        yield
