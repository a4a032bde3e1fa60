"""The process that holds a lock file: it writes its id into the file, and others look whether it is stopped."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_WIDTH = 160  # bytes of an entry: each overwrites the one before as a whole


def write_holder(handle: int) -> None:
    """Write this process into a lock file that it holds.

    Args:
        handle: Descriptor of the file, open for writing.

    Raises:
        OSError: If the file cannot be written, as on a full disk.
    """
    os.pwrite(handle, f"{os.getpid()} {_kernel()}".ljust(_WIDTH).encode(), 0)


def holder_of(lock: Path) -> int | None:
    """Read which process wrote itself last into a lock file.

    Args:
        lock: The file.

    Returns:
        Process id; None if the process is on another host or in another container, none wrote itself, or the file is gone.
    """
    try:
        number, _, kernel = lock.read_text("ascii", "replace").partition(" ")
    except FileNotFoundError:
        return None
    return int(number) if kernel.strip() == _kernel() and number.isdigit() else None


def is_stopped(process: int) -> bool:
    """Return True if a process is stopped, as by Ctrl-Z.

    Args:
        process: Process id on this host.
    """
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return False
    return state == "T"


@cache
def _kernel() -> str:
    """Name this run of the host's kernel and the process ids that this process sees."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
