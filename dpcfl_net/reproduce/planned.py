"""Runs of a figure, planned one by one; lines of an earlier data.csv stand for the runs that they name."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from dpcfl_net.core import yaml_file
from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.csv_text import unquoted
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.reproduce.base import CLAIMS, ROWS, Context, Earlier, Grid, OutOfTime, Reproduction, ReproductionResult, Row
from dpcfl_net.reproduce.claims import FAILS, HOLDS, Decision
from dpcfl_net.reproduce.matrix import read_claims
from dpcfl_net.results.result import Result

SETTINGS = "settings"  # column of data.csv with the settings of the line's run
T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """Lines of all runs that there are.

    Attributes:
        rows: Lines of data.csv.
        runs: Number of runs behind them.
        planned: Number of these runs and of those that are missing.
        looks: How often the claims were judged, this time included.
        notes: Sentences on the lines of the earlier data.csv.
        decided: Text of a claim to the look that decided it.
    """

    rows: list[Row]
    runs: int
    planned: int
    looks: int = 1
    notes: list[str] = field(default_factory=list)
    decided: Mapping[str, Decision] = field(default_factory=dict)

    def count(self, outcome: ReproductionResult) -> ReproductionResult:
        """Enter runs, looks with their decisions, and notes into the figure's result, and return it."""
        outcome.runs, outcome.planned_runs, outcome.looks, outcome.decided = self.runs, self.planned, self.looks, self.decided
        outcome.notes += self.notes
        return outcome


def measure(
    figure: Reproduction,
    context: Context,
    cells: Sequence[T],
    plan: Callable[[T], tuple[Sequence[Any], Grid]],
    rows_of: Callable[[T, Result], Sequence[Row]],
    *,
    whole: bool = False,
) -> Measured:
    """Run the cells of a figure that no earlier line names.

    Args:
        figure: Its `run_columns` name a run.
        context: Access to complete runs and to the earlier result.
        cells: Planned runs, in the order in which they run.
        plan: Cell to the values of `run_columns` and the configuration with the axes of this one run.
        rows_of: Cell and finished run to lines of data.csv.
        whole: True if the figure's claims need all runs.

    Returns:
        Their lines in the order of the cells, then earlier lines of other runs.

    Raises:
        ConfigError: If an earlier line is of other settings than the run that it names.
        OutOfTime: If the figure needs all runs and some are missing.
    """
    earlier = context.earlier()
    known = _by_run(figure, earlier.rows)
    plans = [plan(cell) for cell in cells]
    for values, grid in plans:
        _check(figure, values, grid, known.get(tuple(values), ()))
    missing = [(cell, *planned) for cell, planned in zip(cells, plans, strict=True) if tuple(planned[0]) not in known]
    finished = context.finished([grid for *_, grid in missing])
    runs = sum(map(len, finished))
    if whole and runs < len(missing):
        raise OutOfTime
    new = {
        tuple(values): [{**row, SETTINGS: settings_of(grid)} for result in results for row in rows_of(cell, result)]
        for (cell, values, grid), results in zip(missing, finished, strict=True)
    }
    order = dict.fromkeys([*(tuple(values) for values, _ in plans), *known])
    rows = [dict(row) for run in order for row in (known | new).get(run, ())]
    looks = max(1, earlier.looks + (runs > 0))
    return Measured(rows, len(known) + runs, len(known) + len(missing), looks, _notes(known), earlier.decided)


def settings_of(grid: Grid) -> str:
    """Return 12 hexadecimal digits of the sha256 of a configuration file's settings and the axes, without the seed."""
    config, axes = grid
    chosen = {key: list(values) for key, values in axes.items() if key != "seed"}
    return hashlib.sha256(canonical_json([_settings_in(config), chosen])).hexdigest()[:12]


@cache
def _settings_in(config: Path) -> Any:
    return yaml_file.load(config)


def read_earlier(folder: Path) -> Earlier:
    """Read the earlier result of a figure.

    Args:
        folder: Folder of the figure, with data.csv and claims.json.

    Raises:
        ConfigError: If it has none.
    """
    if not (folder / ROWS).is_file() or not (folder / CLAIMS).is_file():
        raise ConfigError(f"--earlier: {folder} has no result, which are the files {ROWS} and {CLAIMS}")
    document = read_claims(folder / CLAIMS)
    judged = any(claim.get("p_value") is not None for claim in document["claims"])
    looks = document.get("looks", 1) if judged else 0
    decided = [claim for claim in document["claims"] if claim.get("p_holm") is not None and claim["verdict"] in (HOLDS, FAILS)]
    return Earlier(read_rows(folder / ROWS), looks, {claim["text"]: _decision(claim, looks) for claim in decided})


def _decision(claim: Mapping[str, Any], looks: int) -> Decision:
    """Return the decision in a claim's JSON object; it is of the last look unless the object names another."""
    return Decision(claim.get("earlier_look", looks), claim["verdict"], claim["p_holm"], claim["comparisons"])


def read_rows(path: Path) -> list[Row]:
    """Read the lines of a data.csv, with numbers, True and False as values, and nothing as None."""
    with path.open(newline="") as file:
        return [
            {key: text or None if key == SETTINGS else _value(text) for key, text in row.items()}
            for row in csv.DictReader(file)
        ]


def _value(text: str) -> Any:
    named = {"": None, "True": True, "False": False}
    if text in named:
        return named[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return unquoted(text)


def _by_run(figure: Reproduction, rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Group the lines of runs; lines without a run, such as exact values, have no seed."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.get("seed") is not None:
            found.setdefault(tuple(row.get(column) for column in figure.run_columns), []).append(row)
    return found


def _check(figure: Reproduction, values: Sequence[Any], grid: Grid, lines: Sequence[Mapping[str, Any]]) -> None:
    other = {row[SETTINGS] for row in lines if row.get(SETTINGS) not in (None, settings_of(grid))}
    if other:
        named = ", ".join(f"{column} {value}" for column, value in zip(figure.run_columns, values, strict=True))
        raise ConfigError(
            f"--earlier: the line of {named} has the settings {other.pop()}, and this version plans {settings_of(grid)}: "
            "remove such lines, or compute the figure without --earlier"
        )


def _notes(known: Mapping[tuple[Any, ...], Sequence[Row]]) -> list[str]:
    if not known:
        return []
    unnamed = sum(any(row.get(SETTINGS) is None for row in lines) for lines in known.values())
    note = f"{len(known)} {'run comes' if len(known) == 1 else 'runs come'} from an earlier data.csv"
    return [f"{note}; it does not say with which settings {unnamed} of them ran." if unnamed else f"{note}."]
