"""`dpcfl` as a process, and the processor time of all processes that it starts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import psutil

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.launch.bench.timing import Sample

LOOK_S = 0.05


def dpcfl(*arguments: object, **environment: str) -> Sample:
    """Run `dpcfl` with arguments and further environment variables, and return its seconds.

    The fork servers do not wait for all of their processes, so that the system's sums lack some: each process is looked at until
    it ends, which misses its last twentieth of a second.

    Raises:
        RunFailed: If it fails.
    """
    spent: dict[int, float] = {}
    return _watched(arguments, environment, lambda launcher: _look(launcher, spent), spent)


def dpcfl_with_memory(*arguments: object) -> tuple[Sample, float]:
    """Run `dpcfl` as above; return its seconds, and the largest private memory of its first process in bytes.

    Raises:
        RunFailed: If it fails.
    """
    spent: dict[int, float] = {}
    sizes = [0.0]

    def look(launcher: psutil.Process) -> None:
        _look(launcher, spent)
        with contextlib.suppress(psutil.Error):
            sizes.append(float(launcher.memory_full_info().uss))

    return _watched(arguments, {}, look, spent), max(sizes)


def _watched(
    arguments: tuple[object, ...], environment: dict[str, str], look: Callable[[psutil.Process], None], spent: dict[int, float]
) -> Sample:
    command = [sys.executable, "-m", "dpcfl_net", *map(str, arguments)]
    with tempfile.TemporaryFile() as errors:
        begin = time.perf_counter()
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env={**os.environ, **environment})
        launcher = psutil.Process(run.pid)
        while run.poll() is None:
            look(launcher)
            time.sleep(LOOK_S)
        wall = time.perf_counter() - begin
        if run.returncode:
            errors.seek(0)
            raise RunFailed(f"{' '.join(command)} failed: {errors.read().decode(errors='replace')[-500:]}")
    return Sample(sum(spent.values()), wall)


def _look(launcher: psutil.Process, spent: dict[int, float]) -> None:
    """Note the processor time so far of a process and its descendants."""
    with contextlib.suppress(psutil.Error):
        for process in (launcher, *launcher.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                spent[process.pid] = times.user + times.system
