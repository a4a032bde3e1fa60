"""Figures of an algorithm's diagnostics, under any name: numbers as lines over rounds, lists as heat maps."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dpcfl_net.report.figures import MANY, Figure, axis, quantile_lines, spec
from dpcfl_net.results.number_format import number, plain
from dpcfl_net.results.run_files import JsonLine, item, listed, mapping, numbers, whole
from dpcfl_net.results.run_view import RunView

GAP = 0.08  # between two panels, as a fraction of the height
MOST_TICKS = 40


def diagnostics(view: RunView) -> list[Figure]:
    """Draw what an algorithm reports about itself.

    A value that stays the same over all rounds is left out: the summary at the top of the page has it.

    Args:
        view: The run.

    Returns:
        A figure of all numbers, then a figure for each list with a number per cluster or per client.
    """
    lines = {at: mapping(line, "diagnostics") for at, line in sorted(view.grouping.items())}
    names = list(dict.fromkeys(name for line in lines.values() for name in line))
    if all(_counts_clients(line) for line in view.grouping.values()):
        names = [name for name in names if name != "sizes"]  # the figure of clients by cluster has them
    curves = {name: {at: number(line.get(name)) for at, line in lines.items()} for name in names}
    curves = {name: curve for name, curve in curves.items() if _changes(curve)}
    tables = {name: {at: numbers(line, name) for at, line in lines.items() if listed(line, name)} for name in names}
    shown = {name: table for name, table in tables.items() if _changes(table) and max(map(len, table.values())) > 1}
    return [_curves(curves), *(_heat_map(name, table, view.clients) for name, table in shown.items())]


def _counts_clients(line: JsonLine) -> bool:
    """True if the sizes of a round are those of its assignment, and not, say, sums with noise."""
    counts = Counter(map(whole, listed(line, "assignment")))
    return all(size == counts[cluster] for cluster, size in enumerate(listed(mapping(line, "diagnostics"), "sizes")))


def _changes(values: dict[int, Any]) -> bool:
    """True if the values that were measured are not all equal."""
    measured = [value for value in values.values() if value is not None]
    return any(value != measured[0] for value in measured[1:])


def _curves(curves: dict[str, dict[int, float | None]]) -> Figure:
    """One panel above the other, since the numbers have different units."""
    title = "Diagnostics of the algorithm"
    if not curves:
        return Figure("diagnostics", title, why="the algorithm reports no number that changes from round to round")
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"showlegend": False}
    share = (1 - GAP * (len(curves) - 1)) / len(curves)
    for index, (name, curve) in enumerate(curves.items()):
        side, top = "" if index == 0 else str(index + 1), 1 - index * (share + GAP)
        data.append({
            "type": "scatter", "mode": "lines+markers", "name": name, "x": list(curve), "y": list(curve.values()),
            "yaxis": f"y{side}", "line": {"color": "@c0", "width": 2}, "marker": {"size": 5},
            "hovertemplate": f"{name}, round %{{x}}: %{{y:.4g}}<extra></extra>",
        })  # fmt: skip
        layout[f"yaxis{side}"] = axis(name, domain=[max(0.0, top - share), top], nticks=4)
    last = "" if len(curves) == 1 else str(len(curves))
    layout["xaxis"] = axis("round", anchor=f"y{last}")
    return Figure(
        "diagnostics", title, "Computed by the server from what it sees.", spec(data, 90 + 110 * len(curves), **layout)
    )


def _heat_map(name: str, table: dict[int, list[float | None]], clients: int) -> Figure:
    count = max(map(len, table.values()))
    if count > MANY:
        caption = f"Quantiles of {count:,} values, as the server computed them."
        lines = quantile_lines(table, "{:.4g}")
        return Figure(_key(name), f"Diagnostics: {name}", caption, spec(lines, 320, xaxis=axis("round"), yaxis=axis(name)))
    row = "client" if all(len(values) == clients for values in table.values()) else "cluster"
    cells = [[item(values, k) for values in table.values()] for k in range(count)]
    words = [
        [
            f"{row} {k}, round {at}: {'none' if cell is None else plain(cell, 4)}"
            for at, cell in zip(table, cells[k], strict=True)
        ]
        for k in range(count)
    ]
    data: list[dict[str, Any]] = [{
        "type": "heatmap", "x": list(table), "z": cells, "text": words, "hoverinfo": "text",
        "colorscale": [[0, "@surface"], [1, "@c0"]], "colorbar": {"thickness": 12, "outlinewidth": 0},
        "ygap": 1, "xgap": 0 if len(table) > 60 else 1,
    }]  # fmt: skip
    ticks = list(range(0, count, max(1, count // MOST_TICKS)))
    layout = {"xaxis": axis("round", showgrid=False), "yaxis": axis(row, autorange="reversed", showgrid=False, tickvals=ticks)}
    measured = [value for values in table.values() for value in values if value is not None]
    shades = f"From {plain(min(measured))} (faint) to {plain(max(measured))} (strong)."
    caption = f"One row per {row}, as the server computed it. {shades}"
    return Figure(_key(name), f"Diagnostics: {name}", caption, spec(data, min(620, 120 + 18 * count), **layout))


def _key(name: str) -> str:
    return "diagnostics-" + "".join(letter if letter.isalnum() else "-" for letter in name.lower())
