"""A worker's connection to a coordinator that is trusted no more than a client: its handshakes, and a limit on endless messages."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from dpcfl_net.core.clock import AwakeClock
from dpcfl_net.core.errors import Refused, RunFailed
from dpcfl_net.transport.guard import UNREAD_LIMIT, Connection

HANDSHAKES = 5  # failures in a row after which the server is not the expected one
_FAILED = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)


class DialedConnection:
    """Watches the connection of a socket that connects; the thread that uses the socket calls it.

    Args:
        dialed: The socket, before it connects.
        handshake_limit_s: Seconds for which an accepted connection may stay without a handshake.

    Attributes:
        monitor: Socket that is readable when `changes` has something to report.
    """

    def __init__(self, dialed: zmq.Socket, handshake_limit_s: float) -> None:
        self.monitor = dialed.get_monitor_socket()
        self._dialed, self._limit_s = dialed, handshake_limit_s
        self._failures, self._since = 0, 0.0
        self._clock = AwakeClock()  # a pause of this process does not count as silence of the server
        self._fd = -1
        self._connection: Connection | None = None

    @property
    def fd(self) -> int:
        """The connection's descriptor, which belongs to libzmq and may have ended; -1 without one."""
        return -1 if self._connection is None else self._fd

    def changes(self) -> Iterator[bool]:
        """Yield True for each completed handshake and False for each connection that ended, in their order.

        Raises:
            Refused: "handshake" if the server does not know this socket's key.
        """
        while self.monitor.poll(0):
            message = recv_monitor_message(self.monitor)
            event = int(message["event"])
            if event == zmq.EVENT_CONNECTED:
                self._watch(int(message["value"]))
                self._since = self._since or self._clock.now()
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._failures, self._since = 0, 0.0
                yield True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise Refused("handshake", "the coordinator does not know this worker's key")
            elif event == zmq.EVENT_CLOSED or (event in _FAILED and message["value"] == errno.ECONNRESET):
                # No listener, or a relay that reaches none: the coordinator is down, which is no failed handshake.
                self._failures, self._since = 0, 0.0
            elif event in _FAILED:
                self._failures += 1
            elif event == zmq.EVENT_DISCONNECTED:
                self._forget()
                yield False

    def require_handshake(self) -> None:
        """Check that handshakes succeed; call it several times a second.

        Raises:
            Refused: "handshake" if too many have failed in a row.
            RunFailed: If none was completed in time.
        """
        now = self._clock.now()
        if self._since and now - self._since > self._limit_s:
            raise RunFailed(
                f"no handshake within {self._limit_s:g} s: the process at this address is stopped, overloaded or not a coordinator"
            )
        if self._failures >= HANDSHAKES:
            raise Refused("handshake", "no coordinator with the expected key answers at this address")

    def delivered(self, fd: int, size: int, key: str) -> None:
        """See `ConnectionGuard.delivered`; the key is that of the server."""
        if self._connection is not None and fd == self._fd:
            self._connection.delivered += size

    def flood(self) -> str | None:
        """Cut the connection and return the reason if too many of its bytes are unread; None if not."""
        reason = None if self._connection is None else self._connection.flood(UNREAD_LIMIT)
        if reason is not None:
            self._forget()
        return reason

    def close(self) -> None:
        """Stop to watch; call it before the socket is closed."""
        self._forget()
        self._dialed.disable_monitor()
        self.monitor.close(linger=0)

    def _watch(self, fd: int) -> None:
        self._forget()
        with contextlib.suppress(OSError):  # it has ended already
            self._fd, self._connection = fd, Connection(fd)

    def _forget(self) -> None:
        """Give the connection's descriptor back."""
        if self._connection is not None:
            self._connection.forget()
        self._connection = None
