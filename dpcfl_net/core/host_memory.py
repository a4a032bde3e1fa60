"""How much memory this process may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dpcfl_net.core import cgroups

# By controller of cgroup v1, or "" for v2: files of limit and usage, and the line of memory.stat with cached files that were not used
# lately.
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file "),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
}


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

    Limits are those of cgroup v2 and v1 (`docker --memory`, memory limits of Kubernetes, `--mem` of SLURM, MemoryMax of systemd).
    """
    import psutil

    return min([psutil.virtual_memory().available, *(limit.free for limit in _limits())])


def _limits() -> Iterator[Limit]:
    """Limits of the groups of this process; the root of v2 has none, and a group outside a container's view has no file."""
    for controller, (limit, used, cached) in _FILES.items():
        for folder in cgroups.folders(controller):
            try:
                if (most := (folder / limit).read_text().strip()) != "max":
                    held = int((folder / used).read_text()) - _given_up(folder, cached)
                    yield Limit(int(most), max(0, int(most) - held))
            except OSError:
                continue


def _given_up(folder: Path, cached: str) -> int:
    """Bytes of cached files that were not used lately, which the kernel gives up before it ends a process."""
    lines = (folder / "memory.stat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(cached)), 0)
