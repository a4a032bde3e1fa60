"""One process of a run: how it starts, what it inherits, and how it is known to have ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from dpcfl_net.errors import DpcflError
from launch.launcher import failure


def entry(title: str, log: Path, main: Callable[[Any], None], spec: Any) -> None:
    """What a forked child runs: its own log, its own title, its own random state, no inherited signal habits."""
    import setproctitle

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher hears Ctrl-C and tells everybody in order
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    setproctitle.setproctitle(f"dpcfl {title}")
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    starter = multiprocessing.parent_process()
    if starter is not None:
        threading.Thread(target=_die_with, args=(starter.sentinel,), name="watch", daemon=True).start()
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


@dataclass
class Child:
    """One process and how to start it again."""

    title: str
    main: Callable[[Any], None]
    spec: Any
    log: Path
    process: Any = None

    def launch(self, context: Any) -> None:
        """Start it; with a forkserver context it is forked from the preloaded parent."""
        process = context.Process(target=entry, args=(self.title, self.log, self.main, self.spec), name=self.title)
        process.start()  # one that did not start cannot be joined
        self.process = process

    def take_exit(self) -> int:
        """The exit code of a process that has ended; its handles are given back."""
        self.process.join()
        code: int = self.process.exitcode
        self.process.close()
        self.process = None
        return code

    def failure(self, code: int | None) -> DpcflError:
        """What to tell the user when the run cannot go on without it."""
        return failure(self.title, code, self.log)


def stop(processes: list[Any], patience_s: float) -> None:
    """Ask, then insist: none of these outlives the call."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + patience_s
    for process in processes:
        process.join(timeout=max(0.05, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
