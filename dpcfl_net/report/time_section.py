"""Time and traffic of a run: figures of accuracy over time and of each client's time, and tables."""

from __future__ import annotations

import math
from typing import Any

from dpcfl_net.report.figures import BARS, CENTRAL_LINE, LEGEND, MEAN_AND_WORST, Figure, axis, byte_unit, spec
from dpcfl_net.results.number_format import number, percent
from dpcfl_net.results.round_times import (
    TARGET_SHARE,
    accuracy_curve,
    bytes_by_kind,
    client_times,
    first_reached,
    stragglers,
    usual_target,
)
from dpcfl_net.results.run_view import RunView
from dpcfl_net.results.tables import Table

CLIENTS, STRAGGLERS = 40, 10  # shown at most
SHADES = {"receive": "@c4", "train": "@c0", "send": "@c1", "wait": "@c7", "idle": "@grid"}
WORK_NAMES = {"train": "compute", "receive": "receive", "send": "send", "wait": "wait for a core", "idle": "wait for others"}
KINDS = {"TASK": "tasks", "RESULT": "results", "control": "control"}


def accuracy_over_time(view: RunView) -> Figure:
    """Mean accuracy and that of the worst client against the seconds since round 1 began."""
    title, curve = "Accuracy over time", accuracy_curve(view.elapsed, view.observed)
    if len(curve) < 2:
        return Figure("accuracy-time", title, why="the times of fewer than two evaluated rounds are known")
    unit, scale = time_unit(curve[-1].seconds)
    data: list[dict[str, Any]] = []
    for name, key, dash in (*MEAN_AND_WORST, CENTRAL_LINE):
        values = [number(view.observed[point.round].get(key)) for point in curve]
        if any(value is not None for value in values):
            data.append({
                "type": "scatter", "mode": "lines+markers" if len(curve) <= BARS else "lines", "name": name,
                "x": [point.seconds / scale for point in curve],
                "y": [None if value is None else 100 * value for value in values], "text": [point.round for point in curve],
                "line": {"color": "@ink", "width": 2, "dash": dash}, "marker": {"size": 4},
                "hovertemplate": f"{name}, round %{{text}}, %{{x:.3g}} {unit}: %{{y:.1f}} %<extra></extra>",
            })  # fmt: skip
    target = usual_target([curve])
    found = first_reached(curve, target) if target is not None else None
    layout = {"xaxis": axis(unit, rangemode="tozero"), "yaxis": axis("accuracy, %")}
    caption = f"{_clock(view)}, from the start of round 1."
    if found is not None:
        caption += f" Diamond: {100 * TARGET_SHARE:.0f} % of the best mean accuracy, rounded down, was reached."
        data.append({
            "type": "scatter", "mode": "markers", "name": f"{percent(target)} reached", "x": [found.seconds / scale],
            "y": [100 * found.accuracy], "marker": {"size": 12, "color": "@c1", "symbol": "diamond"},
            "hovertemplate": f"round {found.round}, %{{x:.3g}} {unit}<extra></extra>",
        })  # fmt: skip
    return Figure("accuracy-time", title, caption, spec(data, 320, **layout))


def time_of_clients(view: RunView) -> Figure:
    """Bars of each client's time over all rounds: computing, receiving, sending, waiting."""
    title, total_s = "Time of each client", max(view.elapsed.values(), default=0.0)
    found = client_times(view.spans, total_s)
    if not found or not any(own["receive"] for own in found.values()):
        return Figure("client-time", title, why="the workers have reported no transfers")
    busy = {client: sum(own.values()) - own["idle"] for client, own in found.items()}
    shown = sorted(sorted(found, key=lambda client: -busy[client])[:CLIENTS])
    unit, scale = time_unit(total_s)
    names = [f"client {client}" for client in shown]
    data = [
        {
            "type": "bar", "orientation": "h", "name": WORK_NAMES[what], "y": names,
            "x": [round(found[client][what] / scale, 4) for client in shown], "marker": {"color": shade, "line": {"width": 0}},
            "hovertemplate": f"%{{y}}, {WORK_NAMES[what]}: %{{x:.3g}} {unit}<extra></extra>",
        }
        for what, shade in SHADES.items()
        if any(found[client][what] for client in shown)
    ]  # fmt: skip
    part = f" The {len(shown)} busiest of {len(found)} clients." if len(shown) < len(found) else ""
    layout = {
        "xaxis": axis(unit),
        "yaxis": axis("", autorange="reversed", type="category", showgrid=False, tickfont={"size": 11}, dtick=1),
        "barmode": "stack",
        "bargap": 0.3,
        "legend": {**LEGEND, "traceorder": "normal"},
    }
    caption = f"All rounds, {_clock(view).lower()}.{part}"
    return Figure("client-time", title, caption, spec(data, 130 + 20 * len(shown), **layout))


def time_tables(view: RunView) -> list[Table]:
    """Build the tables: seconds until accuracies, clients that held up rounds, bytes by kind of message."""
    return [table for table in (_reached(view), _held_up(view), _bytes(view)) if table.rows]


def time_unit(seconds: float) -> tuple[str, float]:
    """Return a readable unit for a duration, and its seconds."""
    return ("hours", 3600.0) if seconds > 3 * 3600 else ("minutes", 60.0) if seconds > 300 else ("seconds", 1.0)


def _clock(view: RunView) -> str:
    return "Virtual time" if view.virtual else "Wall-clock time"


def _reached(view: RunView) -> Table:
    curve = accuracy_curve(view.elapsed, view.observed)
    best = max((point.accuracy for point in curve), default=0.0)
    unit, scale = time_unit(max(view.elapsed.values(), default=0.0))
    rows = []
    # Two shares of a low accuracy may be the same whole percent.
    for target in dict.fromkeys(math.floor(100 * share * best) / 100 for share in (0.5, 0.8, 0.9, TARGET_SHARE)):
        point = first_reached(curve, target)
        if point is not None and target > 0:
            rows.append([f"{100 * target:.0f} %", str(point.round), f"{point.seconds / scale:.1f}"])
    caption = f"50, 80, 90 and 95 % of the best mean accuracy, {percent(best)}, rounded down. {_clock(view)} from the start of round 1."
    return Table("Time to accuracy", ["mean accuracy", "round", unit], rows, caption)


def _held_up(view: RunView) -> Table:
    calls, held = stragglers(view.messages)
    rows = [
        [f"{one.client}", f"{one.times}", f"{one.total_s:.2f}", f"{one.total_s / one.times:.2f}", f"{one.most_s:.2f}"]
        for one in held[:STRAGGLERS]
    ]
    most = f"The first {STRAGGLERS} of {len(held)} clients" if len(held) > STRAGGLERS else "Clients"
    caption = f"{most} whose answer came last, of {calls} calls of a client step; time from the last answer but one to theirs."
    return Table("Clients that held up rounds", ["client", "times last", "total, s", "mean, s", "longest, s"], rows, caption)


def _bytes(view: RunView) -> Table:
    found = bytes_by_kind(view.messages, view.served.values())
    most = max((part for _, up, down in found.values() for part in (up, down)), default=0)
    unit, scale = byte_unit(most)
    rows = [
        [KINDS[kind], f"{count}" if count else "–", *(f"{part / scale:.3g}" if part else "–" for part in (up, down))]
        for kind, (count, up, down) in found.items()
    ]
    caption = "Control: headers of chunks, confirmations, heartbeats and handshakes."
    return Table(
        "Bytes by kind of message", ["kind", "messages", f"from clients, {unit}", f"to clients, {unit}"], rows, caption
    )
