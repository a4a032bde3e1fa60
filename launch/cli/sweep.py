"""Implements `dpcfl sweep`: prints a line per cell, the table, and the path of the report; tells the JSON document of `--json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.run_folder import SweepFolder
from dpcfl_net.launch.cells import memory
from dpcfl_net.launch.cells.local import LocalCells
from dpcfl_net.launch.cells.outcome import FINISHED, WAITING, CellOutcome
from dpcfl_net.launch.cells.queue import CellPlace
from dpcfl_net.launch.cli import compare as comparison
from dpcfl_net.launch.cli import sweep_json
from dpcfl_net.launch.cli.cell_screen import CellLines, ShownCells, open_cell_screen
from dpcfl_net.launch.placement.slurm_batch import Resources
from dpcfl_net.launch.sweep_grid import Source
from dpcfl_net.launch.sweeps import Sweep, failed_cells, outcome_line, recorded_outcomes, stopped
from dpcfl_net.results.number_format import counted

PLACES = ("local", "slurm", "ray")
Document = Callable[[], dict[str, Any]]  # makes the JSON document of a sweep
Tell = Callable[[Document], None]  # called once, before RunFailed is raised for cells that failed


def sweep(plan: Sweep, jobs: int, tell: Tell) -> int:
    """Run a sweep on this machine.

    Args:
        plan: The sweep.
        jobs: Cells at once.
        tell: Called with a function that makes the JSON document.

    Returns:
        The exit code.

    Raises:
        RunFailed: If cells failed.
    """
    if jobs == 1:
        total = len(plan.cells)
        outcomes = plan.run(lambda number, cell, outcome: print(outcome_line(number, total, cell.label, outcome), flush=True))
        return _conclude(plan, outcomes, tell)
    left = [cell.config for cell, done in zip(plan.cells, plan.done(), strict=True) if not done]
    screen = open_cell_screen(ShownCells.of(plan))
    if min(len(left), jobs) > 1:
        screen.say(memory.note(left, jobs))
    return run_at(plan, LocalCells(plan.folder, [cell.config for cell in plan.cells], plan.store, jobs), screen, tell)


def run_at(plan: Sweep, place: CellPlace, screen: CellLines, tell: Tell) -> int:
    """Run the unfinished cells of a sweep at a place and print its result.

    Args:
        plan: The sweep.
        place: Where cells run.
        screen: Shows the cells.
        tell: As in `sweep`.

    Returns:
        The exit code.

    Raises:
        RunFailed: If cells failed.
    """
    outcomes = plan.run(lambda number, cell, outcome: screen.ended(number, outcome), place=place, watcher=screen)
    return _conclude(plan, outcomes, tell)


def _conclude(plan: Sweep, outcomes: list[CellOutcome], tell: Tell) -> int:
    """Print the table and the report; RunFailed lists the cells that failed."""
    tell(partial(sweep_json.ended, plan, outcomes))
    if stopped(outcomes):
        print("stopped; run the same command to resume")
        return 130
    failures = plan.failures(outcomes)
    if len(failures) < len(outcomes):
        comparison.show(plan.folder)
    if failures:
        raise failed_cells(failures, len(outcomes))
    return 0


def check_options(on: str, resources: Resources, *, collect: bool, dry_run: bool) -> None:
    """Check that the options of `dpcfl sweep` fit each other.

    Raises:
        ConfigError: With every option that does not fit.
    """
    problems = []
    if on not in PLACES:
        problems.append(f"--on is {on!r}: must be {', '.join(PLACES[:-1])} or {PLACES[-1]}")
    plain = Resources()
    given = {"--time": resources.time != plain.time, "--partition": resources.partition, "--account": resources.account}
    given["--slurm"] = bool(resources.more)
    if wrong := [name for name, value in given.items() if value and on != "slurm"]:
        problems.append(f"{', '.join(wrong)}: only with --on slurm; --on is {on!r}")
    if resources.memory is not None and on == "local":
        problems.append("--memory: only with --on slurm or ray; a process on this machine takes what it needs")
    if resources.cpus != 1 and on == "local":
        problems.append("--cpus: only with --on slurm or ray; cells on this machine share its cores equally")
    if resources.gpus and on == "local" and not collect:
        problems.append("--gpus: only with --on slurm or ray; on this machine runtime.device chooses")
    if dry_run and (collect or on == "ray"):
        problems.append(
            "--dry-run: not with --collect or --on ray; --on local lists the runs, --on slurm prints the batch script"
        )
    if problems:
        raise ConfigError(problems)


def plan(source: Source, items: Iterable[str], out: Path, on: str, gpus: int) -> Sweep:
    """Build the sweep whose cells other hosts run; with `gpus` on GPUs, else on CPUs. Further arguments as in `Sweep.of`."""
    return Sweep.of(source, items, out, None if on == "local" and not gpus else "cuda" if gpus else "cpu")


def run_on_ray(plan: Sweep, resources: Resources, jobs: int | None, tell: Tell) -> int:
    """Run a sweep as Ray tasks; arguments as in `submit`, errors and exit code as in `run_at`."""
    from dpcfl_net.launch.cells.ray import RayCells

    plan.write([FINISHED if finished else WAITING for finished in plan.done()])
    screen, place = open_cell_screen(ShownCells.of(plan)), RayCells(plan.folder, plan.folders(), resources, jobs)
    if note := place.note():
        screen.say(note)
    return run_at(plan, place, screen, tell)


def submit(plan: Sweep, resources: Resources, jobs: int | None, tell: Tell, *, dry_run: bool) -> int:
    """Submit the unfinished cells of a sweep as SLURM job arrays.

    Args:
        plan: The sweep.
        resources: What each cell requests.
        jobs: Most cells of an array that run at once; None: no limit.
        tell: As in `sweep`.
        dry_run: Print the scripts; write and submit nothing.

    Returns:
        The exit code.
    """
    from dpcfl_net.launch.cells import slurm

    done = plan.done()
    left = [index for index, finished in enumerate(done) if not finished]
    scripts = slurm.scripts(plan, left, resources, jobs)
    if dry_run:
        for path, text in scripts.items():
            print(f"# {path}\n{text}")
        tell(partial(sweep_json.submitted, plan, done, scripts, []))
        print(f"{counted(len(done), 'cell')}, {sum(done)} cached, {len(left)} to submit; nothing was submitted")
        return 0
    if not left:
        print(f"all {len(done)} cells have finished")
        return collect(plan, tell)
    plan.write([FINISHED if finished else WAITING for finished in done])
    ids = slurm.submit(plan, scripts)
    tell(partial(sweep_json.submitted, plan, done, scripts, ids))
    for path, job in zip(scripts, ids, strict=True):
        print(f"submitted array job {job}: {path}")
    print(f"{len(left)} of {len(done)} cells will run; logs are in {SweepFolder(plan.folder).logs}")
    print("see the state of all cells and write the report with the same command and --collect in place of --on slurm")
    return 0


def collect(plan: Sweep, tell: Tell) -> int:
    """Print the state of each cell, the table of the finished ones, and write the report; start nothing.

    Args:
        plan: The sweep.
        tell: As in `sweep`.

    Returns:
        The exit code: 130 while cells are unfinished.

    Raises:
        ConfigError: If the sweep was never started.
        RunFailed: If cells failed.
    """
    if not SweepFolder(plan.folder).sweep.exists():
        raise ConfigError(f"no sweep with these settings in {plan.folder.parent}; run it without --collect")
    outcomes = recorded_outcomes(plan.folder)
    screen = CellLines(ShownCells.of(plan))
    for number, outcome in enumerate(outcomes, 1):
        screen.ended(number, outcome)
    tell(partial(sweep_json.ended, plan, outcomes))
    counts = Counter(outcome.state for outcome in outcomes)
    print(", ".join(f"{count} {state}" for state, count in counts.items()))
    if counts[FINISHED]:
        comparison.show(plan.folder)
    if failures := plan.failures(outcomes):
        raise failed_cells(failures, len(outcomes))
    return 0 if counts[FINISHED] == len(outcomes) else 130


def dry_run(plan: Sweep, tell: Tell) -> int:
    """Print the cells of a sweep and which of them are finished; start nothing. Arguments and exit code as in `sweep`."""
    done = plan.done()
    tell(partial(sweep_json.planned, plan, done))
    for cell, cached in zip(plan.cells, done, strict=True):
        print(cell.label + ("  cached" if cached else ""))
    print(f"{counted(len(done), 'cell')}, {sum(done)} cached, {len(done) - sum(done)} to run")
    return 0
