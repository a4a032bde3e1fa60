"""The limit on open files (`ulimit -n`): shells set it to 1,024, and each process that needs more raises it for itself."""

from __future__ import annotations

import resource

OTHERS, PER_CLIENT = 128, 4  # of a launcher, a coordinator or a group of clients


def files_for(clients: int) -> int:
    """Return how many files a process that serves so many clients may have open."""
    return OTHERS + PER_CLIENT * clients


def allow(wanted: int) -> int:
    """Raise the limit on open files of this process, as far as the system allows.

    Args:
        wanted: Number of files.

    Returns:
        The limit, at most `wanted` if it is unlimited or was raised.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    allowed = max(soft, wanted if hard == resource.RLIM_INFINITY else min(wanted, hard))
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
