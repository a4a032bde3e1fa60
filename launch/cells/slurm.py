"""Cells of a sweep as tasks of SLURM job arrays, which run `task` on the nodes."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import ConfigError, DpcflError, RunFailed
from dpcfl_net.core.files import write_text
from dpcfl_net.core.number_spans import spans
from dpcfl_net.core.process_log import log_if_chosen
from dpcfl_net.core.run_folder import RunFolder, SweepFolder
from dpcfl_net.launch.cells.outcome import FAILED, IN_USE, INTERRUPTED, CellOutcome, one_line
from dpcfl_net.launch.cells.run_cell import run_cell
from dpcfl_net.launch.placement import slurm_batch
from dpcfl_net.launch.placement.base import RUN_MODULE
from dpcfl_net.launch.placement.slurm_batch import Resources
from dpcfl_net.launch.sweep_grid import cell_folder
from dpcfl_net.launch.sweeps import Sweep, outcome_text, read_cell
from dpcfl_net.runtime.checkpoint import rounds_in

PART = 1000  # cells of one array: SLURM's default MaxArraySize is 1001


def scripts(plan: Sweep, left: Sequence[int], resources: Resources, at_once: int | None) -> dict[Path, str]:
    """Return the batch scripts of the cells that are to run, one per array.

    Args:
        plan: The sweep.
        left: Numbers of the cells, from 0, ascending.
        resources: What each cell requests.
        at_once: Most tasks of an array that run at once; None: no limit.

    Returns:
        Content by path.

    Raises:
        ConfigError: If a path cannot be written into a script.
    """
    folder = plan.folder.resolve()
    files, parts = SweepFolder(folder), sorted({index // PART for index in left})
    found = {}
    for part in parts:
        tasks = [index - part * PART for index in left if index // PART == part]
        command = shlex.join([sys.executable, *RUN_MODULE, "dpcfl_net.launch.cells.slurm", str(folder)])
        first = f"$(({part * PART} + SLURM_ARRAY_TASK_ID))"
        array = ",".join(spans(tasks)) + (f"%{at_once}" if at_once is not None else "")
        output = str(files.log(f"array_{part}_%a"))
        if re.search(r"[%\\]", str(folder)):
            raise ConfigError(f"--out: {folder} holds '%' or a backslash, which SLURM replaces in the names of logs")
        found[files.array(part)] = slurm_batch.script(
            f'{command} "{first}"', plan.folder.name, resources, array=array, output=output, chdir=os.getcwd()
        )
    return found


def submit(plan: Sweep, contents: dict[Path, str]) -> list[str]:
    """Write the scripts and submit them.

    Args:
        plan: The sweep, with sweep.json written.
        contents: Scripts by path.

    Returns:
        Ids of the arrays.

    Raises:
        ConfigError: If sbatch is missing or refuses the first script.
        RunFailed: If sbatch does not answer, or refuses a later script: the message has the ids of the arrays before it.
    """
    files = SweepFolder(plan.folder)
    for folder in (files.logs, files.slurm, files.outcomes):
        folder.mkdir(exist_ok=True)
    for index in range(len(plan.cells)):
        files.outcome(index).unlink(missing_ok=True)
    for path, text in contents.items():
        write_text(path, text)
    ids: list[str] = []
    for path in contents:
        try:
            ids.append(slurm_batch.submit(path))
        except DpcflError as error:
            if not ids:
                raise
            raise RunFailed(f"{error}; submitted before it: array jobs {', '.join(ids)}") from None
    return ids


def task(folder: Path, index: int) -> int:
    """Run one cell in a task of a job array; requeue the task if the run was interrupted.

    Args:
        folder: Folder of the sweep.
        index: Number of the cell, from 0.

    Returns:
        The exit code.
    """
    from dpcfl_net.launch.cli.screen import PlainLines

    log_if_chosen()
    limit, job = slurm_batch.TimeLimit(), slurm_batch.job_id()
    record = SweepFolder(folder).outcome(index)
    try:
        cell, store = read_cell(folder, index)
        if restarts := slurm_batch.restarts():
            print(f"SLURM started this task again ({restarts})", flush=True)
        run = cell_folder(cell.config, store)
        checkpoints = RunFolder(run).checkpoints
        before = rounds_in(checkpoints)
        outcome = run_cell(cell.config, store, PlainLines(), _cpus())
        print(f"cell {index}: {cell.label}  {outcome_text(outcome)}", flush=True)
        if outcome.state == INTERRUPTED:
            slurm_batch.requeue(job, limit, progress=rounds_in(checkpoints)[-1:] > before[-1:])
            return 130
    except DpcflError as error:
        outcome = CellOutcome(folder, FAILED, error=one_line(error))
        print(f"error: {error}", file=sys.stderr, flush=True)
    if outcome.state == FAILED:
        record.parent.mkdir(exist_ok=True)
        write_atomically(record, outcome.to_json() + "\n")
        return 4
    if outcome.state != IN_USE:
        record.unlink(missing_ok=True)
    return 0


def _cpus() -> int | None:
    """Return the CPUs that SLURM gave to this task."""
    text = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return int(text) if re.fullmatch(r"[1-9]\d{0,5}", text) else None


if __name__ == "__main__":
    sys.exit(task(Path(sys.argv[1]), int(sys.argv[2])))
