"""Signals that end a run: handlers only set a flag, which is checked where the state is consistent."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TICK_S = 0.3  # between looks at a run that is watched, unless a signal interrupts
AGAIN_S = 1.0  # from a signal to the next one that shows that `check` is not reached


class Interrupts:
    """Context manager that counts INT, TERM and HUP. A signal that was ignored before, as under nohup, stays ignored.

    A block around this one, as that of a sweep around the run of a cell, counts them too.

    `fileno` becomes readable after a signal. Outside of the main thread, where Python allows no handlers, it counts nothing.

    Args:
        until_exit: After a signal, ignore further signals also after the block, for a process that is about to exit.
    """

    def __init__(self, *, until_exit: bool = False) -> None:
        self.count = 0
        self._until_exit = until_exit
        self._raising = self._again = False
        self._since = 0.0  # time of the first signal, or of the last one that raised
        self._before: dict[signal.Signals, Any] = {}
        self._read = self._write = self._wakeup = -1

    def __enter__(self) -> Interrupts:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        if threading.current_thread() is threading.main_thread():
            self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            for number in SIGNALS:
                if (before := signal.getsignal(number)) is not signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                signal.signal(number, signal.SIG_IGN if self._until_exit and self.count else before)
            signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """Return the file descriptor to wait for."""
        return self._read

    def check(self) -> None:
        """Raise KeyboardInterrupt after a signal; call it where the state is consistent."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        if self.count:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at once inside the block, for work that may be discarded."""
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    @contextlib.contextmanager
    def raising_again(self) -> Iterator[None]:
        """Raise KeyboardInterrupt inside the block if a signal comes a second after the first, for work that may never end.

        The block then has a second to close its files before a further signal raises again.
        """
        self._again = True
        try:
            yield
        finally:
            self._again = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        outer = getattr(self._before.get(signal.Signals(number)), "__self__", None)
        if isinstance(outer, Interrupts):
            outer.count += 1
        now = time.monotonic()
        self._since = self._since or now
        again = self._again and now - self._since >= AGAIN_S
        if again:
            self._since = now
        if self._raising or again:
            raise KeyboardInterrupt


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Block these signals in this thread; a process started inside has them blocked until it unblocks them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_terminal_signals() -> None:
    """Ignore INT and HUP in a process of a run: only the launcher handles them. TERM ends it at once.

    A handler in Python would wait for the operation that the process computes: a server that ends the run would see which clients train.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
