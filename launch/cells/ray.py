"""Cells of a sweep as Ray tasks. Nodes and this machine share the folder of the sweep and the run store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.run_folder import SweepFolder
from dpcfl_net.launch.cells.local import CellProcess
from dpcfl_net.launch.cells.outcome import FAILED, INTERRUPTED, CellOutcome
from dpcfl_net.launch.cells.queue import CellPlace
from dpcfl_net.launch.placement.ray import describe_error, import_ray
from dpcfl_net.launch.placement.slurm_batch import Resources

RETRIES = 3  # after the loss of a node Ray runs the cell on another one, where it resumes
STOP_S, POLL_S = 8.0, 0.2
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def run_on_node(folder: str, index: int, slots: int, where: str) -> str:
    """Run one cell in a process of this node.

    Args:
        folder: Folder of the sweep.
        index: Number of the cell, from 0.
        slots: Workers that may compute at once.
        where: Working folder of the sweep's command, for relative paths of the configuration.

    Returns:
        The outcome as JSON.
    """
    if not SweepFolder(folder).sweep.exists():
        error = f"this node does not see {folder}: --on ray needs a file system that all nodes share"
        return CellOutcome(Path(folder), FAILED, error=error).to_json()
    if os.path.isdir(where):
        os.chdir(where)
    process = CellProcess(Path(folder), SweepFolder(folder).log(f"ray_{index}"))
    try:
        process.start({"cell": index}, slots)
        while not wait([process.outcomes.fileno()], POLL_S):  # Ray cancels a task between two of these waits
            continue
        return process.outcome(Path(folder)).to_json()
    finally:
        process.interrupt()
        process.close(STOP_S)


class RayCells(CellPlace):
    """Runs cells as Ray tasks; tasks that do not fit wait in Ray, which an autoscaling cluster sees.

    Args:
        folder: Folder of the sweep, with sweep.json.
        runs: Run folder of each cell.
        resources: CPUs, GPUs and memory of each cell.
        jobs: Most cells at once; None: as many as fit.

    Raises:
        ConfigError: If Ray is not installed or the cluster does not answer.
    """

    def __init__(self, folder: Path, runs: Sequence[Path], resources: Resources, jobs: int | None) -> None:
        self._ray = ray = import_ray()
        self._folder, self._runs, self._jobs = folder.resolve(), runs, jobs
        self._own = not ray.is_initialized()
        if self._own:
            try:
                ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
            except (OSError, RuntimeError) as error:
                raise ConfigError(f"--on ray: {describe_error(error)}") from None
        self._cpus, memory = resources.cpus, memory_bytes(resources.memory) if resources.memory else 0
        self._needed = {"CPU": resources.cpus, "GPU": resources.gpus, "memory": memory}
        self._task = ray.remote(run_on_node).options(
            num_cpus=resources.cpus, num_gpus=resources.gpus, max_retries=RETRIES, name="dpcfl cell",
            **({"memory": memory} if memory else {}),
        )  # fmt: skip
        self._tasks: dict[Any, int] = {}

    def note(self) -> str:
        """Return a sentence if no node of the cluster can run a cell now; empty otherwise."""
        needed = {name: amount for name, amount in self._needed.items() if amount}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if any(all(node.get(name, 0) >= amount for name, amount in needed.items()) for node in nodes):
            return ""
        asked = ", ".join(f"{amount:,} {name}" for name, amount in needed.items())
        return f"no node of the Ray cluster has {asked} for a cell: cells wait for one, which an autoscaling cluster adds"

    def free(self) -> bool:
        return self._jobs is None or len(self._tasks) < self._jobs

    def start(self, index: int, left: int) -> None:
        self._tasks[self._task.remote(str(self._folder), index, self._cpus, os.getcwd())] = index

    def wait(self, also: Sequence[Any], timeout_s: float) -> list[tuple[int, CellOutcome]]:
        if not self._tasks:
            wait(also, timeout_s)
            return []
        ready, _ = self._ray.wait(list(self._tasks), num_returns=1, timeout=timeout_s, fetch_local=True)
        return [self._take(task) for task in ready]

    def stop(self) -> list[tuple[int, CellOutcome]]:
        for task in self._tasks:
            self._ray.cancel(task)
        if self._tasks:
            self._ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=STOP_S)
        stopped = [(index, CellOutcome(self._runs[index], INTERRUPTED)) for index in self._tasks.values()]
        self._tasks = {}
        return stopped

    def close(self) -> None:
        if self._own:
            self._ray.shutdown()

    def _take(self, task: Any) -> tuple[int, CellOutcome]:
        index = self._tasks.pop(task)
        try:
            return index, CellOutcome.from_json(self._runs[index], self._ray.get(task))
        except (self._ray.exceptions.RayError, ConfigError) as error:
            return index, CellOutcome(self._runs[index], FAILED, error=describe_error(error))


def memory_bytes(text: str) -> int:
    """Convert memory in SLURM's format, such as "4G", to bytes; a number without unit is in MiB."""
    return int(text) * UNITS["M"] if text.isdigit() else int(text[:-1]) * UNITS[text[-1]]
