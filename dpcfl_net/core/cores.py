"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Count the cores that this process may use: those of its affinity, or fewer where its container or batch job has a quota.

    Quotas are those of cgroup v2 (`docker --cpus`, CPU limits of Kubernetes, CPUQuota of systemd). A part of a core counts as one.
    """
    return min([len(os.sched_getaffinity(0)), *(math.ceil(quota) for quota in _quotas())])


def _quotas() -> Iterator[float]:
    """Quotas in cores, above 0, of the process's own group and of those around it, as far as they are visible."""
    group = PurePosixPath(_own_group())
    for around in [group, *group.parents]:
        try:
            quota, period = (CGROUPS / around.relative_to("/") / "cpu.max").read_text().split()
        except OSError:  # the root has no quota, and a group outside a container's view has no file
            continue
        if quota != "max":
            yield int(quota) / int(period)


def _own_group() -> str:
    """Path of the process's group of cgroup v2; "/" without one."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:  # no /proc
        return "/"
    return next((line[3:] for line in lines if line.startswith("0::/") and "/.." not in line), "/")
