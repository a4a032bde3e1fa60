"""Places of the bars of a figure: grouped, stacked or one over the other."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpcfl_net.report.svg.axes import Axis

GAP = 0.2  # between groups, as a share of their distance


@dataclass(frozen=True)
class Bar:
    """One bar, in coordinates of the axes.

    Attributes:
        index: Number of the point in its trace.
        place: Middle on the axis of places.
        half: Half of the width.
        base: Where it begins on the axis of values.
        top: Where it ends.
    """

    index: int
    place: float
    half: float
    base: float
    top: float


def place_bars(traces: Sequence[Mapping[str, Any]], layout: Mapping[str, Any], x: Axis, y: Axis) -> dict[int, list[Bar]]:
    """Place the bars of one pair of axes.

    Args:
        traces: All traces of the figure.
        layout: The figure's layout.
        x: Their x axis.
        y: Their y axis.

    Returns:
        Number of the trace to its bars.
    """
    own = [(index, trace) for index, trace in enumerate(traces) if trace["type"] == "bar"]
    points = {index: list(_points(trace, x, y)) for index, trace in own}
    apart = spacing([place for found in points.values() for _, place, _ in found])
    room, mode = apart * (1 - layout.get("bargap", GAP)), layout.get("barmode", "group")
    share = room / len(own) if mode == "group" and own else room
    totals: defaultdict[float, float] = defaultdict(float)
    bars: dict[int, list[Bar]] = {}
    for order, (index, trace) in enumerate(own):
        width = trace.get("width", share)
        shift = (order - (len(own) - 1) / 2) * share if mode == "group" else 0.0
        bases, bars[index] = trace.get("base"), []
        for at, place, value in points[index]:
            base = float(bases[at]) if bases is not None else totals[place] if mode == "stack" else 0.0
            bars[index].append(Bar(at, place + shift, width / 2, base, base + value))
            totals[place] += value
    return bars


def _points(trace: Mapping[str, Any], x: Axis, y: Axis) -> list[tuple[int, float, float]]:
    """(number, place, value) of the bars that have both."""
    lying = trace.get("orientation") == "h"
    places, values = (trace["y"], trace["x"]) if lying else (trace["x"], trace["y"])
    at, to = (y, x) if lying else (x, y)
    pairs = [(at.coordinate(place), to.coordinate(value)) for place, value in zip(places, values, strict=True)]
    return [(i, place, value) for i, (place, value) in enumerate(pairs) if place is not None and value is not None]


def spacing(places: Sequence[float]) -> float:
    """Return the least distance of two places; 1 for fewer than two."""
    found = sorted(set(places))
    return min((b - a for a, b in itertools.pairwise(found)), default=1.0)
