"""Plots of intervals: mean and 95 % interval of every comparison of a figure, with its margin."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.report.figures import Figure, axis, colour, spec
from dpcfl_net.reproduce.claims import Claim, Comparison
from dpcfl_net.results.statistics import interval

WIDTH = 760  # of an SVG file in pixels
CAPTION = "Dot: mean over paired seeds; line: 95 % interval, before Holm's correction; diamond: margin of the claim."
Named = Sequence[tuple[str, Comparison]]


def intervals(key: str, title: str, compared: Named, unit: str) -> Figure:
    """Plot one horizontal interval per comparison.

    Args:
        key: Identifier of the figure.
        title: Title of the figure.
        compared: Label and comparison, from the top down; those without an interval are left out.
        unit: Label of the x axis.

    Returns:
        The figure; without a plot if no comparison has an interval.
    """
    shown = [(label, one, ends) for label, one in compared if (ends := interval(list(one.values.values()), one.test))]
    if not shown:
        return Figure(key, title, why="no comparison has more than one seed")
    data: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines", "name": "95 % interval", "legendgroup": "interval", "showlegend": number == 0,
            "x": list(ends), "y": [label, label], "line": {"color": colour(0), "width": 2},
        }
        for number, (label, _, ends) in enumerate(shown)
    ]  # fmt: skip
    labels = [label for label, _, _ in shown]
    for name, x, symbol, shade in (
        ("mean", [statistics.fmean(one.values.values()) for _, one, _ in shown], "circle", colour(0)),
        ("margin", [one.margin for _, one, _ in shown], "diamond", colour(1)),
    ):
        data.append({
            "type": "scatter", "mode": "markers", "name": name, "x": x, "y": labels, "marker": {"color": shade, "symbol": symbol, "size": 8},
            "hovertemplate": f"%{{y}}: {name} %{{x:.3g}}<extra></extra>",
        })  # fmt: skip
    y = axis("comparison", type="category", categoryarray=labels, autorange="reversed")
    return Figure(key, title, CAPTION, spec(data, 90 + 26 * len(shown), xaxis=axis(unit), yaxis=y))


def of_claims(claims: Sequence[Claim]) -> list[Figure]:
    """Plot the comparisons of a figure's claims, one plot per unit; claims without intervals have none."""
    by_unit: dict[str, list[tuple[str, Comparison]]] = {}
    for number, claim in enumerate(claims, 1):
        for one in claim.comparisons:
            if interval(list(one.values.values()), one.test):
                label = f"claim {number}: {one.name}" if one.name else f"claim {number}"
                by_unit.setdefault(one.unit, []).append((label, one))
    return [
        intervals(f"intervals-{k}", f"Intervals of the claims{f', {unit}' if unit else ''}", named, unit or "value")
        for k, (unit, named) in enumerate(by_unit.items())
    ]


def write_svg(path: Path, figure: Figure) -> None:
    """Write a figure in the light theme as an SVG file.

    Args:
        path: The file; its folder must exist.
        figure: A figure with a plot.

    Raises:
        ValueError: If the figure has no plot.
    """
    from dpcfl_net.report.svg.draw import draw
    from dpcfl_net.report.theme import in_light

    if figure.spec is None:
        raise ValueError(f"{figure.key}: has no plot: {figure.why}")
    write_atomically(path, draw(figure.spec, WIDTH, in_light, title=figure.title, background="@surface") + "\n")
