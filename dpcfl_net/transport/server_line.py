"""The coordinator's socket: messages to and from connections, counted, logged, and carried by the fault injector."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import zmq

from dpcfl_net.transport.channel import Stamp
from dpcfl_net.transport.faults import FaultInjector
from dpcfl_net.transport.message_log import MessageLog
from dpcfl_net.transport.messages import Header, WireError, decode, encode
from dpcfl_net.transport.peers import Peer
from dpcfl_net.transport.sockets import BATCH, BYE_LINGER_MS, Arrived, Link, Listener, send

Frame = bytes | memoryview


class ServerLine:
    """One ROUTER socket for all clients.

    Args:
        bind: "tcp://host:port", port * or 0 for a free one.
        link: Run, job, keys and security.
        allowed: Public keys that may connect, z85.
        log: Receives messages and the transcript.
        faults: Injects faults into the messages of known clients; None: no faults.
        gone: Called with a client whose connection no longer exists.

    Attributes:
        stamp: Makes the headers of this side.
        bytes_up: Bytes received.
        bytes_down: Bytes sent.
        address: Bound address with its real port.

    Raises:
        ConfigError: As `Listener`.
    """

    def __init__(
        self,
        bind: str,
        link: Link,
        allowed: Collection[str],
        log: MessageLog,
        faults: FaultInjector | None,
        gone: Callable[[Peer], None],
    ) -> None:
        self.stamp = Stamp(link.run, link.job)
        self.bytes_up = self.bytes_down = 0
        self._log, self._faults, self._gone = log, faults, gone
        self._listener = Listener(zmq.ROUTER, bind, link, allowed)
        self.socket, self.address = self._listener.socket, self._listener.address
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._unwritten = False  # a TASK may not be on file yet

    def wait(self, seconds: float) -> None:
        """Wait until a message can be read, for at most `seconds`; not at all if they are over."""
        self._poller.poll(max(0, math.ceil(seconds * 1000)))  # ZeroMQ waits for ever if told a negative time

    def read(self, client_of: Callable[[Arrived], int | None], handle: Callable[[Arrived], None]) -> None:
        """Pass on the messages that have arrived, at most BATCH of them.

        Args:
            client_of: Returns the client of a message by its connection; None if it is not known.
            handle: Called with each message, now or when the faults release it.
        """
        for _ in range(BATCH):
            arrived = self._listener.receive()
            if arrived is None:
                return
            self.bytes_up += len(arrived.header) + (0 if arrived.chunk is None else len(arrived.chunk))
            if self._faults is None:
                handle(arrived)
            else:
                self._carry_up(self._faults, arrived, client_of(arrived), handle)

    def _carry_up(self, faults: FaultInjector, arrived: Arrived, client: int | None, handle: Callable[[Arrived], None]) -> None:
        """Handle a message of a known client as the faults decide; any other is handled at once."""
        try:
            header = decode(arrived.header) if client is not None and not arrived.malformed else None
        except WireError:
            header = None
        if client is None or header is None:
            handle(arrived)
            return

        def forward(data: Frame, chunk: Frame | None) -> bool:
            parts = memoryview(data), None if chunk is None else memoryview(chunk)
            handle(arrived._replace(header=parts[0], chunk=parts[1]))
            return True

        faults.carry("up", client, header, arrived.header, arrived.chunk, forward)

    def begin(self, round: int) -> None:
        """Note that tasks of a round are sent."""
        if self._faults is not None:
            self._faults.begin(round)

    def release(self) -> bool:
        """Forward messages that the faults held until now; True if some are left."""
        return self._faults is not None and self._faults.release()

    def send(self, peer: Peer, header: Header, data: bytes, chunk: memoryview | None) -> bool:
        """Pass a client's message to the socket; False if the client's queue is full."""
        route = peer.route
        if route is None:
            return True
        if chunk is not None and self._unwritten:
            # Tasks are on file before their chunks leave, so that no crash makes an answer to an unknown task.
            self._write()
        if self._faults is not None:
            self._faults.carry("down", peer.client, header, data, chunk, partial(self._forward, peer, route))
        elif not self._forward(peer, route, data, chunk):
            return False
        if peer.route == route:
            peer.told = time.monotonic()
            self.bytes_down += len(data) + (0 if chunk is None else len(chunk))
            self._log.crossed("down", peer.name, data, chunk)
            self._log.message("down", peer.name, header, len(data) + header.size)
            if header.kind == "TASK":
                self._unwritten = True
                if not header.chunks:
                    self._write()
        return True

    def _write(self) -> None:
        self._log.flush_transcript()
        self._unwritten = False

    def _forward(self, peer: Peer, route: bytes, data: Frame, chunk: Frame | None) -> bool:
        """Pass a message to the connection that it was written for; False if its queue is full."""
        sent = self.send_to(route, data, chunk)
        if sent is None and peer.route == route:
            self._gone(peer)
        return sent is not False

    def send_to(self, route: bytes, data: Frame, chunk: Frame | None = None) -> bool | None:
        """True if the socket accepted the message, False if the connection's queue is full, None if the connection has ended."""
        try:
            send(self.socket, *([route, data] if chunk is None else [route, data, chunk]))
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return None
            raise
        return True

    def answer(self, route: bytes, **fields: Any) -> bool:
        """Send a message without payload to any connection; False if the connection has ended."""
        return self.send_to(route, encode(self.stamp.header(**fields))) is not None

    def is_there(self, route: bytes) -> bool:
        """True if a connection still exists."""
        return self.answer(route, kind="HEARTBEAT", code="idle")

    def cut(self, arrived: Arrived) -> None:
        """Shut down the connection of a message; the client may connect again."""
        self._listener.guard.cut(arrived.fd)

    def tend(self) -> None:
        """Log failures of connections, and write what was logged of messages."""
        for error in self._listener.news():
            self._log.failed("unknown", error)
        self._log.tick()

    def close(self, abort: bool) -> None:
        """Close the socket; queued messages are sent for up to 5 s unless `abort`."""
        self._listener.close(0 if abort else BYE_LINGER_MS)
        self._log.tick()
        self._log.flush_transcript()
