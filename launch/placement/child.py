"""One process that is forked from the preloaded parent: how it starts, what it inherits, and how it is known to have ended."""

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
from dpcfl_net.launch.interrupts import held_back, leave_to_the_launcher
from dpcfl_net.launch.placement.base import failure
from dpcfl_net.launch.placement.interpreter import single_threaded


def entry(title: str, log: Path, main: Callable[[Any], None], spec: Any) -> None:
    """What a forked child runs: its own log, its own title, its own random state, no inherited signal habits."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    starter = multiprocessing.parent_process()
    if starter is not None:
        sentinel = starter.sentinel
        threading.Thread(target=_die_with, args=(sentinel,), name="watch", daemon=True).start()
    run(title, main, spec)


def run(title: str, main: Callable[[Any], None], spec: Any) -> None:
    """Run `main` as a whole process whose standard output is its log; does not return."""
    import setproctitle

    leave_to_the_launcher()
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


def _die_with(sentinel: int) -> None:
    """Nobody outlives the launcher, however it ended; the ledger and the checkpoints are written for that."""
    wait([sentinel])
    os._exit(4)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Hide the caller's main module: multiprocessing would run a script that has no `__main__` guard again in every child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@dataclass
class Child:
    """One process and how to start it."""

    title: str
    main: Callable[[Any], None]
    spec: Any
    log: Path
    process: Any = None
    sentinel: int = -1

    def launch(self, context: Any) -> None:
        """Start it; with a forkserver context it is forked from the preloaded parent.

        `sentinel` becomes readable when it has ended, also if that parent, which alone learns the exit code, ended before.
        """
        with held_back(), without_main(), single_threaded():  # that parent starts here if it does not run yet
            self.process = context.Process(target=entry, args=(self.title, self.log, self.main, self.spec), name=self.title)
            self.process.start()
        try:
            self.sentinel = os.pidfd_open(self.process.pid)
        except ProcessLookupError:  # it has ended already
            self.sentinel = os.dup(self.process.sentinel)

    def alive(self) -> bool:
        """Whether it still runs."""
        return not wait([self.sentinel], 0)

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.alive():
            os.kill(self.process.pid, number)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code once it has ended, or None; `base.LOST` where nobody is left who learnt it."""
        if not wait([self.sentinel], timeout_s):
            return None
        self.process.join()
        code: int = self.process.exitcode
        return code

    def close(self) -> None:
        """Give the handles of a process that has ended back."""
        if self.process is not None:
            self.process.close()
            os.close(self.sentinel)
            self.process, self.sentinel = None, -1

    def failure(self, code: int | None) -> DpcflError:
        """What to tell the user when the run cannot go on without it."""
        return failure(self.title, code, self.log)


class Ending(Protocol):
    """A process that can be told to end."""

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code once it has ended, or None."""

    def close(self) -> None:
        """Give its handles back."""


def stop(processes: Sequence[Ending], patience_s: float) -> None:
    """Ask, then insist: none of these outlives the call."""
    for process in processes:
        process.signal(signal.SIGTERM)
        process.signal(signal.SIGCONT)  # one that is stopped hears nothing
    deadline = time.monotonic() + patience_s
    for process in processes:
        if process.wait(max(0.05, deadline - time.monotonic())) is None:
            process.signal(signal.SIGKILL)
            process.wait()
        process.close()
