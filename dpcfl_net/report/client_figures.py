"""Figures by client: accuracy after the last round, and over rounds."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from dpcfl_net.report.figures import (
    MANY,
    Figure,
    axis,
    by_true_cluster,
    client_name,
    colour,
    colour_indices,
    quantile_lines,
    spec,
    true_cluster,
    true_name,
)
from dpcfl_net.results.number_format import percent
from dpcfl_net.results.run_files import item, numbers
from dpcfl_net.results.run_view import RunView

CLIENTS, WORST, ROUNDS = 40, 20, 60  # shown at most; WORST with many clients


def accuracy_by_client(view: RunView, alone: Mapping[int, float] | None = None) -> Figure:
    """Accuracy of each client after the last evaluated round, sorted by true cluster.

    Args:
        view: The run.
        alone: Accuracy of clients that trained alone, at the same epsilon; clients that are less accurate here are marked. None: unknown.
    """
    title = "Accuracy by client"
    last, shown = _last(view), _shown(view)
    if not shown:
        return Figure("clients", title, why="no line of the observer holds an accuracy for each client")
    names = [client_name(view, client) for client in shown]
    shades = colour_indices(view)
    data: list[dict[str, Any]] = []
    for kind in sorted({true_cluster(view, client) for client in shown}):
        own = [client for client in shown if true_cluster(view, client) == kind]
        data.append({
            "type": "scatter", "mode": "markers", "name": true_name(view, kind) if view.true_clusters else "clients",
            "x": [100 * last[client] for client in own], "y": [client_name(view, client) for client in own],
            "marker": {"size": 10, "color": colour(shades.get(kind, 0))},
            "hovertemplate": "client %{y}: %{x:.1f} %<extra></extra>",
        })  # fmt: skip
    worse = [client for client in shown if alone and client in alone and last[client] < alone[client]]
    if alone:
        known = [client for client in shown if client in alone]
        data.append({
            "type": "scatter", "mode": "markers", "name": "alone", "x": [100 * alone[client] for client in known],
            "y": [client_name(view, client) for client in known], "marker": {"size": 14, "color": "@ink", "symbol": "line-ns"},
            "hovertemplate": "client %{y} alone: %{x:.1f} %<extra></extra>",
        })  # fmt: skip
        data.append({
            "type": "scatter", "mode": "markers", "name": "worse than alone", "x": [100 * last[client] for client in worse],
            "y": [client_name(view, client) for client in worse], "marker": {"size": 18, "color": "@alert", "symbol": "circle-open"},
            "hovertemplate": "client %{y}: worse than alone<extra></extra>",
        })  # fmt: skip
    caption = f"After round {max(view.observed)}, on each client's own {view.evaluated} data. {_part(view, shown)}"
    caption += f"Less accurate than alone: {len(worse)} of {len(shown)} clients. " if alone else ""
    caption += "Their names: dpcfl clients RUN." if view.named_clients else ""
    layout = {
        "xaxis": axis("accuracy, %"),
        "yaxis": axis("client", type="category", categoryarray=names, autorange="reversed"),
    }
    return Figure("clients", title, caption, spec(data, 96 + max(18 * len(shown), 130), **layout))


def accuracy_of_clients_by_round(view: RunView) -> Figure:
    """Heat map of the accuracy of each client by round; quantiles with many clients."""
    title, rounds = "Accuracy of each client by round", sorted(view.observed)
    shown = _shown(view)
    if not shown or len(rounds) < 2:
        return Figure("clients-rounds", title, why="fewer than two rounds hold an accuracy for each client")
    every = -(-len(rounds) // ROUNDS)
    rounds = rounds[::-1][::every][::-1]
    if len(_last(view)) > MANY:
        return _quantiles(view, rounds, every)
    tables = [numbers(view.observed[at], "accuracy_by_client") for at in rounds]
    cells = [[_percent(row, client) for row in tables] for client in shown]
    words = [
        [f"client {client}, round {at}: {percent(item(row, client))}" for at, row in zip(rounds, tables, strict=True)]
        for client in shown
    ]
    values = [value for row in cells for value in row if value is not None]
    data: list[dict[str, Any]] = [{
        "type": "heatmap", "x": rounds, "z": cells, "text": words, "hoverinfo": "text",
        "colorscale": [[0, "@surface"], [1, "@c0"]], "zmin": min(values), "zmax": max(values),
    }]  # fmt: skip
    names = [client_name(view, client) for client in shown]
    layout = {
        "xaxis": axis("round", showgrid=False),
        "yaxis": axis("client", autorange="reversed", showgrid=False, tickvals=list(range(len(names))), ticktext=names),
    }
    sampled = f" Every {every} rounds." if every > 1 else ""
    caption = f"{_part(view, shown)}From {min(values):.1f} % (faint) to {max(values):.1f} % (strong).{sampled}"
    return Figure("clients-rounds", title, caption, spec(data, 96 + max(18 * len(shown), 130), **layout))


def _quantiles(view: RunView, rounds: list[int], every: int) -> Figure:
    rows = {at: [_percent([value], 0) for value in numbers(view.observed[at], "accuracy_by_client")] for at in rounds}
    sampled = f" Every {every} rounds." if every > 1 else ""
    caption = f"Of {len(_last(view)):,} clients, on each client's own {view.evaluated} data.{sampled}"
    layout = {"xaxis": axis("round"), "yaxis": axis("accuracy, %")}
    return Figure(
        "clients-rounds", "Accuracy of the clients by round", caption, spec(quantile_lines(rows, "{:.1f} %"), 320, **layout)
    )


def _last(view: RunView) -> dict[int, float]:
    if not view.observed:
        return {}
    row = numbers(view.observed[max(view.observed)], "accuracy_by_client")
    return {client: value for client, value in enumerate(row) if value is not None}


def _shown(view: RunView) -> list[int]:
    """Clients of the figure by true cluster; the worst ones if there are too many."""
    last = _last(view)
    return by_true_cluster(view, heapq.nsmallest(WORST if len(last) > MANY else CLIENTS, last, key=last.__getitem__))


def _part(view: RunView, shown: list[int]) -> str:
    count = len(_last(view))
    return f"The {len(shown)} worst of {count:,} clients. " if len(shown) < count else ""


def _percent(row: list[float | None], client: int) -> float | None:
    value = item(row, client)
    return None if value is None else 100 * value
