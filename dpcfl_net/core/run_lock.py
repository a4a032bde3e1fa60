"""The lock of a run folder: one process runs it, and everybody can see whether one does."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpcfl_net.core.errors import ConfigError

LOCK = ".lock"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the lock inside; ConfigError while another process runs the folder."""
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder} is being run by another process") from None
        yield
    finally:
        os.close(handle)


def is_running(folder: Path) -> bool:
    """True while a process holds the lock."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
