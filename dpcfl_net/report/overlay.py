"""Figures of compared runs: accuracy by round over seeds, and what runs cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from dpcfl_net.report.figures import COLOURS, DASHES, Figure, axis, colour, spec
from dpcfl_net.results.compare import Row

POINTS = 200  # of a line, at most


def by_round(rows: Sequence[Row], names: Sequence[str]) -> Figure:
    """Mean accuracy by round: a line per row, the mean over its seeds, with a band of one standard deviation.

    Args:
        rows: Rows of a comparison.
        names: Name of each row.
    """
    title = "Mean accuracy by round"
    several = len({row.epsilon for row in rows}) > 1
    data: list[dict[str, Any]] = []
    for index, (row, name) in enumerate(zip(rows, names, strict=True)):
        curves = [{point.round: 100 * point.accuracy for point in result.curve} for result in row.results]
        shared = sorted(set.intersection(*map(set, curves)))
        shared = shared[:: max(1, len(shared) // POINTS)]
        if len(shared) > 1:
            data += _band(f"{name}, epsilon {row.epsilon:g}" if several else name, index, shared, curves)
    if not data:
        return Figure("accuracy-round", title, why="no run has the times of two evaluated rounds")
    layout = {"xaxis": axis("round"), "yaxis": axis("accuracy, %")}
    return Figure("accuracy-round", title, "Line: mean over seeds; band: one standard deviation.", spec(data, 380, **layout))


def _band(name: str, index: int, rounds: Sequence[int], curves: Sequence[dict[int, float]]) -> list[dict[str, Any]]:
    values = [[curve[at] for curve in curves] for at in rounds]
    means = [statistics.fmean(own) for own in values]
    spreads = [statistics.stdev(own) if len(own) > 1 else 0.0 for own in values]
    shade, found = colour(index), []
    if any(spreads):
        high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
        found.append({
            "type": "scatter", "mode": "lines", "legendgroup": name, "showlegend": False, "hoverinfo": "skip",
            "x": [*rounds, *rounds[::-1]], "y": [*high, *low[::-1]], "fill": "toself", "fillcolor": shade, "opacity": 0.18,
            "line": {"width": 0},
        })  # fmt: skip
    found.append({
        "type": "scatter", "mode": "lines", "name": name, "legendgroup": name, "x": list(rounds), "y": means,
        "line": {"color": shade, "width": 2, "dash": DASHES[index // COLOURS % len(DASHES)]},
        "hovertemplate": f"{name}, round %{{x}}: %{{y:.1f}} %<extra></extra>",
    })  # fmt: skip
    return found
