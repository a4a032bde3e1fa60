"""`dpcfl` as a process, and the processor time of all processes that it starts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time

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
    command = [sys.executable, "-m", "dpcfl_net", *map(str, arguments)]
    spent: dict[int, float] = {}
    with tempfile.TemporaryFile() as errors:
        begin = time.perf_counter()
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env={**os.environ, **environment})
        while run.poll() is None:
            _look(run.pid, spent)
            time.sleep(LOOK_S)
        wall = time.perf_counter() - begin
        if run.returncode:
            errors.seek(0)
            raise RunFailed(f"{' '.join(command)} failed: {errors.read().decode(errors='replace')[-500:]}")
    return Sample(sum(spent.values()), wall)


def _look(pid: int, spent: dict[int, float]) -> None:
    """Note the processor time so far of a process and its descendants."""
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                spent[process.pid] = times.user + times.system
