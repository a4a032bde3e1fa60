"""Figures of the report as plotly dictionaries; colours are names such as `@c0`, which the page replaces by theme."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any

from dpcfl_net.clustering.metrics import minority
from dpcfl_net.results.number_format import counted, number
from dpcfl_net.results.run_files import JsonLine, listed, mapping, numbers, whole
from dpcfl_net.results.run_view import RunView, letter, sizes

COLOURS = 8
MANY = 300  # with more clients, figures show quantiles or a sample
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
CURVES = 40  # of epsilon; more are shown as quantiles
LEAST_SAMPLED = 4  # clients of a kind, in a sample
NO_MESSAGES = "all clients ran in one process, without messages"
BARS, PAIRS = 150, 40  # of one trace, and of two beside each other, over rounds; more rounds are a line
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "star", "triangle-down", "hexagon")
DASHES = ("solid", "dash", "dashdot", "longdash")
# Lines of accuracy over all clients: name, key of the observer's lines, dash.
MEAN_AND_WORST = (("mean", "accuracy_mean", "solid"), ("worst client", "accuracy_worst", "dot"))
CENTRAL_LINE = ("central test set", "accuracy_central", "dash")  # only of runs with one
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


def symbol(index: int) -> str:
    """Return the marker of a cluster: no two of the first 64 share colour and marker."""
    return SYMBOLS[(index + index // COLOURS) % len(SYMBOLS)]


def colour_indices(view: RunView) -> dict[int, int]:
    """Return the colour index of each true cluster."""
    return {cluster: index for index, cluster in enumerate(sizes(view.true_clusters))}


def group_colours(view: RunView) -> dict[int, int]:
    """Match each of the server's clusters to the colour of the true cluster with most common clients; each is used once."""
    true, taken = view.true_clusters, colour_indices(view)
    shared: Counter[tuple[int, int]] = Counter()
    groups: set[int] = set()
    seen = [[whole(group) for group in listed(line, "assignment")] for line in view.grouping.values()]
    if view.first_round is not None:
        labels: dict[int, int | None] = dict(zip(view.first_round.clients, view.first_round.labels, strict=True))
        seen.append([labels.get(client) for client in range(len(true) or max(labels, default=-1) + 1)])
    for found in seen:
        groups |= {group for group in found if group is not None}
        for (group, cluster), count in Counter(zip(found, true, strict=False)).items():
            if group is not None:
                shared[group, cluster] += count
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
    return f"{letter(cluster)} ({counted(clients, 'client')}{mark})"


def true_cluster(view: RunView, client: int) -> int:
    """Return the true cluster of a client; 0 if it is unknown."""
    return view.true_clusters[client] if client < len(view.true_clusters) else 0


def by_true_cluster(view: RunView, clients: Iterable[int]) -> list[int]:
    """Sort clients by true cluster, then by number."""
    return sorted(clients, key=lambda client: (true_cluster(view, client), client))


def client_name(view: RunView, client: int) -> str:
    """Label a client by number and letter of its true cluster, if it is known."""
    return f"{client} {letter(true_cluster(view, client))}" if client < len(view.true_clusters) else str(client)


def accuracy(view: RunView) -> Figure:
    """Accuracy of each true cluster, the mean and the worst client, by round."""
    title, rounds = "Accuracy by round", sorted(view.observed)
    if not rounds:
        return Figure("accuracy", title, why="the observer has written no accuracy yet")
    lines = [view.observed[at] for at in rounds]
    by_cluster = [numbers(line, "accuracy_by_cluster") for line in lines]
    data = []
    clusters = max(map(len, by_cluster))
    for index in range(clusters if clusters > 1 else 0):  # one of all clients repeats the mean
        values = [percentage(row[index]) if index < len(row) else None for row in by_cluster]
        style = {"color": colour(index), "width": 2, "dash": DASHES[index // COLOURS % len(DASHES)]}
        data.append(round_line(true_name(view, index), rounds, values, style, symbol(index)))
    central = [CENTRAL_LINE] if any(number(line.get(CENTRAL_LINE[1])) is not None for line in lines) else []
    for name, key, dash in (*MEAN_AND_WORST, *central):
        values = [percentage(number(line.get(key))) for line in lines]
        data.append(round_line(name, rounds, values, {"color": "@ink", "width": 2.5, "dash": dash}))
    shown = [value for trace in data for value in trace["y"] if value is not None]
    if not shown:
        return Figure("accuracy", title, why="no line of the observer holds an accuracy")
    low, high = max(0, min(shown) - 4), min(100, max(shown) + 4)
    sets = f"each client's own {view.evaluated} data" + (", and on the central test set" if central else "")
    caption = f"On {sets}, measured by the observer. The server never sees this."
    layout = {"xaxis": axis("round"), "yaxis": axis("accuracy, %", range=[low, high])}
    return Figure("accuracy", title, caption, spec(data, 380, **layout))


def epsilon_spent(view: RunView) -> Figure:
    """Epsilon spent by each client by round; clients with equal curves share a line."""
    title, rounds = "Epsilon spent by client", sorted(view.spent)
    if not rounds:
        return Figure("epsilon", title, why="epsilon by round is written at the end of a run; this run has none")
    exact: defaultdict[tuple[float | None, ...], list[int]] = defaultdict(list)
    for client, row in enumerate(zip_longest(*(view.spent[at] for at in rounds))):
        exact[row].append(client)
    curves: defaultdict[tuple[float | None, ...], list[int]] = defaultdict(list)
    for row, who in exact.items():
        if any(value is not None for value in row):
            curves[tuple(None if value is None else float(f"{value:.5g}") for value in row)] += who
    if not curves:
        return Figure("epsilon", title, why="no client's epsilon is finite: the run is unprotected")
    caption = "All charges of each client up to that round, composed."
    if endless := sum(value is None for value in view.spent[rounds[-1]]):
        caption += f" That of {counted(endless, 'client')} is not finite."
    if len(curves) > CURVES:
        data = quantile_lines({at: view.spent[at] for at in rounds}, "{:.3g}")
        caption += f" Quantiles of the clients, which have {len(curves):,} different curves."
    else:
        single = len(curves) == 1 and not endless
        data = [
            round_line(_who(sorted(who), single), rounds, list(curve), {"color": colour(index), "width": 2})
            for index, (curve, who) in enumerate(curves.items())
        ]
    privacy = mapping(view.run, "privacy")
    promised = number(privacy.get("epsilon"))
    if promised is not None:
        ends = [1, max(rounds[-1], view.rounds or 0)]  # a short run has epsilon of its last round only
        style = {"color": "@ink", "width": 1.5, "dash": "dash"}
        name = "promised, the largest" if "epsilon_by_client" in privacy else "promised"
        data.append({**round_line(name, ends, [promised, promised], style), "mode": "lines"})
    layout = {"xaxis": axis("round"), "yaxis": axis("epsilon", rangemode="tozero"), "showlegend": len(data) <= 10}
    return Figure("epsilon", title, caption, spec(data, 300, **layout))


def traffic(view: RunView) -> Figure:
    """Bytes to and from the clients by round."""
    title = "Bytes by round"
    rows = {at: (number(line.get("bytes_up")), number(line.get("bytes_down"))) for at, line in sorted(view.served.items())}
    most = max((value or 0 for row in rows.values() for value in row), default=0)
    if not most:
        none = NO_MESSAGES if view.one_process else "the server has counted no bytes yet"
        return Figure("bytes", title, why=none)
    unit, scale = byte_unit(most)
    data = [
        (_bars if len(rows) <= PAIRS else _curve)(
            name, list(rows), [_share(row[side], scale) for row in rows.values()], shade, unit
        )
        for side, name, shade in ((0, "from clients (up)", "@c1"), (1, "to clients (down)", "@c0"))
    ]
    layout = {"xaxis": axis("round"), "yaxis": axis(unit, rangemode="tozero"), "barmode": "group", "bargap": 0.25}
    return Figure("bytes", title, "Headers and tensors together, as the server counted them.", spec(data, 280, **layout))


def byte_unit(most: float) -> tuple[str, float]:
    """Return a readable unit for a number of bytes, and its size."""
    return next(((unit, scale) for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if most >= scale), ("bytes", 1))


def round_line(
    name: str, x: Sequence[float], y: Sequence[float | None], style: JsonLine, symbol: str = "circle"
) -> dict[str, Any]:
    """Build a line over rounds."""
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


def spread(name: str, shade: str, x: Sequence[float], values: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """Draw a band of one standard deviation around means, with gaps where fewer than two values are: they show no spread.

    Args:
        name: Legend entry with which the band appears and disappears.
        shade: Name of its colour.
        x: Places, in order.
        values: Values at each place.

    Returns:
        The band's trace; none if it has no two neighbouring places with a spread.
    """
    xs: list[float | None] = []
    ys: list[float | None] = []
    for several, places in groupby(zip(x, values, strict=True), lambda place: len(place[1]) > 1):
        part = [(at, statistics.fmean(own), statistics.stdev(own)) for at, own in places] if several else []
        if len(part) > 1:
            gap = [None] if xs else []
            xs += [*gap, *(at for at, _, _ in part), *(at for at, _, _ in reversed(part))]
            ys += [*gap, *(mean + wide for _, mean, wide in part), *(mean - wide for _, mean, wide in reversed(part))]
    look = {"mode": "lines", "fill": "toself", "fillcolor": shade, "opacity": 0.18, "line": {"width": 0}}
    hidden = {"type": "scatter", "legendgroup": name, "showlegend": False, "hoverinfo": "skip"}
    return [{**hidden, **look, "x": xs, "y": ys}] if xs else []


def quantile_lines(rows: Mapping[int, Sequence[float | None]], form: str) -> list[dict[str, Any]]:
    """Build lines of the least, 10 %, median, 90 % and largest value by round.

    Args:
        rows: Values of all clients by round; None where one is unknown.
        form: Format of a value in the text of a point.
    """
    known = {at: sorted(value for value in row if value is not None) for at, row in rows.items()}
    known = {at: row for at, row in known.items() if row}
    names = {0.0: "least", 0.5: "median", 1.0: "largest"}
    data = []
    for share in QUANTILES:
        values = [row[round(share * (len(row) - 1))] for row in known.values()]
        name = names.get(share, f"{100 * share:.0f} % of the clients below")
        style = {"color": "@c0", "width": 2.5 if share == 0.5 else 1.5, "dash": "solid" if share in names else "dot"}
        line = round_line(name, list(known), values, style)
        data.append(
            {
                **line,
                "hovertemplate": f"{name}, round %{{x}}: %{{text}}<extra></extra>",
                "text": [form.format(v) for v in values],
            }
        )
    return data


def sample(clients: Sequence[int], kinds: Sequence[int], most: int) -> list[int]:
    """Choose clients evenly, at least some of each kind.

    Args:
        clients: Clients, those of one kind beside each other.
        kinds: Kind of each of them, in the same order.
        most: Number of clients to choose; a few more if there are many kinds.
    """
    chosen: list[int] = []
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for client, kind in zip(clients, kinds, strict=True):
        groups[kind].append(client)
    for own in groups.values():
        count = min(len(own), max(LEAST_SAMPLED, round(most * len(own) / len(clients))))
        chosen += [own[k * len(own) // count] for k in range(count)]
    return chosen


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
    return {**round_line(f"{name}, {unit}", x, y, {"color": shade, "width": 1.5}), "mode": "lines"}


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


def cluster_words(clients: Sequence[int], rounds: Sequence[int], cells: list[list[int | None]], none: str) -> list[list[str]]:
    """Text of each cell of a heat map of clusters by client and round; `none` stands for no cluster."""
    return [
        [
            f"client {client}, round {at}: {none if cell is None else f'cluster {cell}'}"
            for at, cell in zip(rounds, row, strict=True)
        ]
        for client, row in zip(clients, cells, strict=True)
    ]


def percentage(value: float | None) -> float | None:
    """Return a share in percent."""
    return _share(value, 0.01)


def _share(value: float | None, of: float) -> float | None:
    return None if value is None else value / of


def _who(clients: Sequence[int], all_clients: bool) -> str:
    if all_clients:
        return "every client"
    named = ", ".join(map(str, clients[:6])) + (", ..." if len(clients) > 6 else "")
    return f"client{'' if len(clients) == 1 else 's'} {named}"
