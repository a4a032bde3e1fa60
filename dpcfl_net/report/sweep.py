"""Comparison page: accuracy against epsilon by algorithm with bands over seeds, recovery counts, and the table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dpcfl_net.core.run_folder import SweepFolder
from dpcfl_net.report.figures import DASHES, Figure, axis, colour, spec, spread, symbol
from dpcfl_net.report.overlay import by_round, over_time
from dpcfl_net.report.pages import keep, study
from dpcfl_net.report.served import Served
from dpcfl_net.results import compare
from dpcfl_net.results.compare import HIDDEN, SECRETS, Row
from dpcfl_net.results.compare_table import chosen_target
from dpcfl_net.results.comparison import Comparison
from dpcfl_net.results.result import read_document

MEASURES = (
    ("accuracy_mean", "Mean accuracy"),
    ("accuracy_minority", "Accuracy of the minority cluster"),
    ("accuracy_worst", "Accuracy of the worst client"),
)
CENTRAL = ("accuracy_central", "Accuracy on the central test set")  # only of runs with one
RECOVERED = (("clusters_recovered", "Every cluster recovered"), ("minority_recovered", "Minority cluster recovered"))
BAND = "Line: mean over seeds; band: one standard deviation, where there are several seeds; points: single runs."
POINTS = "Bar: mean over seeds; points: single runs."
LINE = 34  # letters in a line of a label
Series = tuple[str, list[Row]]


def write_sweep(folder: Path) -> Path:
    """Write report.html into a sweep folder.

    Returns:
        The page.

    Raises:
        ConfigError: If the folder is not a sweep folder, no run has finished, or the page cannot be written.
        OSError: If the disk is full.
    """
    return keep(SweepFolder(folder).report, sweep_page(folder))


def sweep_page(folder: Path, served: Served | None = None) -> str:
    """Render the comparison page of a sweep; errors as `write_sweep`.

    Args:
        folder: Sweep folder.
        served: Parts for a page that `dpcfl serve` shows; None: a file.
    """
    document, comparison = read_document(folder), Comparison.of([folder], force=True)
    lead = []
    for title, several in (("Swept", True), ("Set in all runs", False)):
        axes = [
            f"{key} {HIDDEN if key in SECRETS else ', '.join(map(str, own))}"
            for key, own in document["axes"].items()
            if (len(own) > 1) == several
        ]
        lead += [f"{title}: {'; '.join(axes)}."] if axes else []
    if len(comparison) < len(document["cells"]):
        lead.append(f"{len(comparison)} of {len(document['cells'])} runs have finished; the others are not on this page.")
    return comparison_page(folder.name, lead, comparison, served)


def comparison_page(title: str, lead: list[str], comparison: Comparison, served: Served | None = None) -> str:
    """Render the page of a comparison; runs that are not comparable are marked.

    Args:
        title: Heading.
        lead: Paragraphs.
        comparison: The comparison.
        served: Parts for a page that `dpcfl serve` shows; None: a file.

    Returns:
        HTML.
    """
    rows = compare.rows(comparison.results)
    promises, alerts = compare.statements(comparison.results)
    alerts += [f"Not comparable: {folder.name}: {text}." for folder, text in comparison.marked.items()]
    return study(
        title=title,
        lead=[*lead, f"Privacy: {'; '.join(promises)}."],
        figures=[
            *figures(rows),
            by_round(rows, _names(rows)),
            over_time(rows, _names(rows), chosen_target(comparison.results, comparison.target)),
            *costs(rows),
        ],
        tables=[each.without_empty_columns() for each in (comparison.table, comparison.leads) if each is not None],
        alerts=alerts,
        served=served,
    )


def figures(rows: Sequence[Row]) -> list[Figure]:
    """Build accuracy and recovery figures: against epsilon if the target differs between rows, else by row."""
    measures = [*MEASURES, *([CENTRAL] if any(row.values(CENTRAL[0]) for row in rows) else [])]
    if len({row.settings["privacy.epsilon"] for row in rows}) > 1:
        series = _series(rows)
        labelled = [(name, own, lambda row: f"epsilon {row.settings['privacy.epsilon']:g}") for name, own in series]
        return [
            *(_against_epsilon(key, title, series) for key, title in measures),
            *(_recovery(key, title, labelled) for key, title in RECOVERED),
        ]
    names = {id(row): name for row, name in zip(rows, _names(rows), strict=True)}
    return [
        *(_by_row(key, title, rows, list(names.values())) for key, title in measures),
        *(_recovery(key, title, [("runs", rows, lambda row: names[id(row)])]) for key, title in RECOVERED),
    ]


def costs(rows: Sequence[Row]) -> list[Figure]:
    """Build figures of the bytes and seconds of each row; none if epsilons differ, since they cost the same."""
    if len({row.settings["privacy.epsilon"] for row in rows}) > 1:
        return []
    names = _names(rows)
    return [
        _cost(key, title, unit, scale, rows, names)
        for key, title, unit, scale in (
            ("bytes", "Bytes of a run", "MB", 1e-6),
            ("seconds", "Seconds of a run", "seconds", 1.0),
        )
    ]


def _cost(key: str, title: str, unit: str, scale: float, rows: Sequence[Row], names: Sequence[str]) -> Figure:
    sides = {"from clients (up)": "bytes_up", "to clients (down)": "bytes_down"} if key == "bytes" else {"whole run": "seconds"}
    if key == "bytes" and not any(cost for row in rows for own in sides.values() for cost in row.costs(own)):
        return Figure(key, title, why="these runs sent no messages: all clients were in one process")
    data: list[dict[str, Any]] = [
        {
            "type": "bar", "orientation": "h", "name": side, "y": [name for name, row in zip(names, rows, strict=True) if row.costs(own)],
            "x": [scale * statistics.fmean(row.costs(own)) for row in rows if row.costs(own)],
            "marker": {"color": "@c1" if own == "bytes_up" else "@c0"}, "hovertemplate": f"%{{y}}, {side}: %{{x:.3g}} {unit}<extra></extra>",
        }
        for side, own in sides.items()
    ]  # fmt: skip
    if not any(trace["y"] for trace in data):
        return Figure(key, title, why="no run.json has it")
    layout = {
        "xaxis": axis(unit, rangemode="tozero"),
        "yaxis": axis("", autorange="reversed", type="category", showgrid=False),
        "barmode": "stack",
        "bargap": 0.4,
    }
    return Figure(key, title, "Mean over seeds.", spec(data, 110 + max(42, _label_height(names)) * len(rows), **layout))


def _series(rows: Sequence[Row]) -> list[Series]:
    """Rows that differ only in the target epsilon, by name."""
    found: dict[str, list[Row]] = {}
    for row, name in zip(rows, _names(rows), strict=True):
        found.setdefault(name, []).append(row)
    return [(name, sorted(own, key=lambda row: float(row.settings["privacy.epsilon"]))) for name, own in found.items()]


def _names(rows: Sequence[Row]) -> list[str]:
    """Label of each row without epsilon; long ones have several lines."""
    keys = compare.telling(rows)
    return [
        _in_lines(
            [
                row.algorithm,
                *(f"{compare.short_key(key)} {compare.word(row.settings[key])}" for key in keys if key in row.settings),
            ]
        )
        for row in rows
    ]


def _unmeasured(key: str) -> str:
    if key == "accuracy_minority":
        return "no run has one: the smallest true clusters are of equal size, or the true clusters are unknown"
    if key == "minority_recovered":
        return "no run has one: the smallest true clusters are of equal size or unknown, or the server does not cluster clients"
    if key.endswith("recovered"):
        return "no run has clusters to compare: the true clusters are unknown, or no algorithm here clusters clients"
    return "no run has measured it"


def _in_lines(words: Sequence[str]) -> str:
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) < LINE:
            lines[-1] += f", {word}"
        else:
            lines[-1] += ","
            lines.append(word)
    return "<br>".join(lines)


def _against_epsilon(key: str, title: str, series: Sequence[Series]) -> Figure:
    data = [trace for index, (name, rows) in enumerate(series) for trace in _line(key, name, rows, index)]
    if not data:
        return Figure(key, title, why=_unmeasured(key))
    layout = {"xaxis": axis("epsilon", type="log", **_ticks(series)), "yaxis": axis("accuracy, %")}
    return Figure(key, title, BAND, spec(data, 380, **layout))


def _line(key: str, name: str, rows: Sequence[Row], index: int) -> list[dict[str, Any]]:
    """Band, single runs and mean; the line of an unprotected run is dotted."""
    points = [(float(row.settings["privacy.epsilon"]), [100 * value for value in row.values(key)], row) for row in rows]
    points = [(x, values, row) for x, values, row in points if values]
    if not points:
        return []
    free = any(math.isinf(row.epsilon) for _, _, row in points)
    shade, at = colour(index), [x for x, _, _ in points]
    means = [statistics.fmean(values) for _, values, _ in points]
    label = f"{name} (unprotected)" if free else name
    common = {"type": "scatter", "legendgroup": name, "hoverinfo": "skip", "showlegend": False}
    dash = "dot" if free else DASHES[index % len(DASHES)]
    return [
        *spread(name, shade, at, [values for _, values, _ in points]),
        {
            **common,
            "mode": "markers",
            "x": [x for x, values, _ in points for _ in values],
            "y": [value for _, values, _ in points for value in values],
            "marker": {"color": shade, "size": 5, "opacity": 0.6, "symbol": symbol(index)},
        },
        {
            "type": "scatter",
            "legendgroup": name,
            "name": label,
            "mode": "lines+markers",
            "x": at,
            "y": means,
            "line": {"color": shade, "width": 2, "dash": dash},
            "marker": {"color": shade, "size": 8, "symbol": symbol(index)},
            "hovertemplate": f"{label}, epsilon %{{x}}: %{{y:.1f}} %<extra></extra>",
        },
    ]  # fmt: skip


def _ticks(series: Sequence[Series]) -> dict[str, Any]:
    targets = sorted({float(row.settings["privacy.epsilon"]) for _, rows in series for row in rows})
    return {"tickvals": targets, "ticktext": [f"{target:g}" for target in targets]}


def _by_row(key: str, title: str, rows: Sequence[Row], names: Sequence[str]) -> Figure:
    """One row of points per table row, with a bar at the mean; names on the left fit narrow windows."""
    data: list[dict[str, Any]] = []
    for index, (name, row) in enumerate(zip(names, rows, strict=True)):
        values = [100 * value for value in row.values(key)]
        if not values:
            continue
        marker = {"color": colour(index), "size": 9, "opacity": 0.65}
        common = {"type": "scatter", "mode": "markers", "name": name, "hovertemplate": f"{name}: %{{x:.1f}} %<extra></extra>"}
        data.append({**common, "x": values, "y": [name] * len(values), "marker": marker})
        mean = {"color": colour(index), "symbol": "line-ns", "size": 24, "line": {"color": colour(index), "width": 3}}
        data.append({**common, "x": [statistics.fmean(values)], "y": [name], "marker": mean})
    if not data:
        return Figure(key, title, why=_unmeasured(key))
    layout = {"xaxis": axis("accuracy, %"), "yaxis": axis("", autorange="reversed", type="category"), "showlegend": False}
    return Figure(key, title, POINTS, spec(data, 110 + max(42, _label_height(names)) * len(rows), **layout))


def _label_height(names: Sequence[str]) -> int:
    """Pixels of the highest label."""
    return 8 + 15 * max(1 + name.count("<br>") for name in names)


def _recovery(key: str, title: str, series: Sequence[tuple[str, Sequence[Row], Callable[[Row], str]]]) -> Figure:
    """Share of runs with recovered clusters, among runs that cluster clients."""
    data = []
    for index, (name, rows, label) in enumerate(series):
        judged = [(label(row), *row.count(key), place) for place, row in enumerate(rows) if row.count(key)[1]]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [where for where, _, _, _ in judged],
                "x": [found / of for _, found, of, _ in judged],
                "text": [f"{found} of {of}" for _, found, of, _ in judged],
                # A bar of length 0 has no room for text.
                "textposition": ["inside" if found else "outside" for _, found, _, _ in judged],
                "insidetextanchor": "start",
                "hovertemplate": f"{name}, %{{y}}: %{{text}}<extra></extra>",
                "marker": {"color": [colour(index if len(series) > 1 else place) for *_, place in judged]},
            }
        )
    data = [trace for trace in data if trace["y"]]
    if not data:
        return Figure(key, title, why=_unmeasured(key))
    bars = sum(len(trace["y"]) for trace in data)
    room = max(30, _label_height([str(where) for trace in data for where in trace["y"]]))
    layout = {
        "xaxis": axis("share of runs", range=[0, 1.02], tickvals=[0, 0.5, 1], tickformat=".0%"),
        "yaxis": axis("", autorange="reversed", type="category", showgrid=False),
        "showlegend": len(series) > 1,
        "barmode": "group",
        "bargap": 0.35,
    }
    return Figure(
        key, title, "After the last round; runs that differ only in their seed.", spec(data, 120 + room * bars, **layout)
    )
