"""Runs of a figure, planned one by one; lines of an earlier data.csv stand for the runs that they name."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from dpcfl_net.core import yaml_file
from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.csv_text import unquoted
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import shown
from dpcfl_net.reproduce.base import (
    CLAIMS,
    ROWS,
    UNCOUNTED_LOOK,
    Context,
    Earlier,
    Grid,
    OutOfTime,
    Reproduction,
    ReproductionResult,
    Row,
)
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
        notes: Sentences on the earlier result.
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
        ConfigError: If an earlier line is of other settings than the run that it names, occurs twice, or names a run that this
            figure does not have, as with a misspelt system.
        OutOfTime: If the figure needs all runs and some are missing.
    """
    earlier = context.earlier
    known = _by_run(figure, earlier.rows)
    plans = [plan(cell) for cell in cells]
    _check_names(figure, known, [values for values, _ in plans])
    grids = {tuple(values[:-1]): grid for values, grid in plans}  # the last column is the seed, which settings leave out
    for run, lines in known.items():  # also of seeds that are not planned, whose lines count, too
        if (grid := grids.get(run[:-1])) is not None:
            _check(figure, run, grid, lines)
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
    notes = [*_notes(known), *([UNCOUNTED_LOOK] if earlier.uncounted_look else [])]
    return Measured(rows, len(known) + runs, len(known) + len(missing), looks, notes, earlier.decided)


def settings_of(grid: Grid) -> str:
    """Return 12 hexadecimal digits of the sha256 of a configuration file's settings and the axes, without the seed."""
    config, axes = grid
    chosen = {key: list(values) for key, values in axes.items() if key != "seed"}
    return hashlib.sha256(canonical_json([_settings_in(config), chosen])).hexdigest()[:12]


@cache
def _settings_in(config: Path) -> Any:
    return yaml_file.load(config)


def read_earlier(folder: Path, figure: type[Reproduction] | None = None) -> Earlier:
    """Read the earlier result of a figure.

    Args:
        folder: Folder of the figure, with data.csv and claims.json.
        figure: The figure, whose columns every line of a run must have; None: not checked.

    Raises:
        ConfigError: If it has none, or data.csv is damaged or not this figure's.
    """
    if not (folder / ROWS).is_file() or not (folder / CLAIMS).is_file():
        raise ConfigError(f"--earlier: {folder} has no result, which are the files {ROWS} and {CLAIMS}")
    document = read_claims(folder / CLAIMS)
    _check_claims(document.get("claims"), folder / CLAIMS)
    judged = any(claim.get("p_value") is not None for claim in document["claims"])
    looks = document.get("looks", 1) if judged else 0
    decided = [claim for claim in document["claims"] if claim.get("p_holm") is not None and claim["verdict"] in (HOLDS, FAILS)]
    rows = read_rows(folder / ROWS)
    if figure is not None:
        _check_columns(figure, rows, folder / ROWS)
    uncounted = UNCOUNTED_LOOK in document.get("notes", [])
    return Earlier(rows, looks, {claim["text"]: _decision(claim, looks) for claim in decided}, uncounted)


def _check_claims(claims: Any, path: Path) -> None:
    keys = {"text", "verdict", "p_value", "p_holm", "comparisons"}
    if not isinstance(claims, list) or not all(isinstance(claim, dict) and keys <= claim.keys() for claim in claims):
        raise ConfigError(
            f"--earlier: claims of {path}: must be a list of objects with {', '.join(sorted(keys))}; compute the figure again"
        )


def _decision(claim: Mapping[str, Any], looks: int) -> Decision:
    """Return the decision in a claim's JSON object; it is of the last look unless the object names another."""
    return Decision(claim.get("earlier_look", looks), claim["verdict"], claim["p_holm"], claim["comparisons"])


def read_rows(path: Path) -> list[Row]:
    """Read the lines of a data.csv, with numbers, True and False as values, and nothing as None.

    Raises:
        ConfigError: If it is not UTF-8, or a line has more or fewer cells than the first one.
    """
    rows: list[Row] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte order mark
            reader = csv.reader(file, strict=True)
            columns = next(reader, [])
            for cells in filter(None, reader):
                if len(cells) != len(columns):
                    raise ConfigError(
                        f"{path}: line {reader.line_num} has {len(cells)} cells: must have {len(columns)}, as the first line"
                    )
                rows.append({key: _cell(key, text) for key, text in zip(columns, cells, strict=True)})
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is no CSV file in UTF-8: {error}") from error
    return rows


def _cell(column: str, text: str) -> Any:
    if column == SETTINGS:
        return text or None
    value = _value(text)
    # Other programs write the seeds of a column with empty cells as 0.0, 1.0, ...
    return int(value) if column == "seed" and isinstance(value, float) and value.is_integer() else value


def _check_columns(figure: type[Reproduction], rows: Sequence[Row], path: Path) -> None:
    """Refuse lines that name no run, or whose values are not those of a run."""
    needed = [*figure.run_columns, *figure.value_columns]
    lacking = [column for column in needed if not rows or column not in rows[0]]
    if lacking:
        raise ConfigError(
            f"--earlier: {path} has no {'lines' if not rows else f'column {lacking[0]!r}'}: must have a line for each run, with the columns "
            f"{', '.join(needed)}, separated by commas"
        )
    for number, row in enumerate(rows, 1):
        if row["seed"] is None:
            continue  # values without a run
        wrong = [column for column in figure.value_columns if not _is_number(row[column])]
        if type(row["seed"]) is not int:
            wrong.insert(0, "seed")
        if wrong:
            value, must = row[wrong[0]], "a whole number" if wrong[0] == "seed" else "a finite number"
            raise ConfigError(
                f"--earlier: {path}: {wrong[0]} of record {number} is {'empty' if value is None else shown(value)}: must be {must}"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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


def _check_names(
    figure: Reproduction, known: Mapping[tuple[Any, ...], Sequence[Row]], planned: Sequence[Sequence[Any]]
) -> None:
    """Refuse lines that occur twice, and values of a run that no planned run has; more seeds are allowed."""
    allowed = {column: {values[place] for values in planned} for place, column in enumerate(figure.run_columns) if planned}
    for values, lines in known.items():
        named = dict(zip(figure.run_columns, values, strict=True))
        if any(line in lines[:place] for place, line in enumerate(lines)):
            raise ConfigError(f"--earlier: {_of_run(named)} has the same line twice: remove one")
        for column, names in allowed.items():
            if column != "seed" and named[column] not in names:
                raise ConfigError(
                    f"--earlier: no run of this figure has the line of {_of_run(named)}: {column} must be one of "
                    f"{', '.join(sorted(map(str, names)))}"
                )


def _of_run(named: Mapping[str, Any]) -> str:
    return ", ".join(f"{column} {value}" for column, value in named.items())


def _check(figure: Reproduction, values: Sequence[Any], grid: Grid, lines: Sequence[Mapping[str, Any]]) -> None:
    other = {row[SETTINGS] for row in lines if row.get(SETTINGS) not in (None, settings_of(grid))}
    if other:
        named = dict(zip(figure.run_columns, values, strict=True))
        raise ConfigError(
            f"--earlier: the line of {_of_run(named)} has the settings {other.pop()}, and this version plans {settings_of(grid)}: "
            "remove such lines, or compute the figure without --earlier"
        )


def _notes(known: Mapping[tuple[Any, ...], Sequence[Row]]) -> list[str]:
    if not known:
        return []
    unnamed = sum(any(row.get(SETTINGS) is None for row in lines) for lines in known.values())
    note = f"{len(known)} {'run comes' if len(known) == 1 else 'runs come'} from an earlier data.csv"
    return [f"{note}; it does not say with which settings {unnamed} of them ran." if unnamed else f"{note}."]
