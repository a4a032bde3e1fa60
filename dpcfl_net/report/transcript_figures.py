"""Figures from a full transcript: released updates in two components, and the clusters that clients chose."""

from __future__ import annotations

from typing import Any

from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.report.figures import (
    COLOURS,
    NO_MESSAGES,
    Figure,
    axis,
    by_true_cluster,
    client_name,
    cluster_words,
    colour,
    colour_indices,
    group_colours,
    heat,
    spec,
    symbol,
    true_cluster,
    true_name,
)
from dpcfl_net.results.run_files import mapping
from dpcfl_net.results.run_view import RunView
from dpcfl_net.results.server_seen import Seen, read_seen
from dpcfl_net.results.summary import read_run_job

UPDATES, CHOICES = "Updates in two components, by round", "Clusters that clients chose"
NOT_KEPT = "the transcript holds no tensors (output.transcript: full keeps them)"
NOT_WRITTEN = "aggregators write no transcript"
MASKED = "clients send masked vectors in secure sums; one alone shows nothing"
RAW = "the server is trusted and received raw updates, which the privacy statement does not cover"


def transcript_figures(view: RunView) -> list[Figure]:
    """Draw updates of two rounds and all choices; rounds are the first and the last, or the middle and the last.

    The first round is left to `figures.first_round` where the server fitted a mixture to it. The transcript of a trusted server
    holds raw updates: they are not drawn.
    """
    last = max(view.served, default=0)
    rounds = sorted({(1 + last) // 2 if view.first_round else 1, last} - {0})
    if view.one_process:
        return _left_out(NO_MESSAGES)
    if mapping(view.config, "runtime").get("aggregators"):
        return _left_out(NOT_WRITTEN)
    if mapping(view.config, "output").get("transcript") != "full":
        return _left_out(NOT_KEPT)
    trust = mapping(view.run, "privacy").get("trust")
    if trust != "untrusted-server":
        return _left_out(MASKED if trust == "secure-aggregation" else RAW)
    try:
        seen = read_seen(view.folder, read_run_job(view.folder), rounds)
    except (ConfigError, Refused) as error:
        return _left_out(str(error))
    why = "fewer than three clients sent a model's update in the first, middle and last round"
    updates = [_updates(view, seen, t) for t in seen.components] or [Figure("updates", UPDATES, why=why)]
    return [*updates, _choices(view, seen)]


def _left_out(why: str) -> list[Figure]:
    return [Figure("updates", UPDATES, why=why), Figure("choices", CHOICES, why=why)]


def _updates(view: RunView, seen: Seen, t: int) -> Figure:
    points, shades = seen.components[t], colour_indices(view)
    kinds = {client: true_cluster(view, client) for client in points}
    data = [
        {
            "type": "scatter", "mode": "markers", "name": f"true {true_name(view, kind)}" if view.true_clusters else "clients",
            "x": [points[client][0] for client in points if kinds[client] == kind],
            "y": [points[client][1] for client in points if kinds[client] == kind],
            "text": [f"client {client}" for client in points if kinds[client] == kind], "hoverinfo": "text",
            "marker": {"size": 10, "color": colour(shades.get(kind, 0)), "symbol": symbol(shades.get(kind, 0))},
        }
        for kind in sorted(set(kinds.values()))
    ]  # fmt: skip
    layout: dict[str, Any] = {
        "xaxis": axis("first component", tickformat=".3~g", nticks=6),
        "yaxis": axis("second component", scaleanchor="x", tickformat=".3~g", nticks=6),
    }
    caption = f"What clients released in round {t}: update and noise. One point per client; components of this round's updates."
    return Figure(f"updates-{t}", f"Updates of round {t}", caption, {**spec(data, 440, **layout), "aspect": 0.95})


def _choices(view: RunView, seen: Seen) -> Figure:
    if not seen.choices:
        return Figure("choices", CHOICES, why="the clients of this algorithm release no choice")
    rounds, groups, order = sorted(seen.choices), group_colours(view), by_true_cluster(view, range(view.clients))
    chosen = [[seen.choices[t].get(client) for t in rounds] for client in order]
    words = cluster_words(order, rounds, chosen, "none")
    cells = [[None if cell is None else groups.get(cell, cell) % COLOURS for cell in row] for row in chosen]
    names = [client_name(view, client) for client in order]
    layout = {
        "xaxis": axis("round", showgrid=False),
        "yaxis": axis("client", autorange="reversed", showgrid=False, tickvals=list(range(len(order))), ticktext=names),
    }
    caption = "As released, with the noise of the selection. Colours as in cluster assignments."
    return Figure("choices", CHOICES, caption, spec([heat(rounds, cells, words)], min(620, 120 + 18 * len(order)), **layout))
