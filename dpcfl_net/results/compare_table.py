"""Comparison of rows as a table, and of runs as CSV."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TextIO

from dpcfl_net.core.csv_text import csv_text
from dpcfl_net.results.compare import TERMS, Row, differing, dotted, rows, short_key, word
from dpcfl_net.results.number_format import at_most
from dpcfl_net.results.result import Result
from dpcfl_net.results.round_times import TARGET_SHARE, first_reached, usual_target
from dpcfl_net.results.tables import Table

PRIVACY = (*TERMS, "epsilon_spent", "epsilon_replace_one")
# Columns of a table: key in `final`, title, and for FAIRNESS scale and digits.
SHARES = (
    ("accuracy_mean", "mean %"),
    ("accuracy_minority", "minority %"),
    ("accuracy_worst", "worst %"),
    ("accuracy_p10", "p10 %"),
)
CENTRAL = ("accuracy_central", "central %")  # only of runs with a central test set
COUNTS = (("clusters_recovered", "clusters found"), ("minority_recovered", "minority found"))
TIMES = ("target_accuracy", "rounds_to_target", "seconds_to_target")
COSTS = (("bytes_up", "MB up", 1e-6), ("bytes_down", "MB down", 1e-6), ("seconds", "seconds", 1.0))  # of the whole run
ROUNDS_TO = "rounds to "  # title of a column, before the accuracy
SMALL = 1e5  # bytes below which a column is in kB: a decimal of a MB would show nothing
FAIRNESS = (("f_acc", "F_acc %", 100, 1), ("f_loss", "F_loss", 1, 3))


def table(shown: Sequence[Row], marked: Collection[Path] = (), target: float | None = None) -> Table:
    """Build the comparison table: settings that differ, then figures as mean +- standard deviation.

    Args:
        shown: Rows of the table.
        marked: Folders of runs that are not comparable (see `unequal`); their rows are marked in an extra column.
        target: Mean accuracy for rounds and time until it was reached; None: one that all runs reached.
    """
    columns = identity(shown)
    keys = len(columns)
    columns += [("runs", [str(len(row.results)) for row in shown])]
    central = [CENTRAL] if any(row.values(CENTRAL[0]) for row in shown) else []
    columns += [(title, [_spread(row.values(key), row, 100, 1) for row in shown]) for key, title in (*SHARES, *central)]
    columns += [(title, [_count(*row.count(key)) for row in shown]) for key, title in COUNTS]
    for key, title, scale, digits in FAIRNESS:
        if any(row.values(key) for row in shown):
            columns += [(title, [_spread(row.values(key), row, scale, digits) for row in shown])]
    for key, title, unit in COSTS:
        if found := [cost for row in shown for cost in row.costs(key)]:
            if "MB" in title and max(found) < SMALL:
                title, unit = title.replace("MB", "kB"), 1e-3
            columns += [(title, [_spread(row.costs(key), row, unit, 1) for row in shown])]
    columns += _time_to_accuracy(shown, target)
    partly = any("(" in cell for _, words in columns[keys:] for cell in words)
    if marked:
        odd = [any(result.folder in marked for result in row.results) for row in shown]
        columns += [("", ["NOT COMPARABLE" if one else "" for one in odd])]
    caption = "mean +- standard deviation over the runs of a row, which differ in their seed only"
    if any(row.values("accuracy_p10") for row in shown):
        caption += "; p10: 10th percentile of the clients"
    if target is None and (goal := next((title for title, _ in columns if title.startswith(ROUNDS_TO)), "")):
        share = f"{100 * TARGET_SHARE:.0f} %"
        caption += f"; {goal.removeprefix(ROUNDS_TO)}: {share} of the worst run's best mean accuracy, rounded down"
    counted = [title for key, title in COUNTS if any(row.count(key)[1] for row in shown)]
    if counted:
        caption += f"; {', '.join(counted)}: in how many of the runs"
    if partly:
        caption += "; (k/n): only k of the n runs have the figure, or reached the accuracy"
    if any(row.values(key) for row in shown for key, *_ in FAIRNESS):
        caption += "; F_acc and F_loss are against models trained without privacy: no epsilon covers them"
    lines = [list(row) for row in zip(*(words for _, words in columns), strict=True)]
    return Table("Comparison", [title for title, _ in columns], lines, caption, keys)


def identity(shown: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Return the columns that tell rows apart, each with its title and cells: algorithm, epsilon, and settings that differ."""
    keys = differing(shown)
    columns = [("algorithm", [row.algorithm for row in shown]), ("epsilon", [_epsilon(row) for row in shown])]
    return columns + [(_title(key, keys), [word(row.settings.get(key)) for row in shown]) for key in keys]


def chosen_target(results: Sequence[Result], target: float | None = None) -> float | None:
    """Return the given target, or a mean accuracy that all runs reached; None if no run has times and accuracies."""
    usual = usual_target([result.curve for result in results])
    return None if usual is None else target if target is not None else usual


def _time_to_accuracy(shown: Sequence[Row], target: float | None) -> list[tuple[str, list[str]]]:
    """Columns of the rounds and the seconds until the mean accuracy was first at least the target."""
    target = chosen_target([result for row in shown for result in row.results], target)
    if target is None:
        return []
    reached = [[first_reached(result.curve, target) for result in row.results] for row in shown]
    points = [(row, [point for point in own if point is not None]) for row, own in zip(shown, reached, strict=True)]
    goal = f"{100 * target:g} %"
    return [
        # The round of a single run is a whole number, the mean of several is not.
        (f"{ROUNDS_TO}{goal}", [_reached([one.round for one in own], row, int(len(own) > 1)) for row, own in points]),
        (f"seconds to {goal}", [_reached([one.seconds for one in own], row, 1) for row, own in points]),
    ]


def _reached(values: Sequence[float], row: Row, digits: int) -> str:
    """Mean +- deviation over the runs that reached the target."""
    return _spread(values, row, 1, digits) if values else "never"


def write_csv(file: TextIO, results: Sequence[Result], target: float | None = None) -> None:
    """Write one line per run: folder, settings that differ, privacy, and scalar final figures unrounded.

    Args:
        file: The file.
        results: The runs.
        target: As for `table`; the last columns are the target, and rounds and seconds until it was reached.
    """
    target = chosen_target(results, target)
    keys = differing(rows(results))
    figures = list(
        dict.fromkeys(key for result in results for key, value in result.final.items() if not isinstance(value, list))
    )
    columns = ["folder", "name", "algorithm", "seed", *keys, "epsilon", *PRIVACY, *figures]
    columns += [*(key for key, _, _ in COSTS), *TIMES]
    lines = []
    for result in results:
        own = dotted(result.settings)
        lines.append(
            [result.folder, result.name, result.algorithm, result.seed, *(_cell(own.get(key)) for key in keys), result.epsilon]
            + [_cell(result.privacy.get(key)) for key in PRIVACY]
            + [_cell(result.final.get(key)) for key in figures]
            + [_cell(result.cost.get(key)) for key, _, _ in COSTS]
            + _times(result, target)
        )
    file.write(csv_text(columns, lines))


def _times(result: Result, target: float | None) -> list[Any]:
    point = first_reached(result.curve, target) if target is not None else None
    return [_cell(target), *(("", "") if point is None else (point.round, point.seconds))]


def _title(key: str, keys: Sequence[str]) -> str:
    """Last word of a dotted key if it is unique."""
    last = short_key(key)
    return last if [short_key(other) for other in keys].count(last) == 1 else key


def _cell(value: Any) -> Any:
    return "" if value is None else value if isinstance(value, (str, float, int)) else json.dumps(value)


def _epsilon(row: Row) -> str:
    return "inf" if math.isinf(row.epsilon) else at_most(row.epsilon)


def _spread(values: Sequence[float], row: Row, scale: float, digits: int) -> str:
    """Mean +- standard deviation, and of how many runs of the row if not of all."""
    if not values:
        return "–"
    said = f"{scale * statistics.fmean(values):.{digits}f}"
    if len(values) > 1:
        said += f" +- {scale * statistics.stdev(values):.{digits}f}"
    return said if len(values) == len(row.results) else f"{said} ({len(values)}/{len(row.results)})"


def _count(found: int, judged: int) -> str:
    return f"{found}/{judged}" if judged else "–"
