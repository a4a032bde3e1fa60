"""Guard of a listening socket's connections: it cuts those with endless messages and logs failed handshakes."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from dpcfl_net.transport.messages import CHUNK, WINDOW

UNREAD_LIMIT = 4 * WINDOW * CHUNK  # bytes a connection may send ahead of complete messages
PERIOD_S = 0.1  # between looks at the connections
_PINGS = 64  # bytes per second of ZeroMQ's heartbeats, which the owner does not see; an honest peer sends 9
_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: the peer hears of a reset, which is no failed handshake
_TCP_INFO = getattr(socket, "TCP_INFO", -1)  # -1: no such option, an OSError
_COUNTED = struct.Struct("<128xQ")  # start of Linux's struct tcp_info, with tcpi_bytes_received
_BEFORE_PROOF = 266  # bytes that a peer sends before it proves its key: greeting and HELLO of CURVE
SPARE = 128  # connections without a message, besides one for each peer
# Connections with a message under one key: an honest peer has one, and after a cut cable a few that are not over yet.
MOST_OF_KEY = 8
_FAILED = {
    int(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL): "the connection ended during the handshake",
    int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL): "the handshake broke the protocol: another mechanism or a wrong server key",
}


class Connection:
    """One connection; its descriptor belongs to libzmq.

    Args:
        fd: The descriptor.

    Attributes:
        delivered: Bytes that the socket's owner has read, as `wire_size.frame_bytes`.
        key: Authenticated key of its messages, z85; empty before the first one, and without CURVE.

    Raises:
        OSError: If the connection has ended already.
    """

    def __init__(self, fd: int) -> None:
        self._borrowed = socket.socket(fileno=fd)
        self._began = time.monotonic()
        self.delivered, self.key = 0, ""

    def unread(self, received: int) -> float:
        """Bytes of those received that the owner has not read and that are no heartbeats."""
        return received - self.delivered - _PINGS * (time.monotonic() - self._began)

    def received(self) -> int | None:
        """Bytes that TCP has received; None where this is not available."""
        try:
            info = self._borrowed.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _COUNTED.size)
        except OSError:
            return None
        return int(_COUNTED.unpack(info)[0]) if len(info) == _COUNTED.size else None

    def flood(self, limit: int) -> str | None:
        """Shut the connection down and return the reason if more than `limit` bytes are unread; None if not."""
        received = self.received()
        if received is None or (unread := self.unread(received)) <= limit:
            return None
        self.shut_down()
        return f"cut a connection with {int(unread) >> 20} MiB of unfinished messages"

    def shut_down(self) -> None:
        """End the connection, unless it has ended already."""
        with contextlib.suppress(OSError):
            self._borrowed.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Reset a new connection: its peer takes the server for one that is down, and tries again."""
        with contextlib.suppress(OSError):
            self._borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self._borrowed.shutdown(socket.SHUT_RD)

    def forget(self) -> None:
        """Give the descriptor back, which libzmq closes."""
        self._borrowed.detach()


class ConnectionGuard:
    """Watches the connections of one bound socket in its own thread, also while the owner is busy.

    libzmq keeps a multipart message until its last frame and limits the size of frames, not their number, so an endless message
    would fill the memory unnoticed. The guard compares the bytes that a connection has sent (TCP_INFO) with those delivered,
    and cuts it when the difference exceeds the limit: one system call per connection and period. Very short frames take more
    memory than their bytes: about 5 times under CURVE, 20 times without. Without TCP_INFO (not Linux) only handshakes are logged.

    Connections of strangers stay open until the handshake's time limit: many of them would take all descriptors of the process, which
    then cannot open its own files. So at most `most_silent` may be open that have sent no message; of more, one that has proved no
    key is cut, the oldest first. Of those with messages at most MOST_OF_KEY may be open under one key; a later one is cut. A
    connection whose message the owner reads before the guard has heard of the connection counts as silent until its next message,
    and that message's bytes stay unread.

    The messages of a connection that has ended stay until the owner reads them. So at most `most_silent` may complete their handshake
    before the owner has read all messages; then new ones are reset. The next connection may get the descriptor of one that has ended:
    messages with this descriptor do not count until the owner has read all, else the old ones would let the new one send more and more.

    Args:
        watched: The bound socket.
        unread_limit: Largest difference in bytes.
        most_silent: Most connections without a message, and most handshakes before the owner has read all messages; None: no limit.
    """

    def __init__(self, watched: zmq.Socket, unread_limit: int = UNREAD_LIMIT, most_silent: int | None = None) -> None:
        self._watched, self._limit, self._most_silent = watched, unread_limit, most_silent
        self._monitor = watched.get_monitor_socket()
        self._connections: dict[int, Connection] = {}
        self._silent: dict[int, Connection] = {}  # in the order of their begin
        self._of_key: dict[str, set[Connection]] = {}  # those that have sent a message; as many keys as the socket allows
        # Descriptors of connections that have ended since the owner last read all messages, and before that time. One is kept until
        # the second time, since the owner may find nothing to read just before the last messages of a connection arrive.
        self._ended: list[int] = []
        self._ended_before: list[int] = []
        self._handshakes = 0  # since the owner last read all messages
        self._failures: list[tuple[str, str]] = []
        self._thread = threading.Thread(target=self._run, name="connection-guard", daemon=True)
        self._thread.start()

    def delivered(self, fd: int, size: int, key: str) -> None:
        """Record that the owner has read a message from a connection.

        Args:
            fd: Descriptor of the connection.
            size: Bytes of all its frames, as `wire_size.frame_bytes`. Counted too high, they would let the peer send more and more.
            key: Authenticated key of the connection, z85; empty without CURVE.
        """
        connection = self._connections.get(fd)
        if connection is None or fd in self._ended or fd in self._ended_before:
            return
        connection.delivered += size
        if key and not connection.key:
            connection.key = key
            own = self._of_key.setdefault(key, set())
            own.add(connection)
            if self._connections.get(fd) is not connection:  # the guard's thread forgot it meanwhile, before it had a key
                own.discard(connection)
            elif len(own) > MOST_OF_KEY:
                self._log("connections", f"cut one of more than {MOST_OF_KEY} connections under one key")
                connection.shut_down()
        self._silent.pop(fd, None)

    def all_read(self) -> None:
        """Record that the owner has read all messages that had arrived."""
        self._handshakes, self._ended_before, self._ended = 0, self._ended, []

    def cut(self, fd: int) -> None:
        """Shut a connection down; the peer may connect again."""
        connection = self._connections.get(fd)
        if connection is not None:
            connection.shut_down()

    def failures(self) -> list[tuple[str, str]]:
        """Return (code, reason) of each failure since the last call."""
        if not self._failures:
            return []
        found, self._failures = self._failures, []
        return found

    def close(self) -> None:
        """Stop the thread."""
        self._watched.disable_monitor()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._monitor as monitor:
                self._watch(monitor)
        finally:
            for fd in list(self._connections):
                self._forget(fd)

    def _watch(self, monitor: zmq.Socket) -> None:
        due = 0.0
        while True:
            left = due - time.monotonic()
            if left <= 0:
                self._check()
                due = time.monotonic() + PERIOD_S
            elif monitor.poll(math.ceil(left * 1000)):
                event = recv_monitor_message(monitor)
                if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                    return
                self._note(int(event["event"]), int(event["value"]))

    def _note(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._forget(value)
            with contextlib.suppress(OSError):  # it has ended already
                self._connections[value] = self._silent[value] = Connection(value)
                self._make_room()
                self._require_read(self._connections[value])
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._handshakes += 1
        elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
            self._ended.append(value)
            self._forget(value)
        elif event in _FAILED:
            self._log("handshake", _FAILED[event])

    def _make_room(self) -> None:
        """Cut a connection if too many have sent no message."""
        if self._most_silent is None or len(self._silent) <= self._most_silent:
            return
        silent = list(self._silent.items())
        strangers = (fd for fd, connection in silent if (connection.received() or 0) <= _BEFORE_PROOF)
        fd = next(strangers, silent[0][0])
        self._log("silent", f"cut one of more than {self._most_silent} connections that had sent no message")
        if (connection := self._silent.pop(fd, None)) is not None:
            connection.shut_down()

    def _require_read(self, connection: Connection) -> None:
        """Reset a new connection if too many others may have sent messages that the owner has not read."""
        if self._most_silent is not None and self._handshakes > self._most_silent:
            self._log("unread", f"reset a connection: more than {self._most_silent} others since all messages were read")
            connection.reset()

    def _forget(self, fd: int) -> None:
        self._silent.pop(fd, None)
        connection = self._connections.pop(fd, None)
        if connection is not None:
            self._of_key.get(connection.key, set()).discard(connection)
            connection.forget()

    def _check(self) -> None:
        for fd, connection in list(self._connections.items()):
            if (reason := connection.flood(self._limit)) is not None:
                self._log("flood", reason)
                self._forget(fd)

    def _log(self, code: str, reason: str) -> None:
        if len(self._failures) < 256:
            self._failures.append((code, reason))
