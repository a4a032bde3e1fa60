"""The machine and the versions that figures belong to."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

from dpcfl_net.core import host_memory
from dpcfl_net.core.cores import usable_cores
from dpcfl_net.experiment.host_costs import processor

PACKAGES = ("torch", "numpy", "opacus", "scikit-learn", "flwr", "ray", "pfl", "grpcio", "pyzmq")


def describe() -> dict[str, Any]:
    """Return processor, cores, memory and versions of packages."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "memory_gib": round(host_memory.total() / 2**30, 1),
        "system": f"{platform.system()}, Python {platform.python_version()}",
        "versions": versions,
    }


def headline(machine: dict[str, Any]) -> str:
    """Format the machine in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {machine['system']}; {versions}"
