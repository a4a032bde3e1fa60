"""Timeline of the processes over the last rounds, with a bounded number of bars."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dpcfl_net.report.figures import Figure, axis, spec
from dpcfl_net.results.number_format import number
from dpcfl_net.results.run_files import JsonLine, whole
from dpcfl_net.results.run_view import RunView

ROUNDS, BARS, ROWS = 10, 1500, 40
KINDS = {"train": "@c0", "receive": "@c4", "send": "@c1", "evaluate": "@c5", "wait": "@grid", "pause": "@c7"}
FAULT = "fault"  # by dpcfl run --chaos; the word after it is its kind


def timeline(view: RunView) -> Figure:
    """Bars of computing, receiving, sending and waiting over the last rounds, one row per process."""
    title = "Timeline of the processes"
    spans = [span for span in view.spans if _valid(span)]
    if not spans:
        return Figure("timeline", title, why="the processes have written no timings yet")
    rounds = _last_rounds(spans)
    rows = _rows([span for span in spans if span["round"] in rounds])
    shown = [span for span in spans if span["round"] in rounds and span["who"] in rows]
    if not shown:
        return Figure("timeline", title, why="no shown process has a timing in the last rounds")
    origin = min(span["start"] for span in shown)
    others = sorted({span["what"] for span in shown} - set(KINDS))
    first_fault = next((kind for kind in others if _is_fault(kind)), "")
    data = [
        _bars(kind, [span for span in shown if span["what"] == kind], origin, first_fault=kind == first_fault)
        for kind in [*KINDS, *others]
    ]
    everyone = len({span["who"] for span in spans if span["round"] in rounds})
    part = f", {len(rows)} of {everyone} processes" if len(rows) < everyone else ""
    first, last = min(rounds), max(rounds)
    span = f"Round {last}" if first == last else f"Rounds {first} to {last}"
    caption = f"{span}{part}. Seconds since the first of them began{', virtual time' if view.virtual else ''}."
    if any(span["what"] == "receive" for span in shown):
        caption += " Blank at a client: it waits for the others, or has ended."
    layout = {
        "xaxis": axis("seconds"),
        "barmode": "overlay",
        "bargap": 0.3,
        "yaxis": axis(
            "",
            categoryorder="array",
            categoryarray=rows[::-1],
            showgrid=False,
            tickfont={"size": 11},
            range=[-0.5, len(rows) - 0.5],
            dtick=1,
        ),
    }
    return Figure("timeline", title, caption, spec([bars for bars in data if bars["x"]], 130 + 20 * len(rows), **layout))


def _valid(span: JsonLine) -> bool:
    start, end = number(span.get("start")), number(span.get("end"))
    named = isinstance(span.get("who"), str) and isinstance(span.get("what"), str)
    # Round 0 is the preparation, by the launcher.
    return named and bool(whole(span.get("round"))) and start is not None and end is not None and end >= start


def _last_rounds(spans: list[JsonLine]) -> set[int]:
    counts = Counter(span["round"] for span in spans)
    kept: set[int] = set()
    total = 0
    for at in sorted(counts, reverse=True)[:ROUNDS]:
        total += counts[at]
        if kept and total > BARS:
            break
        kept.add(at)
    return kept


def _rows(spans: list[JsonLine]) -> list[str]:
    def place(who: str) -> tuple[int, int, str]:
        role, _, tail = who.partition(" ")
        return {"coordinator": 0, "observer": 1}.get(role, 2), int(tail) if tail.isdecimal() else 0, who

    return sorted({span["who"] for span in spans}, key=place)[:ROWS]


def _is_fault(kind: str) -> bool:
    return kind.startswith(f"{FAULT} ")


def _bars(kind: str, spans: list[JsonLine], origin: float, *, first_fault: bool) -> dict[str, Any]:
    """Bars of one kind; all faults share a legend entry, that of the first."""
    fault = _is_fault(kind)
    return {
        "type": "bar",
        "orientation": "h",
        "name": FAULT if fault else kind,
        **({"legendgroup": FAULT, "showlegend": first_fault} if fault else {}),
        "base": [round(span["start"] - origin, 4) for span in spans],
        "x": [round(span["end"] - span["start"], 4) for span in spans],
        "y": [span["who"] for span in spans],
        "marker": {"color": KINDS.get(kind, "@c6"), "line": {"width": 0}},
        "hovertemplate": f"%{{y}}, {kind}: %{{x:.3g}} s<extra></extra>",
    }
