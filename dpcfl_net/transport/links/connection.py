"""One connection of a client through the relay, and the counts of its link."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from dpcfl_net.core.files import reason
from dpcfl_net.transport.links.pipe import Bottleneck, Pipe
from dpcfl_net.transport.links.schedule import Schedule

_log = logging.getLogger(__name__)

CONNECT_S = 10.0  # until the server's machine accepts a connection
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST


@dataclass
class Totals:
    """Counts of one client since the start.

    Attributes:
        bytes_up: Bytes passed on to the server.
        bytes_down: Bytes passed on to the client.
        connections: Accepted connections.
        resets: Connections reset at random by the link.
        failures: Connections closed because the server could not be reached.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    connections: int = 0
    resets: int = 0
    failures: int = 0

    def add(self, name: str, value: int) -> None:
        setattr(self, name, getattr(self, name) + value)


@dataclass
class Port:
    """Listening socket, link and open connections of one client."""

    client: int
    listener: socket.socket
    schedule: Schedule
    random: Random
    up: Bottleneck
    down: Bottleneck
    totals: Totals = field(default_factory=Totals)
    connections: dict[Connection, None] = field(default_factory=dict)  # in order of arrival


class Connection:
    """A client's connection and the one to the server that it is relayed to.

    Attributes:
        carried: Bytes passed on to the server.
    """

    def __init__(self, accepted: socket.socket, port: Port, upstream: tuple[int, tuple], now_s: Callable[[], float]) -> None:
        self._port, self._upstream, self._now_s = port, upstream, now_s
        self._loop = asyncio.get_running_loop()
        self._client, self._server = accepted, socket.socket(upstream[0], socket.SOCK_STREAM)
        self._pipes: list[Pipe] = []
        self._open_ends, self.carried = 2, 0
        for end, bottleneck in ((self._client, port.up), (self._server, port.down)):
            _prepare(end, bottleneck.kernel_buffer)
        link = port.schedule.link_at(now_s())
        # The kernel has accepted at once; over the link the handshake takes one round trip, once the link is on.
        on_s = port.schedule.sent_at(0, "down", port.schedule.sent_at(0, "up", now_s()))
        self._timers = [self._loop.call_later(on_s - now_s() + 2 * link.latency_s, self._connect)]
        if link.resets_per_hour:
            life_s = port.random.expovariate(link.resets_per_hour / 3600)
            self._timers.append(self._loop.call_later(life_s, self._reset_at_random))

    def reset(self) -> None:
        """Close both sockets at once; both ends see a reset connection."""
        for end in (self._client, self._server):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._close()

    def _reset_at_random(self) -> None:
        self._port.totals.resets += 1
        self.reset()

    def _connect(self) -> None:
        number = self._server.connect_ex(self._upstream[1])
        if number not in (0, errno.EINPROGRESS):
            self._failed(OSError(number, ""))
            return
        self._loop.add_writer(self._server, self._connected)
        self._timers.append(self._loop.call_later(CONNECT_S, self._failed, TimeoutError("timed out")))

    def _connected(self) -> None:
        self._loop.remove_writer(self._server)
        self._timers.pop().cancel()
        if number := self._server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._failed(OSError(number, ""))
            return
        port, totals = self._port, self._port.totals
        self._pipes = [
            Pipe(self._client, self._server, port.up, self._now_s, self._carry, self._ended),
            Pipe(self._server, self._client, port.down, self._now_s, lambda size: totals.add("bytes_down", size), self._ended),
        ]

    def _carry(self, size: int) -> None:
        self.carried += size
        self._port.totals.bytes_up += size

    def _failed(self, error: OSError) -> None:
        self._port.totals.failures += 1
        if self._port.totals.failures == 1:  # clients connect again and again
            _log.info("client %d: connection closed: %s", self._port.client, reason(error))
        self.reset()

    def _ended(self, error: OSError | None) -> None:
        self._open_ends -= 1
        if error is not None:
            self.reset()
        elif not self._open_ends:
            self._close()

    def _close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for pipe in self._pipes:
            pipe.close()
        self._loop.remove_writer(self._server)
        self._client.close()
        self._server.close()
        self._port.connections.pop(self, None)


def _prepare(end: socket.socket, kernel_buffer: int) -> None:
    """Set options of a connection's socket; small kernel buffers, since they add to the queue that the sender sees."""
    end.setblocking(False)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, kernel_buffer)
