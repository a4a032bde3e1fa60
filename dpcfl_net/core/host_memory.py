"""How much memory this process may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dpcfl_net.core import cgroups


class Limit(NamedTuple):
    """Limit of a group of processes.

    Attributes:
        total: Bytes that the group may use.
        free: Bytes that it does not use; memory of files that the kernel would give up first counts as unused.
    """

    total: int
    free: int


def total() -> int:
    """Return the memory of this host in bytes, or less where the container or batch job of this process has a limit."""
    import psutil

    return min([psutil.virtual_memory().total, *(limit.total for limit in _limits())])


def available() -> int:
    """Return the bytes that this process may still use without swapping: those of the host, or fewer under a limit, as `total`.

    Limits are those of cgroup v2 (`docker --memory`, memory limits of Kubernetes, `--mem` of SLURM, MemoryMax of systemd).
    """
    import psutil

    return min([psutil.virtual_memory().available, *(limit.free for limit in _limits())])


def _limits() -> Iterator[Limit]:
    """Limits of the groups of this process; the root has none, and a group outside a container's view has no file."""
    for folder in cgroups.folders():
        try:
            if (limit := (folder / "memory.max").read_text().strip()) != "max":
                used = int((folder / "memory.current").read_text()) - _given_up(folder)
                yield Limit(int(limit), max(0, int(limit) - used))
        except OSError:
            continue


def _given_up(folder: Path) -> int:
    """Bytes of cached files that were not used lately, which the kernel gives up before it ends a process."""
    lines = (folder / "memory.stat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
