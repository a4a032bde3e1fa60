"""The limit on open files (`ulimit -n`): shells set it to 1,024, and each process that needs more raises it for itself."""

from __future__ import annotations

import resource

OTHERS, PER_CLIENT = 128, 4  # of a launcher or a coordinator
PER_SERVED = 16  # of a worker process: a client has 4 sockets of ZeroMQ, 2 connections, an open ledger and a pipe


def files_for(clients: int, each: int = PER_CLIENT) -> int:
    """Return how many files a process of so many clients may have open.

    Args:
        clients: Number of clients.
        each: Files of a client: `PER_CLIENT`, or `PER_SERVED` in a worker process.
    """
    return OTHERS + each * clients


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
