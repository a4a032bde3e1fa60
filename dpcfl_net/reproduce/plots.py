"""Line, scatter and bar plots as plotly dictionaries, and the slope of a log-log line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpcfl_net.report.figures import DASHES, SYMBOLS, Figure, axis, colour, spec

Series = Mapping[str, Sequence[tuple[float, float]]]


def lines(
    key: str, title: str, series: Series, x: str, y: str, *, caption: str = "", log_x: bool = False, log_y: bool = False
) -> Figure:
    """Plot one line per series.

    Args:
        key: Identifier of the figure.
        title: Title of the figure.
        series: Legend entry to (x, y) pairs, in order.
        x: Label of the x axis.
        y: Label of the y axis.
        caption: Text below the figure.
        log_x: True if the x axis is logarithmic.
        log_y: True if the y axis is logarithmic.

    Returns:
        The figure.
    """
    data = [
        _trace(
            name,
            pairs,
            "lines+markers",
            {"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 7},
            line={"color": colour(index), "width": 2, "dash": DASHES[index // 8 % len(DASHES)]},
        )
        for index, (name, pairs) in enumerate(series.items())
    ]
    at = sorted({point[0] for pairs in series.values() for point in pairs})
    ticks = {"tickvals": at, "ticktext": [f"{value:g}" for value in at]} if log_x and len(at) <= 10 else {}
    return Figure(key, title, caption, spec(data, 360, xaxis={**_axis(x, log_x), **ticks}, yaxis=_axis(y, log_y)))


def points(key: str, title: str, series: Series, x: str, y: str, *, rings: Series | None = None, equal: bool = False) -> Figure:
    """Plot points, one colour and symbol per series.

    Args:
        key: Identifier of the figure.
        title: Title of the figure.
        series: Legend entry to (x, y) pairs.
        x: Label of the x axis.
        y: Label of the y axis.
        rings: Series drawn as open circles.
        equal: True if both axes have the same scale.

    Returns:
        The figure.
    """
    data = [
        _trace(name, pairs, "markers", {"color": colour(index), "symbol": SYMBOLS[index % len(SYMBOLS)], "size": 9})
        for index, (name, pairs) in enumerate(series.items())
    ]
    ring = {"color": "@ink", "symbol": "circle-open", "size": 16}
    data += [_trace(name, pairs, "markers", ring) for name, pairs in (rings or {}).items()]
    more: dict[str, Any] = {"scaleanchor": "x"} if equal else {}
    short = {"tickformat": ".3~g", "nticks": 6}
    return Figure(key, title, spec=spec(data, 360, xaxis=axis(x, **short), yaxis=axis(y, **short, **more)))


def bars(key: str, title: str, series: Mapping[str, Mapping[str, float]], y: str) -> Figure:
    """Plot grouped bars.

    Args:
        key: Identifier of the figure.
        title: Title of the figure.
        series: Legend entry to heights by label; the first series orders the labels.
        y: Label of the y axis.

    Returns:
        The figure.
    """
    data = [
        {
            "type": "bar",
            "name": name,
            "x": list(heights),
            "y": list(heights.values()),
            "marker": {"color": colour(index)},
            "hovertemplate": f"{name}, %{{x}}: %{{y:.1f}}<extra></extra>",
        }
        for index, (name, heights) in enumerate(series.items())
    ]
    return Figure(key, title, spec=spec(data, 340, xaxis=axis("", type="category"), yaxis=axis(y), barmode="group"))


def slope(pairs: Sequence[tuple[float, float]]) -> float:
    """Fit the power law y = const * x^a by least squares of logarithms.

    Args:
        pairs: Positive (x, y) pairs.

    Returns:
        The exponent a.
    """
    x, y = ([math.log(pair[side]) for pair in pairs] for side in (0, 1))
    middle = sum(x) / len(x)
    return sum((a - middle) * b for a, b in zip(x, y, strict=True)) / sum((a - middle) ** 2 for a in x)


def _trace(name: str, pairs: Sequence[tuple[float, float]], mode: str, marker: dict[str, Any], **style: Any) -> dict[str, Any]:
    x, y = ([pair[side] for pair in pairs] for side in (0, 1))
    hover = f"{name}: %{{x:.4g}}, %{{y:.4g}}<extra></extra>"
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, **style, "marker": marker, "hovertemplate": hover}


def _axis(title: str, log: bool) -> dict[str, Any]:
    return axis(title, type="log", exponentformat="power") if log else axis(title)
