"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from dpcfl_net.core import cgroups


def usable_cores() -> int:
    """Count the cores that this process may use: those of its affinity, or fewer where its container or batch job has a quota.

    Quotas are those of cgroup v2 (`docker --cpus`, CPU limits of Kubernetes, CPUQuota of systemd). A part of a core counts as one.
    """
    return min([len(os.sched_getaffinity(0)), *(math.ceil(quota) for quota in _quotas())])


def _quotas() -> Iterator[float]:
    """Quotas in cores, above 0, of the groups of this process."""
    for folder in cgroups.folders():
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except OSError:  # the root has no quota, and a group outside a container's view has no file
            continue
        if quota != "max":
            yield int(quota) / int(period)
