"""Groups of cgroup v2 that limit this process: its own and those around it, as of a container or a batch job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def folders() -> Iterator[Path]:
    """Yield the folders of the groups, as far as they are visible, the process's own group first."""
    group = PurePosixPath(_own_group())
    for around in [group, *group.parents]:
        yield CGROUPS / around.relative_to("/")


def _own_group() -> str:
    """Path of the process's group; "/" without one."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:  # no /proc
        return "/"
    return next((line[3:] for line in lines if line.startswith("0::/") and "/.." not in line), "/")
