"""Shares of the hosts: which host runs which worker processes."""

from __future__ import annotations

from collections.abc import Sequence

from dpcfl_net.core.errors import ConfigError


def assign_processes(processes: int, shares: Sequence[int]) -> list[int]:
    """Assign processes to hosts in proportion to their shares, consecutive processes to different hosts.

    Args:
        processes: Number of worker processes.
        shares: Share of each host, at least 1.

    Returns:
        Index of the host of each process.
    """
    assigned, hosts = [0] * len(shares), []
    for _ in range(processes):
        chosen = min(range(len(shares)), key=lambda k: ((assigned[k] + 1) / shares[k], k))
        assigned[chosen] += 1
        hosts.append(chosen)
    return hosts


def share_processes(processes: int, shares: Sequence[int]) -> list[int]:
    """Count the worker processes of each host in proportion to its share; each host gets one at least.

    Args:
        processes: Number of worker processes.
        shares: Share of each host, at least 1.

    Raises:
        ConfigError: If there are more hosts than processes.
    """
    if processes < len(shares):
        raise ConfigError(f"{len(shares)} hosts for {processes} worker processes: with --tree each host runs at least one")
    counts = [1] * len(shares)
    for _ in range(processes - len(shares)):
        counts[min(range(len(shares)), key=lambda k: ((counts[k] + 1) / shares[k], k))] += 1
    return counts
