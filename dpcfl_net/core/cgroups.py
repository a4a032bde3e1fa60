"""Control groups that limit this process: its own and those around it, as of a container or a batch job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def folders(controller: str = "") -> Iterator[Path]:
    """Yield the folders of the groups, as far as they are visible, the process's own group first.

    Args:
        controller: Controller of cgroup v1, as "memory", which has groups apart; empty: cgroup v2.
    """
    group = PurePosixPath(_own_group(controller))
    for around in [group, *group.parents]:
        yield CGROUPS / controller / around.relative_to("/")


def _own_group(controller: str) -> str:
    """Path of the process's group; "/" without one."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:  # no /proc
        return "/"
    found = (path for _, names, path in (line.split(":", 2) for line in lines) if controller in names.split(","))
    return next((path for path in found if path.startswith("/") and "/.." not in path), "/")
