"""Processes forked from the preloaded parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from dpcfl_net.core.errors import DpcflError
from dpcfl_net.launch.interrupts import blocked_signals, ignore_terminal_signals
from dpcfl_net.launch.placement.base import failure
from dpcfl_net.launch.placement.interpreter import single_threaded


def entry(title: str, log: Path, main: Callable[[Any], None], spec: Any) -> None:
    """Entry point of a forked child: redirects output to its log and ends with the launcher."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    starter = multiprocessing.parent_process()
    if starter is not None:
        sentinel = starter.sentinel
        threading.Thread(target=_exit_with, args=(sentinel,), name="launcher watch", daemon=True).start()
    run(title, main, spec)


def run(title: str, main: Callable[[Any], None], spec: Any) -> None:
    """Run `main` and exit the process; does not return.

    Args:
        title: Name in process lists.
        main: Function of the process.
        spec: Its argument.
    """
    import setproctitle

    ignore_terminal_signals()
    setproctitle.setproctitle(f"dpcfl {title}")
    code = 0
    try:
        main(spec)
    except DpcflError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    os._exit(code)  # forked children skip the parent's exit handlers


def _exit_with(sentinel: int) -> None:
    """Exit when the launcher ends, also by SIGKILL; ledgers and checkpoints stay consistent."""
    wait([sentinel])
    os._exit(4)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Hide the caller's main module: multiprocessing would run a script without `__main__` guard again in every child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@dataclass
class Child:
    """A process and how to start it.

    Attributes:
        title: Name in process lists and messages.
        main: Function of the process.
        spec: Its argument.
        log: Its log.
        process: The multiprocessing process, once started.
        sentinel: File descriptor that becomes readable when it has ended.
    """

    title: str
    main: Callable[[Any], None]
    spec: Any
    log: Path
    process: Any = None
    sentinel: int = -1

    def launch(self, context: Any) -> None:
        """Start the process.

        Args:
            context: multiprocessing context; with forkserver the process is forked from the preloaded parent.
        """
        with blocked_signals(), without_main(), single_threaded():  # starts the preloaded parent if it does not run yet
            self.process = context.Process(target=entry, args=(self.title, self.log, self.main, self.spec), name=self.title)
            self.process.start()
        try:
            self.sentinel = os.pidfd_open(self.process.pid)
        except ProcessLookupError:  # it has ended already
            self.sentinel = os.dup(self.process.sentinel)

    def alive(self) -> bool:
        """Return whether it runs."""
        return not wait([self.sentinel], 0)

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.alive():
            os.kill(self.process.pid, number)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait at most `timeout_s` seconds; return the exit code, `base.LOST` if it is unknown, or None while it runs."""
        if not wait([self.sentinel], timeout_s):
            return None
        self.process.join()
        code: int = self.process.exitcode
        return code

    def close(self) -> None:
        """Close the file descriptors of a process that has ended."""
        if self.process is not None:
            self.process.close()
            os.close(self.sentinel)
            self.process, self.sentinel = None, -1

    def failure(self, code: int | None) -> DpcflError:
        """Build the error of a run that cannot continue without it."""
        return failure(self.title, code, self.log)


class Ending(Protocol):
    """A process that can be ended."""

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait at most `timeout_s` seconds; return the exit code, or None while it runs."""

    def close(self) -> None:
        """Close its file descriptors."""


def stop(processes: Sequence[Ending], patience_s: float) -> None:
    """End processes: SIGTERM, and SIGKILL after `patience_s` seconds."""
    for process in processes:
        process.signal(signal.SIGTERM)
        process.signal(signal.SIGCONT)  # a stopped process does not receive SIGTERM
    deadline = time.monotonic() + patience_s
    for process in processes:
        if process.wait(max(0.05, deadline - time.monotonic())) is None:
            process.signal(signal.SIGKILL)
            process.wait()
        process.close()
