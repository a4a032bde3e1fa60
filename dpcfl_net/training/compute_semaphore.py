"""Limit on the number of workers that compute at the same time on one host, across runs of one user."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import select
import stat
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.lock_holders import holder_of, is_stopped, write_holder

AGAIN_S = 1.0  # polling interval of a waiting worker: a holder that was killed sends no wake-up
_log = logging.getLogger(__name__)


def host_folder() -> Path:
    """Return the folder that all workers of this user on this host share until it restarts.

    It lies below $XDG_RUNTIME_DIR or, where there is no such folder, /tmp, never below a home directory, which hosts may share.

    Raises:
        RunFailed: If the folder cannot be created or belongs to another user.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    base = os.environ.get("XDG_RUNTIME_DIR")
    # srun passes on the variable of the host of the login; on a node without a login there is no such folder.
    home = Path(base) / "dpcfl_net" if base and os.path.isdir(base) else Path("/tmp") / f"dpcfl_net-{os.getuid()}"
    for folder in (home, home / boot):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
        except OSError as error:
            raise RunFailed(
                f"the folder of compute slots {folder} cannot be created: {error.strerror}; set XDG_RUNTIME_DIR"
            ) from None
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise RunFailed(f"{folder} is not a folder of this user; set XDG_RUNTIME_DIR to one that is")
    return home / boot


def cpu_folder() -> Path:
    """Return the folder of the CPU slots, one for each set of cores that this user's processes may use.

    Batch jobs on disjoint cores of a host do not wait for each other. Sets that overlap without being equal do not share slots.

    Raises:
        RunFailed: As `host_folder`.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == os.cpu_count():
        return host_folder() / "cpu"
    return host_folder() / f"cpu-{hashlib.sha256(repr(cores).encode()).hexdigest()[:12]}"


class ComputeSemaphore:
    """Semaphore between processes, made of file locks: the kernel releases the slot of a dead holder.

    It calls flock itself, since a worker tries many locks without waiting and keeps their descriptors open between steps.
    There is no queue, so a worker that is stopped while it waits blocks no other. Releasing a slot writes a byte to a pipe,
    which wakes one waiter. While the holder of a slot is stopped, as by Ctrl-Z, a waiter takes a stand-in of the slot: once the
    holder continues, both compute for a moment.

    Args:
        folder: Folder of the lock files, common to all workers.
        count: Number of slots.
        stand_ins: False if a slot also stands for memory, which a stopped holder keeps: waiters name the holder and wait.
    """

    def __init__(self, folder: Path, count: int, *, stand_ins: bool = True) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._semaphore = [_Slot(folder / f"slot_{k}", stand_ins=stand_ins) for k in range(count)]
        with suppress(FileExistsError):
            os.mkfifo(folder / "free", 0o600)
        self._free = os.open(folder / "free", os.O_RDWR | os.O_NONBLOCK)
        self._waiting = select.epoll()
        self._waiting.register(self._free, select.EPOLLIN | select.EPOLLEXCLUSIVE)

    def close(self) -> None:
        """Close all descriptors; the semaphore cannot be used any more."""
        self._waiting.close()
        os.close(self._free)
        for slot in self._semaphore:
            slot.close()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold a slot inside the context; blocks until one is free."""
        while (slot := self._take()) is None:
            self._sleep()
        with suppress(OSError):  # on a full disk the holder stays unknown, and is waited for while it is stopped
            write_holder(slot)
        try:
            yield
        finally:
            fcntl.flock(slot, fcntl.LOCK_UN)
            self._wake()

    def _take(self) -> int | None:
        return next((handle for slot in self._semaphore if (handle := slot.take()) is not None), None)

    def _sleep(self) -> None:
        if not self._waiting.poll(AGAIN_S):
            for slot in self._semaphore:
                slot.look()
            return
        with suppress(BlockingIOError):  # another waiter took the byte
            os.read(self._free, 1)

    def _wake(self) -> None:
        pending = int.from_bytes(fcntl.ioctl(self._free, termios.FIONREAD, bytes(4)), "little")
        if pending < len(self._semaphore):  # more wake-ups than slots are useless
            os.write(self._free, b"x")


class _Slot:
    """A lock file, and once its holder was seen stopped, a stand-in that is used while the holder is stopped."""

    def __init__(self, path: Path, *, stand_ins: bool) -> None:
        self._path, self._stand_ins = path, stand_ins
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._stand_in: _Slot | None = None
        self._named: int | None = None

    def take(self) -> int | None:
        """Lock the file, or the stand-in, without waiting; returns the descriptor that is locked."""
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._stand_in.take() if self._stand_in is not None and self._stopped() is not None else None
        return self._handle

    def look(self) -> None:
        """Look whether the holder is stopped, say so once, and open a stand-in."""
        holder = self._stopped()
        if holder is None:
            return
        if holder != self._named:
            self._named = holder
            _log.warning(
                "process %d is stopped while it holds %s: %s", holder, self._path,
                "this process does not wait for it" if self._stand_ins else "this process waits until it continues or ends",
            )  # fmt: skip
        if self._stand_ins and self._stand_in is None:
            self._stand_in = _Slot(self._path.with_name(f"{self._path.name}_stand_in"), stand_ins=True)
        if self._stand_in is not None:
            self._stand_in.look()

    def close(self) -> None:
        """Close the file and its stand-ins."""
        os.close(self._handle)
        if self._stand_in is not None:
            self._stand_in.close()

    def _stopped(self) -> int | None:
        holder = holder_of(self._path)
        return holder if holder is not None and is_stopped(holder) else None
