"""The processes of a run in this process tree, by role."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import psutil

Member = tuple[str, psutil.Process]


def members() -> Iterator[Member]:
    """Yield role and process of this launcher and of all processes of its run."""
    me = psutil.Process()
    yield "launcher", me
    for process in me.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = process.cmdline()[0] if process.cmdline() else ""
            words = title.removeprefix("dpcfl ").split()
            if title.startswith("dpcfl ") and words:
                yield {"client": "worker", "clients": "worker"}.get(words[0], words[0]), process


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
