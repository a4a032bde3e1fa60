"""Figures of the report as plotly dictionaries; colours are names such as `@c0`, which the page replaces by theme."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpcfl_net.clustering.metrics import minority
from dpcfl_net.results.number_format import number, plain, tiny
from dpcfl_net.results.run_files import JsonLine, listed, mapping, numbers, whole
from dpcfl_net.results.run_view import FirstRound, RunView, letter, sizes

COLOURS = 8
BARS = 150  # of one trace over rounds; more rounds are a line
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "star", "triangle-down", "hexagon")
DASHES = ("solid", "dash", "dashdot", "longdash")
LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"}


@dataclass(frozen=True)
class Figure:
    """Figure of a page.

    Attributes:
        key: Id, unique on a page.
        title: Heading.
        caption: Caption; may be empty.
        spec: {data, layout, height}; None if the figure was left out.
        why: Reason if it was left out.
    """

    key: str
    title: str
    caption: str = ""
    spec: dict[str, Any] | None = None
    why: str = ""


def colour(index: int) -> str:
    """Return the colour name of a cluster."""
    return f"@c{index % COLOURS}"


def colour_indices(view: RunView) -> dict[int, int]:
    """Return the colour index of each true cluster."""
    return {cluster: index for index, cluster in enumerate(sizes(view.true_clusters))}


def group_colours(view: RunView) -> dict[int, int]:
    """Match each of the server's clusters to the colour of the true cluster with most common clients; each is used once."""
    true, taken = view.true_clusters, colour_indices(view)
    shared: Counter[tuple[int, int]] = Counter()
    groups: set[int] = set()
    seen = [listed(line, "assignment") for line in view.grouping.values()]
    for assignment in [*seen, view.first_round.labels] if view.first_round else seen:
        for client, group in enumerate(assignment):
            if (found := whole(group)) is not None:
                groups.add(found)
                if client < len(true):
                    shared[found, true[client]] += 1
    colours: dict[int, int] = {}
    for (group, cluster), _ in shared.most_common():
        if group not in colours and taken[cluster] not in colours.values():
            colours[group] = taken[cluster]
    spare = iter(index for index in range(len(taken) + len(groups)) if index not in colours.values())
    return {group: colours[group] if group in colours else next(spare) for group in sorted(groups)}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Build an axis in the page's style."""
    return {
        "title": {"text": title},
        "gridcolor": "@grid",
        "linecolor": "@grid",
        "zeroline": False,
        "automargin": True,
        "fixedrange": True,
        **more,
    }


# Not plotly.express: it makes figures of lists only with pandas, which is not a dependency.
def spec(data: list[dict[str, Any]], height: int = 340, **layout: Any) -> dict[str, Any]:
    """Build a figure in the page's style.

    Args:
        data: Plotly traces.
        height: Pixels; the width follows the window.
        layout: Further plotly layout.
    """
    common = {
        "font": {"color": "@ink", "size": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "hovermode": "closest",
        "dragmode": False,
        "hoverlabel": {"bgcolor": "@surface", "bordercolor": "@grid", "font": {"color": "@ink"}},
        "legend": LEGEND,
    }
    return {"data": data, "layout": {**common, **layout, "autosize": True}, "height": height}


def true_name(view: RunView, cluster: int) -> str:
    """Label a true cluster by letter and number of clients; the minority is marked."""
    clients = sizes(view.true_clusters).get(cluster, 0)
    mark = ", minority" if minority(view.true_clusters) == cluster else ""
    return f"{letter(cluster)} ({clients} client{'' if clients == 1 else 's'}{mark})"


def accuracy(view: RunView) -> Figure:
    """Test accuracy of each true cluster, the mean and the worst client, by round."""
    title, rounds = "Accuracy by round", sorted(view.observed)
    if not rounds:
        return Figure("accuracy", title, why="the observer has written no accuracy yet")
    lines = [view.observed[at] for at in rounds]
    by_cluster = [numbers(line, "accuracy_by_cluster") for line in lines]
    data = []
    for index in range(max(map(len, by_cluster))):
        values = [_percent(row[index]) if index < len(row) else None for row in by_cluster]
        style = {"color": colour(index), "width": 2, "dash": DASHES[index // COLOURS % len(DASHES)]}
        data.append(_line(true_name(view, index), rounds, values, style, SYMBOLS[index % len(SYMBOLS)]))
    for name, key, dash in (("mean", "accuracy_mean", "solid"), ("worst client", "accuracy_worst", "dot")):
        values = [_percent(number(line.get(key))) for line in lines]
        data.append(_line(name, rounds, values, {"color": "@ink", "width": 2.5, "dash": dash}))
    shown = [value for trace in data for value in trace["y"] if value is not None]
    if not shown:
        return Figure("accuracy", title, why="no line of the observer holds an accuracy")
    low, high = max(0, min(shown) - 4), min(100, max(shown) + 4)
    caption = "On each client's own test data, measured by the observer. The server never sees this."
    layout = {"xaxis": axis("round"), "yaxis": axis("accuracy, %", range=[low, high])}
    return Figure("accuracy", title, caption, spec(data, 380, **layout))


def epsilon_spent(view: RunView) -> Figure:
    """Epsilon spent by each client by round; clients with equal curves share a line."""
    title, rounds = "Epsilon spent by client", sorted(view.spent)
    if not rounds:
        return Figure("epsilon", title, why="epsilon by round is written at the end of a run; this run has none")
    curves: defaultdict[tuple[float | None, ...], list[int]] = defaultdict(list)
    for client in range(max(len(view.spent[at]) for at in rounds)):
        row = [view.spent[at][client] if client < len(view.spent[at]) else None for at in rounds]
        curves[tuple(None if value is None else float(f"{value:.5g}") for value in row)].append(client)
    curves = defaultdict(list, {curve: who for curve, who in curves.items() if any(value is not None for value in curve)})
    if not curves:
        return Figure("epsilon", title, why="no client's epsilon is finite: the run is unprotected")
    single = len(curves) == 1
    data = [
        _line(_who(who, single), rounds, list(curve), {"color": colour(index), "width": 2})
        for index, (curve, who) in enumerate(curves.items())
    ]
    privacy = view.run.get("privacy")
    promised = number(privacy.get("epsilon")) if isinstance(privacy, dict) else None
    if promised is not None:
        ends = [rounds[0], max(rounds[-1], view.rounds or 0)]
        style = {"color": "@ink", "width": 1.5, "dash": "dash"}
        data.append({**_line("promised", ends, [promised, promised], style), "mode": "lines"})
    layout = {"xaxis": axis("round"), "yaxis": axis("epsilon", rangemode="tozero"), "showlegend": len(data) <= 10}
    caption = "All charges of each client up to that round, composed."
    return Figure("epsilon", title, caption, spec(data, 300, **layout))


def first_round(view: RunView) -> Figure:
    """First-round updates in two principal components, with the fitted mixture."""
    title, first = "First-round updates and the mixture", view.first_round
    if first is None:
        return Figure("first-round", title, why="this run clusters no first-round updates, or they were not kept")
    groups, true = group_colours(view), view.true_clusters
    known = len(true) == len(first.labels)
    shades = colour_indices(view) if known else groups
    kinds = true if known else first.labels
    data = []
    for kind in sorted(set(kinds)):
        members = [client for client, other in enumerate(kinds) if other == kind]
        points = [first.coordinates[client] for client in members]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"true {true_name(view, kind)}" if known else f"cluster {kind}",
                "x": [point[0] for point in points],
                "y": [point[1] for point in points],
                "text": [_point(first, client) for client in members],
                "hoverinfo": "text",
                "marker": {
                    "size": 10,
                    "color": colour(shades[kind]),
                    "symbol": SYMBOLS[shades[kind] % len(SYMBOLS)],
                    "line": {"color": "@surface", "width": 1},
                },
            }
        )
    circles = [
        (centre, deviation, colour(groups.get(group, group)))
        for group, (centre, deviation) in enumerate(zip(first.centres, first.deviations, strict=False))
    ]
    x_range, y_range = _ranges(first, circles)
    layout = {
        "xaxis": axis("first component", range=x_range, tickformat=".3~g", nticks=6),
        "shapes": _circles(circles),
        "yaxis": axis("second component", range=y_range, scaleanchor="x", tickformat=".3~g"),
    }
    coloured = ", coloured by true cluster" if known else ""
    caption = (
        f"One point per client{coloured}; circles: the server's {first.clusters} components at one and two standard "
        f"deviations. MSS {plain(first.mss, 3)} (uncorrected {plain(first.mss_plain, 3)}), "
        f"MPO {tiny(first.mpo, 2)}."
    )
    return Figure("first-round", title, caption, {**spec(data, 440, **layout), "aspect": 0.95})


def candidates(view: RunView) -> Figure:
    """Effective MSS of each number of clusters that was tried."""
    title, first = "Number of clusters", view.first_round
    if first is None or len(first.scores) < 2 or not any(math.isfinite(score) for score in first.scores):
        why = "the number of clusters was given, not chosen" if first else "no mixture was fitted"
        return Figure("candidates", title, why=why)
    tried = [(count, number(score)) for count, score in zip(first.candidates, first.scores, strict=False)]
    chosen = ["@c0" if count == first.clusters else "@muted" for count, _ in tried]
    data = [
        {
            "type": "bar",
            "x": [count for count, _ in tried],
            "y": [score or 0 for _, score in tried],
            "text": ["no fit" if score is None else plain(score, 3) for _, score in tried],
            "textposition": "outside",
            "cliponaxis": False,
            "hoverinfo": "x+y",
            "marker": {"color": chosen},
            "width": 0.6,
        }
    ]
    layout = {
        "xaxis": axis("clusters M", dtick=1),
        "yaxis": axis("effective MSS", rangemode="tozero"),
        "showlegend": False,
        "margin": {"l": 8, "r": 12, "t": 28, "b": 8},
    }
    caption = f"Separation of the mixture for each M that was tried; M = {first.clusters} was used (blue)."
    return Figure("candidates", title, caption, spec(data, 280, **layout))


def assignments(view: RunView) -> Figure:
    """The server's cluster of each client by round, sorted by true cluster."""
    title = "Cluster assignments"
    rounds = [at for at in sorted(view.grouping) if any(item is not None for item in listed(view.grouping[at], "assignment"))]
    if not rounds:
        return Figure("assignments", title, why="the server of this algorithm does not cluster clients")
    found = {item for at in rounds for item in listed(view.grouping[at], "assignment")}
    if len(found - {None}) == 1:
        return Figure("assignments", title, why="all clients share one cluster")
    true, groups, truth = view.true_clusters, group_colours(view), colour_indices(view)
    order = sorted(range(view.clients), key=lambda client: (true[client] if client < len(true) else 0, client))
    cells = [[_at(listed(view.grouping[at], "assignment"), client) for at in rounds] for client in order]
    names = [f"{client} {letter(true[client])}" if client < len(true) else str(client) for client in order]
    words = [
        [
            f"client {client}, round {at}: {'none yet' if cell is None else f'cluster {cell}'}"
            for at, cell in zip(rounds, row, strict=True)
        ]
        for client, row in zip(order, cells, strict=True)
    ]
    data = [heat(rounds, [[None if cell is None else groups[cell] % COLOURS for cell in row] for row in cells], words)]
    layout: dict[str, Any] = {"xaxis": axis("round", showgrid=False)}
    if true:
        kinds = [truth[true[client]] % COLOURS if client < len(true) else None for client in order]
        said = [[f"client {name}: true cluster"] for name in names]
        data.append({**heat([0], [[kind] for kind in kinds], said), "xaxis": "x2"})
        layout = {
            "xaxis": axis("round", showgrid=False, domain=[0.07, 1]),
            "xaxis2": axis("", domain=[0, 0.05], tickvals=[0], ticktext=["true"], showgrid=False, anchor="y"),
        }
    every = max(1, len(order) // 40)
    layout["yaxis"] = axis(
        "client",
        autorange="reversed",
        anchor="x2" if true else "x",
        showgrid=False,
        tickvals=list(range(0, len(order), every)),
        ticktext=names[::every],
    )
    blank = " Blank: the client has not joined yet, so it has none." if None in found else ""
    caption = f"{_phases(view, rounds)}A cluster has the colour of the true cluster with which it shares most clients.{blank}"
    return Figure("assignments", title, caption, spec(data, min(620, 120 + 18 * len(order)), **layout))


def labels(view: RunView) -> Figure:
    """Share of correct cluster labels by round and kind: as clients sent them, and as a trusted server released them."""
    title = "Correct cluster labels"
    rounds = [at for at in sorted(view.agreement) if mapping(view.agreement[at], "label_accuracy")]
    if not rounds:
        return Figure("labels", title, why="the clients of this algorithm send no cluster labels")
    data = []
    for index, name in enumerate(
        dict.fromkeys(name for at in rounds for name in mapping(view.agreement[at], "label_accuracy"))
    ):
        values = [_percent(number(mapping(view.agreement[at], "label_accuracy").get(name))) for at in rounds]
        if any(value is not None for value in values):
            data.append(
                _line(
                    name,
                    rounds,
                    values,
                    {"color": colour(index), "width": 2, "dash": DASHES[index % len(DASHES)]},
                    SYMBOLS[index % len(SYMBOLS)],
                )
            )
    caption = (
        "Clients of the round, against true clusters under the one-to-one naming that fits the sent labels best. Only the "
        "trusted server knows the sent labels; released labels contain noise."
    )
    return Figure("labels", title, caption, spec(data, 320, xaxis=axis("round"), yaxis=axis("correct, %", range=[0, 100])))


def traffic(view: RunView) -> Figure:
    """Bytes to and from the clients by round."""
    title = "Bytes by round"
    rows = {at: (number(line.get("bytes_up")), number(line.get("bytes_down"))) for at, line in sorted(view.served.items())}
    most = max((value or 0 for row in rows.values() for value in row), default=0)
    if not most:
        return Figure("bytes", title, why="the server has counted no bytes yet")
    unit, scale = next((unit, scale) for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1)) if most >= scale)
    data = [
        (_bars if len(rows) <= BARS else _curve)(
            name, list(rows), [_share(row[side], scale) for row in rows.values()], shade, unit
        )
        for side, name, shade in ((0, "from clients (up)", "@c1"), (1, "to clients (down)", "@c0"))
    ]
    layout = {"xaxis": axis("round"), "yaxis": axis(unit, rangemode="tozero"), "barmode": "group", "bargap": 0.25}
    return Figure("bytes", title, "Headers and tensors together, as the server counted them.", spec(data, 280, **layout))


def _line(name: str, x: Sequence[float], y: Sequence[float | None], style: JsonLine, symbol: str = "circle") -> dict[str, Any]:
    # Markers only for short lines.
    mode = "lines+markers" if len(x) < 4 else "lines"
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": list(x),
        "y": list(y),
        "line": style,
        "marker": {"symbol": symbol, "size": 7},
        "hovertemplate": f"{name}, round %{{x}}: %{{y:.3g}}<extra></extra>",
    }


def _bars(name: str, x: Sequence[int], y: Sequence[float | None], shade: str, unit: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": name,
        "x": list(x),
        "y": list(y),
        "marker": {"color": shade},
        "hovertemplate": f"round %{{x}}: %{{y:.3g}} {unit}<extra>{name}</extra>",
    }


def _curve(name: str, x: Sequence[int], y: Sequence[float | None], shade: str, unit: str) -> dict[str, Any]:
    return {**_line(f"{name}, {unit}", x, y, {"color": shade, "width": 1.5}), "mode": "lines"}


def heat(x: Sequence[float], z: list[list[int | None]], text: list[list[str]]) -> dict[str, Any]:
    """Build a heat map whose values are indices of colours."""
    scale = [[edge / COLOURS, f"@c{index}"] for index in range(COLOURS) for edge in (index, index + 1)]
    return {
        "type": "heatmap",
        "x": list(x),
        "z": z,
        "text": text,
        "hoverinfo": "text",
        "colorscale": scale,
        "zmin": 0,
        "zmax": COLOURS - 1,
        "showscale": False,
        "ygap": 1,
        "xgap": 0 if len(x) > 60 else 1,
    }


def _at(assignment: Sequence[Any], client: int) -> int | None:
    return whole(assignment[client]) if client < len(assignment) else None


def _percent(value: float | None) -> float | None:
    return _share(value, 0.01)


def _share(value: float | None, of: float) -> float | None:
    return None if value is None else value / of


def _who(clients: Sequence[int], all_clients: bool) -> str:
    if all_clients:
        return "every client"
    named = ", ".join(map(str, clients[:6])) + (", ..." if len(clients) > 6 else "")
    return f"client{'' if len(clients) == 1 else 's'} {named}"


def _point(first: FirstRound, client: int) -> str:
    sure = max(first.posteriors[client], default=math.nan)
    return f"client {client}: cluster {first.labels[client]}, posterior {sure:.2g}"


def _ranges(first: FirstRound, circles: list[tuple[list[float], float, str]]) -> tuple[list[float], list[float]]:
    ranges = []
    for side in (0, 1):
        edges = [point[side] for point in first.coordinates]
        edges += [centre[side] + sign * 2 * deviation for centre, deviation, _ in circles for sign in (-1, 1)]
        edges = [edge for edge in edges if math.isfinite(edge)] or [0.0]
        margin = 0.06 * (max(edges) - min(edges)) or 1.0
        ranges.append([min(edges) - margin, max(edges) + margin])
    return ranges[0], ranges[1]


def _circles(circles: list[tuple[list[float], float, str]]) -> list[dict[str, Any]]:
    return [
        {
            "type": "circle",
            "layer": "below",
            "x0": centre[0] - k * deviation,
            "x1": centre[0] + k * deviation,
            "y0": centre[1] - k * deviation,
            "y1": centre[1] + k * deviation,
            "opacity": 0.55 if k == 1 else 0.3,
            "line": {"color": shade, "width": 1.5},
        }
        for centre, deviation, shade in circles
        for k in (1, 2)
    ]


def _phases(view: RunView, rounds: list[int]) -> str:
    spans: list[list[Any]] = []
    for at in rounds:
        phase = str(mapping(view.grouping[at], "diagnostics").get("phase", ""))
        if spans and spans[-1][0] == phase:
            spans[-1][2] = at
        elif phase:
            spans.append([phase, at, at])
    said = [f"{phase} {start}" if start == end else f"{phase} {start}–{end}" for phase, start, end in spans]
    return f"Rounds: {', '.join(said)}. " if said else ""
