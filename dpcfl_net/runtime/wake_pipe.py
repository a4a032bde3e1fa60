"""Pipe by which other threads wake the thread that polls an endpoint."""

from __future__ import annotations

import contextlib
import os
import threading


class WakePipe:
    """Readable from `wake` until `clear`; an endpoint registers it as a source."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._lock, self._closed = threading.Lock(), False

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._read

    def wake(self) -> None:
        """Make the pipe readable, unless it is closed; any thread may call this."""
        with self._lock:  # another file may soon have the number of a closed descriptor
            if not self._closed:
                os.write(self._write, b"x")

    def clear(self) -> None:
        """Make the pipe unreadable again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def close(self) -> None:
        """Close both ends."""
        with self._lock:
            self._closed = True
            os.close(self._read)
            os.close(self._write)
