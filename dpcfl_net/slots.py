"""Compute slots: how many workers of one host may compute at once; the others sleep instead of fighting over cores."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Slots:
    """A counted lock between processes made of file locks: the kernel gives a slot back when its holder dies.

    The waiting stand in a queue (one blocking lock) and only its head looks for a free slot, so that a hundred sleeping
    workers cost no wakes.
    """

    def __init__(self, folder: Path, count: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._queue = os.open(folder / "queue", os.O_RDWR | os.O_CREAT, 0o600)
        self._slots = [os.open(folder / f"slot_{k}", os.O_RDWR | os.O_CREAT, 0o600) for k in range(count)]

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Compute inside; blocks until a slot is free."""
        fcntl.flock(self._queue, fcntl.LOCK_EX)
        try:
            slot = self._take()
        finally:
            fcntl.flock(self._queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(slot, fcntl.LOCK_UN)

    def _take(self) -> int:
        while True:
            for slot in self._slots:
                try:
                    fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                return slot
            time.sleep(0.001)
