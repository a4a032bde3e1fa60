"""The fork servers of this launcher: one with libraries alone, and one, forked from it, with the job of the workers.

The coordinator and the observer are children of the first, which never holds a configuration or data.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.launch.placement.child import Child, EndedEarly, ForkServer, start_of, worker_environment
from dpcfl_net.launch.placement.fork_server import Start

# Folder, operator's key and data folder of a job.
JobSource = tuple[Path, str, str | None]
ENDING_S = 1.0  # a process that is killed closes its sockets before it counts as ended
_lock = threading.RLock()  # threads of a program may each begin a run
_libraries: ForkServer | None = None
_workers: ForkServer | None = None
_calls, _stay = 0, False  # open `for_a_call` blocks, and whether a fork server ran before the first of them


def warm() -> ForkServer:
    """Return the fork server with libraries alone; start it if it does not run. It loads them while this process goes on."""
    global _libraries
    with _lock:
        if _libraries is None or not _libraries.alive():
            if _libraries is not None:
                _libraries.close()
            _libraries = ForkServer()
        return _libraries


def preload(job: JobSource | None = None) -> ForkServer:
    """Return the parent of all workers; start it if it does not run.

    Args:
        job: A job to read in advance, which workers inherit; no effect if the parent runs.
    """
    global _workers
    with _lock:
        if _workers is None or not _workers.alive():
            if _workers is not None:
                _workers.close()
            main = "dpcfl_net.launch.placement.preload:serve_workers"
            start = start_of(main, job, worker_environment(), watches_launcher=False)
            _workers = ForkServer(fork_role("parent of all workers", start, Path(os.devnull)))
        return _workers


def fork_role(title: str, start: Start, log: Path, descriptors: Sequence[int] = ()) -> Child:
    """Fork a coordinator, an observer or a run in one process; see `ForkServer.fork`."""
    return _fork(warm, title, start, log, descriptors)


def fork_worker(title: str, start: Start, log: Path, descriptors: Sequence[int] = ()) -> Child:
    """Fork a worker; see `ForkServer.fork`."""
    return _fork(preload, title, start, log, descriptors)


def _fork(parent: Callable[[], ForkServer], title: str, start: Start, log: Path, descriptors: Sequence[int]) -> Child:
    """Fork a process; once again if it or its parent has ended in the meantime."""
    server = parent()
    try:
        return server.fork(title, start, log, descriptors)
    except RunFailed as error:
        if not isinstance(error, EndedEarly) and server.alive(ENDING_S):
            raise
        return parent().fork(title, start, log, descriptors)


@contextlib.contextmanager
def for_a_call() -> Iterator[None]:
    """End, after the block, the fork servers that were started inside; those that other threads use end with their last block."""
    global _calls, _stay
    with _lock:
        _stay = _stay if _calls else _libraries is not None
        _calls += 1
    try:
        yield
    finally:
        with _lock:
            _calls -= 1
            if not _calls and not _stay:
                close()


def pids() -> set[int]:
    """Return the process ids of the fork servers; the second outlives the first, which then is not its parent any more."""
    return {server.pid for server in (_libraries, _workers) if server is not None and server.alive()}


@atexit.register
def _close_at_exit() -> None:
    """End both fork servers when this process exits. Python would print the traceback of a further Ctrl-C, which has nothing to end."""
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
    try:
        close()
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def close() -> None:
    """End both fork servers. Processes that they have forked continue."""
    global _libraries, _workers
    with _lock:
        for server in (_workers, _libraries):
            if server is not None:
                server.close()
        _libraries = _workers = None
