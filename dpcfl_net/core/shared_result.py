"""A result in a file that several processes need: one computes it, and the others wait for the file."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dpcfl_net.core.lock_holders import holder_of, is_stopped, write_holder
from dpcfl_net.core.locks import try_lock

LOOK_S = 0.1  # between looks at a result that another process makes
SAY_S = 10.0  # of waiting before the log names that process
T = TypeVar("T")
_log = logging.getLogger(__name__)


def shared(lock: Path, find: Callable[[], T | None], make: Callable[[], T]) -> T:
    """Find a result, or make and keep it: one process makes it, and others with the same lock wait for it.

    If the process that makes it is stopped (Ctrl-Z), another one makes it as well, so that what two make must be the same.

    Args:
        lock: Lock file, created with mode 0600 and never removed. Its folder must exist.
        find: Returns the result that is kept, or None.
        make: Makes the result and keeps it, so that `find` returns it.
    """
    path, replaced, began, said = lock, 0, time.monotonic(), False
    while (handle := try_lock(path)) is None:
        if (found := find()) is not None:
            return found
        holder = holder_of(path)
        if holder is not None and is_stopped(holder):
            _log.warning("process %d is stopped while it makes %s: this process makes it as well", holder, lock)
            replaced += 1
            path = lock.with_name(f"{lock.name}-{replaced}")
            continue
        if not said and time.monotonic() > began + SAY_S:
            said = True
            who = f"process {holder}" if holder else "a process of another host or container"
            _log.warning("waiting for %s, which holds %s and makes a result that this process needs", who, lock)
        time.sleep(LOOK_S)
    try:
        write_holder(handle)
        return made if (made := find()) is not None else make()
    finally:
        os.close(handle)
