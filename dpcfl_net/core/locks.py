"""File locks between processes; the kernel releases a lock when its holder ends."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from dpcfl_net.core.errors import RunInUse
from dpcfl_net.core.run_folder import RunFolder

POLL_S = 0.02
PROBE_S = 0.2
UNKNOWN = {errno.EACCES, errno.EPERM, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # errors of a probe


@contextmanager
def locked(path: Path, timeout_s: float = -1) -> Iterator[None]:
    """Hold an exclusive lock inside the `with` block; wait for it first.

    Args:
        path: Lock file, created with mode 0600 and never removed. Its folder must exist.
        timeout_s: Longest wait in seconds; -1 for no limit.

    Raises:
        TimeoutError: If another process still holds the lock after `timeout_s`.
        OSError: If the file cannot be opened, or the file system has no locks.
    """
    deadline = time.monotonic() + timeout_s
    while (handle := try_lock(path)) is None:
        if timeout_s >= 0 and time.monotonic() > deadline:
            raise TimeoutError(f"another process holds {path} for more than {timeout_s:g} s")
        time.sleep(POLL_S)
    try:
        yield
    finally:
        os.close(handle)


# Not the package filelock: its first use makes 1.7 MiB of a forked worker private.
def try_lock(path: Path) -> int | None:
    """Take an exclusive lock without waiting.

    Args:
        path: Lock file, created with mode 0600.

    Returns:
        The descriptor that holds the lock until it is closed; None if another process holds it.

    Raises:
        OSError: If the file cannot be opened, or the file system has no locks.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    held = False
    try:
        held = _flock(handle, fcntl.LOCK_EX)
    finally:
        if not held:
            os.close(handle)
    return handle if held else None


def try_own(path: Path) -> int | None:
    """Take a lock without waiting, as `try_lock`, where a process that holds the lock may also remove its file.

    Returns:
        The descriptor; None also if another process removed or replaced the file before its lock was taken.
    """
    handle = try_lock(path)
    if handle is None:
        return None
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(handle), path.stat()):
            return handle
    os.close(handle)
    return None


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder inside the `with` block.

    Raises:
        RunInUse: If another process runs the folder.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(RunFolder(folder).lock, PROBE_S))  # `is_held` may hold it for a moment
        except TimeoutError:
            raise RunInUse(f"{folder} is being run by another process") from None
        yield


def is_running(folder: Path) -> bool:
    """Return True if a process holds the lock of a run folder.

    Raises:
        OSError: If the lock file cannot be opened, or the file system has no locks.
    """
    return _is_taken(RunFolder(folder).lock)


def is_held(folder: Path) -> bool | None:
    """Look whether a process holds the lock of a run folder.

    Args:
        folder: The run folder.

    Returns:
        False if no process does; None if this is unknown: there is no lock file (a copied folder, or that of an observer that was
        started manually), it belongs to another user, or the file system has no locks.
    """
    return is_locked(RunFolder(folder).lock)


def is_locked(path: Path) -> bool | None:
    """Look whether a process holds a lock.

    Args:
        path: Lock file.

    Returns:
        False if no process does; None if this is unknown, as for `is_held`.
    """
    if not path.exists():
        return None
    try:
        return _is_taken(path)
    except OSError as error:
        if error.errno in UNKNOWN:
            return None
        raise


def _is_taken(path: Path) -> bool:
    """True if a process holds a lock; errors as `is_running`."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _flock(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)


def _flock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
