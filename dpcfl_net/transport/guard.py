"""Guard of a listening socket's connections: logs failed handshakes, cuts connections with endless messages."""

from __future__ import annotations

import socket
import struct
import threading

import zmq
from zmq.utils.monitor import recv_monitor_message

from dpcfl_net.transport.messages import CHUNK, WINDOW

UNREAD_LIMIT = 4 * WINDOW * CHUNK  # bytes a connection may send ahead of complete messages
PERIOD_MS = 100
_OVERHEAD = 64  # bytes a frame may need beyond its content (ZMTP and CURVE)
_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in Linux's struct tcp_info
_FAILED = {
    int(zmq.Event.HANDSHAKE_FAILED_NO_DETAIL): "the connection ended during the handshake",
    int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL): "the handshake broke the protocol: another mechanism or a wrong server key",
}


class ConnectionGuard:
    """Watches the connections of one bound socket in its own thread, also while the owner is busy.

    libzmq keeps a multipart message until its last frame and limits the size of frames, not their number, so an endless message
    would fill the memory unnoticed. The guard compares the bytes that a connection has sent (TCP_INFO) with those delivered,
    and cuts it when the difference exceeds the limit. Very short frames take more memory than their bytes: about 5 times under
    CURVE, 20 times without. Without TCP_INFO (not Linux) only handshakes are logged.

    Args:
        watched: The bound socket.
        unread_limit: Largest difference in bytes.
    """

    def __init__(self, watched: zmq.Socket, unread_limit: int = UNREAD_LIMIT) -> None:
        self._watched, self._limit = watched, unread_limit
        self._monitor = watched.get_monitor_socket()
        self._delivered: dict[int, int] = {}
        self._failures: list[tuple[str, str]] = []
        self._thread = threading.Thread(target=self._run, name="connection-guard", daemon=True)
        self._thread.start()

    def delivered(self, fd: int, size: int) -> None:
        """Record that the owner has read a frame of `size` bytes from a connection."""
        if fd in self._delivered:
            self._delivered[fd] += size + _OVERHEAD

    def cut(self, fd: int) -> None:
        """Shut a connection down; the peer may connect again."""
        if fd in self._delivered:
            _shutdown(fd)

    def failures(self) -> list[tuple[str, str]]:
        """Return (code, reason) of each failure since the last call."""
        found, self._failures = self._failures, []
        return found

    def close(self) -> None:
        """Stop the thread."""
        self._watched.disable_monitor()
        self._thread.join()

    def _run(self) -> None:
        with self._monitor as monitor:
            while True:
                ready = monitor.poll(PERIOD_MS)
                while ready:
                    event = recv_monitor_message(monitor)
                    if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                        return
                    self._note(int(event["event"]), int(event["value"]))
                    ready = monitor.poll(0)
                self._check()

    def _note(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._delivered[value] = 0
        elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
            self._delivered.pop(value, None)
        elif event in _FAILED:
            self._log("handshake", _FAILED[event])

    def _check(self) -> None:
        for fd, delivered in list(self._delivered.items()):
            received = _bytes_received(fd)
            if received is not None and received - delivered > self._limit:
                self._log("flood", f"cut a connection with {(received - delivered) >> 20} MiB of unfinished messages")
                _shutdown(fd)
                self._delivered.pop(fd, None)

    def _log(self, code: str, reason: str) -> None:
        if len(self._failures) < 256:
            self._failures.append((code, reason))


def _bytes_received(fd: int) -> int | None:
    """Bytes that TCP has received on a descriptor; None where this is not available."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        borrowed = socket.socket(fileno=fd)
    except OSError:
        return None
    try:
        info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
    except OSError:
        return None
    finally:
        borrowed.detach()
    return int(struct.unpack_from("<Q", info, _BYTES_RECEIVED)[0]) if len(info) >= _BYTES_RECEIVED + 8 else None


def _shutdown(fd: int) -> None:
    try:
        borrowed = socket.socket(fileno=fd)
    except OSError:
        return  # gone already
    try:
        borrowed.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # gone already
    finally:
        borrowed.detach()
