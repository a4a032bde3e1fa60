"""Figures of the server's clusters: mixture of the first round, number of clusters, assignments, labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dpcfl_net.report.figures import (
    COLOURS,
    DASHES,
    MANY,
    Figure,
    axis,
    by_true_cluster,
    client_name,
    cluster_words,
    colour,
    colour_indices,
    group_colours,
    heat,
    percentage,
    round_line,
    sample,
    spec,
    symbol,
    true_cluster,
    true_name,
)
from dpcfl_net.results.number_format import counted, number, plain, tiny
from dpcfl_net.results.run_files import item, listed, mapping, whole
from dpcfl_net.results.run_view import FirstRound, RunView

ROWS, ROUNDS, POINTS = 100, 60, 1000  # with many clients
CHOICE = (
    "The largest MSS does not decide: the choice asks which M the known noise explains, and after which M the MSS falls most."
)
NO_CLUSTERS, ONE_CLUSTER = "the server of this algorithm does not cluster clients", "all clients share one cluster"


def first_round(view: RunView) -> Figure:
    """First-round updates in two principal components, with the fitted mixture."""
    title, first = "First-round updates and the mixture", view.first_round
    if first is None:
        return Figure("first-round", title, why="this run clusters no first-round updates, or they were not kept")
    groups, true = group_colours(view), view.true_clusters
    known = max(first.clients, default=0) < len(true)
    shades = colour_indices(view) if known else groups
    kinds = [true[client] for client in first.clients] if known else first.labels
    drawn = sample(range(len(kinds)), kinds, POINTS) if len(kinds) > POINTS else range(len(kinds))
    data = []
    for kind in sorted(set(kinds)):
        name = f"true {true_name(view, kind)}" if known else f"cluster {kind}"
        data.append(_updates(first, name, [row for row in drawn if kinds[row] == kind], shades[kind]))
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
    components, answered = counted(first.clusters, "component"), len(first.clients)
    points = "One point per client" if answered == view.clients else f"One point for each of {answered:,} clients that answered"
    caption = (
        f"{points}{coloured}{_sampled(len(drawn), len(kinds))}; circles: the server's {components} at one and two "
        f"standard deviations. MSS {plain(first.mss, 3)} (uncorrected {plain(first.mss_plain, 3)}), "
        f"MPO {tiny(first.mpo, 2)}.{membership(first)}{hidden(first)}"
    )
    return Figure("first-round", title, caption, {**spec(data, 440, **layout), "aspect": 0.95})


def _updates(first: FirstRound, name: str, rows: Sequence[int], shade: int) -> dict[str, Any]:
    """Points of some updates, in the colour and with the symbol of an index."""
    points = [first.coordinates[row] for row in rows]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [point[0] for point in points],
        "y": [point[1] for point in points],
        "text": [_point(first, row) for row in rows],
        "hoverinfo": "text",
        "marker": {"size": 10, "color": colour(shade), "symbol": symbol(shade), "line": {"color": "@surface", "width": 1}},
    }


def membership(first: FirstRound) -> str:
    """Say which clients resemble no other; empty if there are none."""
    alone, outliers = (", ".join(map(str, rows)) for rows in (first.alone, first.outliers))
    words = f" Alone in a cluster, since no other resembles it: client {alone}." if alone else ""
    return words + (f" Outlier in a cluster of others: client {outliers}." if outliers else "")


def hidden(first: FirstRound) -> str:
    """Say how many clients may resemble no other, hidden by noise; empty if there are none."""
    count = f"{len(first.unverified)} of {len(first.labels)} clients"
    why = "noise may hide a distance as large as that between the closest clusters"
    return f" {count} may resemble no other: {why}." if first.unverified else ""


def candidates(view: RunView) -> Figure:
    """MSS of each number of clusters that was tried: the one that the choice uses."""
    title, first = "Number of clusters", view.first_round
    if first is None or len(first.scores) < 2 or not any(math.isfinite(score) for score in first.scores):
        why = "the number was given, or the clients are too few for a choice" if first else "no mixture was fitted"
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
        "yaxis": axis("uncorrected MSS" if _published(view) else "MSS", rangemode="tozero"),
        "showlegend": False,
        "margin": {"l": 8, "r": 12, "t": 28, "b": 8},
    }
    drawn = " (blue)" if "@c0" in chosen else ", which has no bar"
    caption = f"Separation of the mixture for each M that was tried; M = {first.clusters} was used{drawn}."
    highest = max(tried, key=lambda pair: pair[1] or 0)[0]
    caption += f" {CHOICE}" if first.clusters != highest and not _published(view) else ""
    return Figure("candidates", title, caption, spec(data, 280, **layout))


def _published(view: RunView) -> bool:
    """True if the number of clusters was chosen by the authors' published rule, the largest uncorrected MSS."""
    return mapping(mapping(view.protocol, "options"), "clustering").get("space") == "pca2"


def grouped_rounds(view: RunView) -> list[int]:
    """List the rounds in which the server's cluster of some client is known."""
    return [at for at in sorted(view.grouping) if any(item is not None for item in listed(view.grouping[at], "assignment"))]


def clusters_clients(view: RunView) -> bool:
    """Return True if the server has put clients into clusters, or knows how many each cluster has."""
    sizes = (listed(mapping(line, "diagnostics"), "sizes") for line in view.grouping.values())
    return bool(grouped_rounds(view)) or any(number(count) for counts in sizes for count in counts)


def assignments(view: RunView) -> Figure:
    """The server's cluster of each client by round, sorted by true cluster."""
    title = "Cluster assignments"
    rounds = grouped_rounds(view)
    found = {item for at in rounds for item in listed(view.grouping[at], "assignment")}
    if len(found - {None}) < 2:
        return Figure("assignments", title, why=ONE_CLUSTER if found else NO_CLUSTERS)
    true, groups = view.true_clusters, group_colours(view)
    order, rounds, part = _drawn_clients(view, rounds)
    cells = [[whole(item(listed(view.grouping[at], "assignment"), client)) for at in rounds] for client in order]
    names = [client_name(view, client) for client in order]
    words = cluster_words(order, rounds, cells, "none yet")
    data = [heat(rounds, [[None if cell is None else groups[cell] % COLOURS for cell in row] for row in cells], words)]
    layout: dict[str, Any] = {"xaxis": axis("round", showgrid=False)}
    if true:
        data.append(_true_column(view, order, names))
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
    colours = (
        "One colour: a cluster and a true cluster, matched one to one by the clients that they share over all rounds."
        if true
        else ""
    )
    caption = f"{_phases(view, rounds)}{colours}{part}{blank}".strip()
    return Figure("assignments", title, caption, spec(data, min(620, 120 + 18 * len(order)), **layout))


def _drawn_clients(view: RunView, rounds: list[int]) -> tuple[list[int], list[int], str]:
    """Clients by true cluster and rounds, a part of both with many clients, and a sentence about the part."""
    order = by_true_cluster(view, range(view.clients))
    if len(order) <= MANY:
        return order, rounds, ""
    every = -(-len(rounds) // ROUNDS)
    order = sample(order, [true_cluster(view, client) for client in order], ROWS)
    part = f" {len(order)} of {view.clients:,} clients{', evenly from each true cluster' if view.true_clusters else ''}."
    return order, rounds[::-1][::every][::-1], part + (f" Every {every} rounds." if every > 1 else "")


def _true_column(view: RunView, order: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    """Colours of the true clusters, beside the rounds."""
    true, truth = view.true_clusters, colour_indices(view)
    kinds = [truth[true[client]] % COLOURS if client < len(true) else None for client in order]
    return {**heat([0], [[kind] for kind in kinds], [[f"client {name}: true cluster"] for name in names]), "xaxis": "x2"}


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
        values = [percentage(number(mapping(view.agreement[at], "label_accuracy").get(name))) for at in rounds]
        if any(value is not None for value in values):
            data.append(
                round_line(
                    name,
                    rounds,
                    values,
                    {"color": colour(index), "width": 2, "dash": DASHES[index % len(DASHES)]},
                    symbol(index),
                )
            )
    caption = (
        "Clients of the round, against true clusters under the one-to-one naming that fits the sent labels best. Only the "
        "trusted server knows the sent labels; released labels contain noise; placed labels are those after rebalancing."
    )
    return Figure("labels", title, caption, spec(data, 320, xaxis=axis("round"), yaxis=axis("correct, %", range=[0, 100])))


def _sampled(drawn: int, clients: int) -> str:
    return f" ({drawn:,} of {clients:,} clients, evenly)" if drawn < clients else ""


def _point(first: FirstRound, row: int) -> str:
    sure = max(first.posteriors[row], default=math.nan)
    return f"client {first.clients[row]}: cluster {first.labels[row]}, posterior {sure:.2g}"


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
