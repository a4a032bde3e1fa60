"""Row start: how soon workers begin, what their start costs, and how long the quickstart takes without caches."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.launch import new_run
from dpcfl_net.launch.bench import noop_algorithm, runs
from dpcfl_net.launch.bench.figures import OURS, Figure, Target
from dpcfl_net.launch.bench.options import Options
from dpcfl_net.launch.bench.processes import dpcfl
from dpcfl_net.launch.bench.sizes import CLIENTS, MIB
from dpcfl_net.launch.bench.timing import Sample, interleave, timed

IMPORTS = "import numpy, torch, zmq, msgpack"


def measure(options: Options) -> list[Figure]:
    """Measure a run of three no-op rounds, the same number of fresh torch processes, memory of a worker, and the quickstart."""
    clients = 2 if options.quick else CLIENTS
    if options.quick:
        return [_memory(clients, options)]
    firsts: list[float] = []
    ways: dict[str, Callable[[], Sample]] = {
        OURS: partial(_run, clients, firsts),
        "fresh torch processes": timed(partial(_spawn, clients)),
    }
    samples = interleave(ways, options.times(3))
    targets = [Target(10.0, "fresh torch processes")]
    return [
        Figure.of_values(f"until the first task, {clients} workers", "s of wall time", {OURS: firsts}),
        Figure.of_times(f"start and three rounds, {clients} workers", "s", samples, targets, scale=1.0),
        _memory(clients, options),
        _quickstart(options),
    ]


def _memory(clients: int, options: Options) -> Figure:
    cost = runs.noop("cnn", clients, 15 if options.quick else 12)
    return Figure.of_values(
        "private memory of a worker after a step", "MiB", {OURS: [cost.private["worker"] / MIB]}, [Target(12.0)]
    )


def _run(clients: int, firsts: list[float]) -> Sample:
    """Run three no-op rounds as `dpcfl run`; appends the seconds until the first task was sent to `firsts`."""
    with tempfile.TemporaryDirectory(prefix="dpcfl-bench-") as name:
        folder = Path(name) / "written"
        config = runs.config("cnn", clients, 0, {"name": noop_algorithm.NAME})
        new_run.write_config(folder, config)
        begin = time.time()
        sample = dpcfl("run", RunFolder(folder).config, "--out", Path(name) / "runs")
        (run,) = (Path(name) / "runs").iterdir()
        lines = map(json.loads, RunFolder(run).messages.read_text().splitlines())
        firsts.append(next(line["time"] for line in lines if line["kind"] == "TASK") - begin)
        return sample


def _spawn(count: int) -> None:
    """Start processes that import what a worker imports, and wait for all."""
    children = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", IMPORTS]) for _ in range(count)]
    for child in children:
        child.wait()


def _quickstart(options: Options) -> Figure:
    samples = interleave(
        {OURS: partial(_fresh, cold=True), "with caches": partial(_fresh, cold=False)}, min(2, options.times(2))
    )
    return Figure.of_times("quickstart without caches", "s", samples, scale=1.0)


def _fresh(*, cold: bool) -> Sample:
    with tempfile.TemporaryDirectory(prefix="dpcfl-bench-") as name:
        return dpcfl("quickstart", "--out", Path(name) / "runs", **({"XDG_CACHE_HOME": name} if cold else {}))
