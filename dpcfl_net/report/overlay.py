"""Figures of compared runs: accuracy by round and over time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpcfl_net.report.figures import DASHES, Figure, axis, colour, spec, spread
from dpcfl_net.report.time_section import time_unit
from dpcfl_net.results.compare import Row

POINTS = 200  # of a line, at most


@dataclass(frozen=True)
class Style:
    """Name, colour and dash of a row's line."""

    name: str
    colour: str
    dash: str


def by_round(rows: Sequence[Row], names: Sequence[str]) -> Figure:
    """Mean accuracy by round: a line per row, the mean over its seeds, with a band of one standard deviation.

    The caption names rows without a line.

    Args:
        rows: Rows of a comparison.
        names: Name of each row.
    """
    title = "Mean accuracy by round"
    data: list[dict[str, Any]] = []
    left_out: list[str] = []
    for row, style in zip(rows, styles(rows, names), strict=True):
        curves = [{point.round: 100 * point.accuracy for point in result.curve} for result in row.results]
        shared = sorted(set.intersection(*map(set, curves)))
        shared = shared[::-1][:: max(1, -(-len(shared) // POINTS))][::-1]  # with the last round
        if len(shared) > 1:
            data += _band(style, shared, curves)
        else:
            left_out.append(style.name)
    if not data:
        return Figure("accuracy-round", title, why="no row has two evaluated and timed rounds that all its seeds share")
    layout = {"xaxis": axis("round"), "yaxis": axis("accuracy, %")}
    caption = "Line: mean over seeds; band: one standard deviation."
    if left_out:
        caption += f" Without a line, since their seeds share fewer than two evaluated and timed rounds: {'; '.join(left_out)}."
    return Figure("accuracy-round", title, caption, spec(data, 380, **layout))


def over_time(rows: Sequence[Row], names: Sequence[str], target: float | None) -> Figure:
    """Mean accuracy of several runs against their seconds.

    Args:
        rows: Rows of a comparison; each has a colour, and each of its runs a line.
        names: Name of each row.
        target: Accuracy to mark; None: none.
    """
    title = "Mean accuracy over time"
    curves = [(index, result.curve) for index, row in enumerate(rows) for result in row.results if len(result.curve) > 1]
    if not curves:
        return Figure("accuracy-time", title, why="no run has the times of two evaluated rounds")
    longest = max(curve[-1].seconds for _, curve in curves)
    unit, scale = time_unit(longest)
    looks = styles(rows, names)
    data: list[dict[str, Any]] = []
    for index, curve in curves:
        name = looks[index].name
        data.append({
            "type": "scatter", "mode": "lines", "name": name, "legendgroup": f"{index}",
            "showlegend": all(trace["legendgroup"] != f"{index}" for trace in data),
            "x": [point.seconds / scale for point in curve], "y": [100 * point.accuracy for point in curve],
            "text": [point.round for point in curve],
            "line": {"color": looks[index].colour, "width": 2, "dash": looks[index].dash},
            "hovertemplate": f"{name}, round %{{text}}, %{{x:.3g}} {unit}: %{{y:.1f}} %<extra></extra>",
        })  # fmt: skip
    if target is not None:
        data.append({
            "type": "scatter", "mode": "lines", "name": f"target {100 * target:g} %", "legendgroup": "target",
            "x": [0, longest / scale], "y": [100 * target] * 2, "hoverinfo": "skip",
            "line": {"color": "@ink", "width": 1.5, "dash": "dot"},
        })  # fmt: skip
    layout = {"xaxis": axis(unit, rangemode="tozero"), "yaxis": axis("accuracy, %")}
    caption = "One line per run, from the start of round 1; virtual seconds for runs in virtual time."
    return Figure("accuracy-time", title, caption, spec(data, 380, **layout))


def styles(rows: Sequence[Row], names: Sequence[str]) -> list[Style]:
    """Name and look of each row's line: a colour for each name, and a dash for each epsilon of it.

    Args:
        rows: Rows of a comparison.
        names: Name of each row without epsilon.
    """
    several = len({row.epsilon for row in rows}) > 1
    order = list(dict.fromkeys(names))
    found: list[Style] = []
    for row, name in zip(rows, names, strict=True):
        before = sum(other.colour == colour(order.index(name)) for other in found)
        label = f"{name}, epsilon {row.epsilon:g}" if several else name
        found.append(Style(label, colour(order.index(name)), DASHES[before % len(DASHES)]))
    return found


def _band(style: Style, rounds: Sequence[int], curves: Sequence[dict[int, float]]) -> list[dict[str, Any]]:
    values = [[curve[at] for curve in curves] for at in rounds]
    means = [statistics.fmean(own) for own in values]
    name, shade = style.name, style.colour
    found = spread(name, shade, rounds, values)
    found.append({
        "type": "scatter", "mode": "lines", "name": name, "legendgroup": name, "x": list(rounds), "y": means,
        "line": {"color": shade, "width": 2, "dash": style.dash},
        "hovertemplate": f"{name}, round %{{x}}: %{{y:.1f}} %<extra></extra>",
    })  # fmt: skip
    return found
