"""The processes of a run in this process tree, by role."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import psutil

from dpcfl_net.transport.keys import AGGREGATOR

Member = tuple[str, psutil.Process]
MOST_READ = 32  # processes of a role whose memory is read: a look at a thousand would outlast the rounds


@dataclass(frozen=True)
class Memory:
    """Memory of the processes of one role, in bytes.

    Attributes:
        processes: Number of processes.
        private: Median of the private memory of a process (USS).
        all_private: Private memory of all.
        shared: Largest shared memory of a process.
        proportional: Median of the proportional set size of a process (PSS).
        all_proportional: Proportional set sizes of all.
    """

    processes: int
    private: float
    all_private: float
    shared: int
    proportional: float
    all_proportional: float


def role_of(name: str) -> str:
    """Return the role of a process from the first word of its title: all clients are workers, and aggregators have a number."""
    if name.startswith(AGGREGATOR):
        return AGGREGATOR
    return {"client": "worker", "clients": "worker"}.get(name, name)


def members() -> Iterator[Member]:
    """Yield role and process of this launcher and of all processes of its run."""
    me = psutil.Process()
    yield "launcher", me
    for process in me.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = process.cmdline()[0] if process.cmdline() else ""
            words = title.removeprefix("dpcfl ").split()
            if title.startswith("dpcfl ") and words:
                yield role_of(words[0]), process


def processor_seconds(family: Iterable[Member]) -> dict[str, float]:
    """Return processor seconds by role; ended workers are counted in their parent process."""
    found: dict[str, float] = {}
    for role, process in family:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found[role] = found.get(role, 0.0) + times.user + times.system
            if role == "parent":
                found["worker"] = found.get("worker", 0.0) + times.children_user + times.children_system
    return found


def memory(family: Iterable[Member]) -> dict[str, Memory]:
    """Return the memory of the processes by role, computed from at most MOST_READ processes of each; roles that have ended are left out."""
    by_role: dict[str, list[psutil.Process]] = {}
    for role, process in family:
        by_role.setdefault(role, []).append(process)
    found = {}
    for role, processes in by_role.items():
        sizes = []
        for process in processes[:: -(-len(processes) // MOST_READ)]:
            with contextlib.suppress(psutil.Error):
                info = process.memory_full_info()
                if info.rss:  # 0: it has ended
                    sizes.append(info)
        if sizes:
            private, proportional = [info.uss for info in sizes], [info.pss for info in sizes]
            found[role] = Memory(
                len(processes),
                statistics.median(private),
                statistics.fmean(private) * len(processes),
                max(info.rss - info.uss for info in sizes),
                statistics.median(proportional),
                statistics.fmean(proportional) * len(processes),
            )
    return found
