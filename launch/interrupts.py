"""Signals that end a run: handlers set a flag and wake who waits, so that nothing is cut where it stands half way."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts INT, TERM and HUP while it is entered; a signal that was ignored before, as under nohup, stays ignored.

    `fileno` is readable once a signal has come. Off the main thread, where Python allows no handlers, nothing is counted.
    until_exit: once one has come, further ones are ignored after this too, for a process that then has nothing to do but exit.
    """

    def __init__(self, *, until_exit: bool = False) -> None:
        self.count = 0
        self._until_exit = until_exit
        self._raising = False
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
        """The descriptor to wait for."""
        return self._read

    def check(self) -> None:
        """KeyboardInterrupt if a signal has come: called where everything is whole."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        if self.count:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Inside, a signal raises KeyboardInterrupt where it comes: for work of which nothing need stay."""
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._raising:
            raise KeyboardInterrupt


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Keep these signals waiting in this thread: a process started meanwhile has them blocked until it is ready for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_the_launcher() -> None:
    """In a process of a run: Ctrl-C and a terminal's end concern the launcher, which tells everybody in order."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
