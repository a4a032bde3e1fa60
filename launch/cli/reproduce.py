"""Computes figures of the papers, with complete runs where a figure needs them."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpcfl_net.core.errors import ConfigError, RunFailed
from dpcfl_net.core.files import shown
from dpcfl_net.reproduce.base import (
    CLAIMS,
    FINISHED,
    SCALES,
    UNCOUNTED_LOOK,
    Earlier,
    Grid,
    OutOfTime,
    Reproduction,
    ReproductionResult,
    Scale,
    find,
    folder_name,
    registry,
    write,
)
from dpcfl_net.reproduce.matrix import read_claims
from dpcfl_net.reproduce.planned import read_earlier

if TYPE_CHECKING:
    from dpcfl_net.experiment.config_schema import Config
    from dpcfl_net.results.result import Result

STORE = "store"
UNITS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class RunContext:
    """Context of a reproduction on this machine (see `reproduce.base.Context`).

    Attributes:
        scale: "laptop" or "paper".
        folder: Output folder of the figure.
        store: Folder of the runs, shared by all figures.
        asked_seeds: Seeds per figure; None: the usual ones.
        until: Monotonic time after which no run starts; None: no limit.
        jobs: Runs at once.
        earlier: Earlier result of the figure.
    """

    scale: Scale
    folder: Path
    store: Path
    asked_seeds: int | None = None
    until: float | None = None
    jobs: int = 1
    earlier: Earlier = field(default_factory=Earlier)

    def seeds(self, usual: Sequence[int], /) -> Sequence[int]:
        return usual if self.asked_seeds is None else range(self.asked_seeds)

    def say(self, line: str, /) -> None:
        print(line, flush=True)

    def finished(self, grids: Sequence[Grid]) -> list[list[Result]]:
        from dpcfl_net.launch import sweeps
        from dpcfl_net.launch.cells.outcome import FAILED
        from dpcfl_net.results.result import read_result

        cells = [cells_of(*grid) for grid in grids]
        flat = [cell for part in cells for cell in part]
        self._note(flat)
        outcomes = iter(sweeps.run_cells(flat, self.store, self.say, jobs=self.jobs, logs=self.folder, until=self.until))
        parts = [list(itertools.islice(outcomes, len(part))) for part in cells]
        failed = [f"{one.folder}: {one.error}" for part in parts for one in part if one.state == FAILED]
        if failed:
            raise RunFailed("the figure needs runs that failed: " + "; ".join(failed))
        return [[read_result(one.folder) for one in part if one.state == FINISHED] for part in parts]

    def _note(self, cells: Sequence[Config]) -> None:
        """Print the memory of runs that run at once."""
        if self.jobs == 1:
            return
        from dpcfl_net.launch.cells import memory
        from dpcfl_net.launch.sweep_grid import cell_folder
        from dpcfl_net.results.summary import read_document

        left = [cell for cell in cells if read_document(cell_folder(cell, self.store)).get("state") != FINISHED]
        if min(len(left), self.jobs) > 1:
            self.say(memory.note(left, self.jobs))


def cells_of(config: Path, axes: Mapping[str, Sequence[Any]]) -> list[Config]:
    """Return the configuration of every combination of the axes, the last one fastest."""
    from dpcfl_net.core import yaml_file
    from dpcfl_net.experiment.config import load

    return [
        load(config, [f"{key}={yaml_file.dump(value, flow=True).strip()}" for key, value in zip(axes, values, strict=True)])
        for values in itertools.product(*axes.values())
    ]


def reproduce(
    names: Sequence[str],
    scale: str,
    out: Path,
    budget: str | None = None,
    seeds: int | None = None,
    jobs: int = 1,
    earlier: Path | None = None,
) -> list[dict[str, Any]]:
    """Compute figures and print the path of each report and a line per claim.

    Args:
        names: Names of figures.
        scale: "laptop" or "paper".
        out: Parent of the output folders.
        budget: Time after which no run starts, for example 2h; None: no limit.
        seeds: Seeds per figure; None: the usual ones.
        jobs: Runs at once.
        earlier: Parent of folders with earlier results, whose runs are not run again; None: all runs are run.

    Returns:
        name, title, report and claims (as in claims.json) of each figure that could be computed in time.

    Raises:
        ConfigError: If an argument is wrong.
        RunFailed: If a run that a figure needs failed.
    """
    size, until, computed = scale_of(scale), deadline(budget), []
    figures = [find(name) for name in names]
    known = [_earlier(figure, size, earlier) for figure in figures]
    for chosen, own in zip(figures, known, strict=True):
        context = RunContext(size, out / folder_name(chosen, size), out / STORE, seeds, until, jobs, own)
        try:
            computed.append(compute(chosen, context))
        except OutOfTime:
            print(out_of_time(chosen))
    return computed


def _earlier(chosen: type[Reproduction], scale: Scale, parent: Path | None) -> Earlier:
    if parent is None:
        return Earlier()
    if not chosen.run_columns:
        able = ", ".join(name for name, figure in registry().items() if figure.run_columns)
        raise ConfigError(f"--earlier: {chosen.name} cannot take runs from an earlier data.csv; these figures can: {able}")
    return read_earlier(parent / folder_name(chosen, scale), chosen)


def out_of_time(chosen: type[Reproduction]) -> str:
    """Return what to print if the time budget is spent in a figure that needs all its runs."""
    return f"time budget spent in {chosen.name}: its finished runs are kept; repeat the command to continue"


def compute(chosen: type[Reproduction], context: RunContext) -> dict[str, Any]:
    """Compute one figure, write its folder, and print the path of its report and a line per claim.

    Returns:
        name, title, report and claims (as in claims.json).

    Raises:
        ConfigError: If the folder has a result of more runs than there are now.
    """
    context.folder.mkdir(parents=True, exist_ok=True)
    outcome = chosen().compute(context)
    if outcome.partial and (known := _known_runs(context)) > outcome.runs:
        raise ConfigError(
            f"{context.folder} has a result of {'all' if known == math.inf else known} runs, and {context.store} has {outcome.runs} of "
            f"{outcome.planned_runs}: give another --out, or remove the folder"
        )
    if UNCOUNTED_LOOK not in outcome.notes and _has_uncounted_look(context, outcome):
        outcome.notes.append(UNCOUNTED_LOOK)
    page = write(chosen, outcome, context)
    print(f"\n{chosen.name}: {chosen.title}\nReport: {page}\n")
    if UNCOUNTED_LOOK in outcome.notes:
        print(UNCOUNTED_LOOK)
    claims = outcome.judged()
    for judged in claims:
        print(judged.line())
    if outcome.partial:
        print(f"partial: {outcome.runs} of {outcome.planned_runs} runs; repeat the command to continue")
    return {"name": chosen.name, "title": chosen.title, "report": str(page), "claims": [one.document() for one in claims]}


def _has_uncounted_look(context: RunContext, outcome: ReproductionResult) -> bool:
    """True if the folder's result tested a claim on other evidence, in a look that the outcome does not count."""
    file = context.folder / CLAIMS
    if not file.exists():
        return False
    document, now = read_claims(file), {claim.text: claim for claim in outcome.claims}
    if document.get("looks", 1) < outcome.looks:
        return False
    tested = [claim for claim in document.get("claims", []) if claim.get("p_value") is not None and claim["text"] in now]
    changed = any(claim["comparisons"] != [one.document() for one in now[claim["text"]].comparisons] for claim in tested)
    return changed or UNCOUNTED_LOOK in document.get("notes", [])


def _known_runs(context: RunContext) -> float:
    """Number of runs behind the folder's result; inf: all, 0: none."""
    file = context.folder / CLAIMS
    if not file.exists():
        return 0
    document = read_claims(file)
    return math.inf if document["state"] == FINISHED else document.get("runs", [0])[0]


def scale_of(text: str) -> Scale:
    """Return the scale of that name.

    Raises:
        ConfigError: If it is unknown.
    """
    for scale in SCALES:
        if scale == text:
            return scale
    raise ConfigError(f"--scale is {text!r}: must be {' or '.join(SCALES)}")


def list_document() -> list[dict[str, str]]:
    """Return name, title and paper of all figures."""
    return [{"name": figure.name, "title": figure.title, "paper": figure.paper} for figure in registry().values()]


def list_all() -> None:
    """Print all figures, grouped by paper."""
    width = max(map(len, registry()))
    for _, group in itertools.groupby(registry().values(), lambda figure: figure.name.partition("/")[0]):
        figures = list(group)
        print(_citation([figure.paper for figure in figures]))
        for figure in figures:
            print(f"  {figure.name:{width}}  {figure.title}")
        print()
    print(
        "b1, b>1: batch sizes of the first and of later rounds; M: number of clusters; MSS: minimum separation score of clusters"
    )
    print("Compute one: dpcfl reproduce NAME. With the paper's settings: dpcfl reproduce NAME --scale paper")


def _citation(papers: Sequence[str]) -> str:
    """The part of citations of one paper before the number of the figure."""
    columns = zip(*(paper.split(", ") for paper in papers), strict=False)
    return ", ".join(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def deadline(budget: str | None) -> float | None:
    """Return the monotonic time at which a budget such as 90s, 30m, 2h or 1.5h ends; None for no budget.

    Raises:
        ConfigError: If it is not a duration.
    """
    if budget is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", budget.strip())
    if not found:
        raise ConfigError(f"--time-budget is {shown(budget)}: must be a number with s, m or h, for example 2h")
    return time.monotonic() + float(found[1]) * UNITS[found[2]]
