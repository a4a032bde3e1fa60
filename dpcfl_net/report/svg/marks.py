"""Marks of a figure as SVG paths: lines, points, bars, cells, images."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpcfl_net.report.svg.axes import Axis
from dpcfl_net.report.svg.bars import Bar
from dpcfl_net.report.svg.text import element, words

Trace = Mapping[str, Any]
Paint = Callable[[Any], str]
DASH = {"dash": "7 4", "dashdot": "7 3 2 3", "longdash": "12 4", "dot": "2 3"}
LEVELS = 16  # of a colour gradient
IMAGE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]+")


def scatter(trace: Trace, x: Axis, y: Axis, paint: Paint) -> list[str]:
    """Draw a line, points, or both."""
    line, marker = trace.get("line", {}), trace.get("marker", {})
    at = [(x.at(a), y.at(b)) for a, b in zip(trace.get("x", []), trace.get("y", []), strict=True)]
    mode = trace.get("mode", "lines")
    shade = line.get("color", marker.get("color", "@ink"))
    found = []
    if trace.get("fill") == "toself":
        path = _path(at) + "Z" if at else ""
        return [element("path", f'd="{path}" fill="{paint(trace["fillcolor"])}" fill-opacity="{trace.get("opacity", 1):g}"')]
    if "lines" in mode:
        dash = f' stroke-dasharray="{DASH[line["dash"]]}"' if line.get("dash", "solid") in DASH else ""
        style = f'fill="none" stroke="{paint(shade)}" stroke-width="{line.get("width", 2):g}" stroke-linejoin="round"{dash}'
        found.append(element("path", f'd="{_path(at)}" {style}'))
    if "markers" in mode:
        found += _points(at, marker, marker.get("color", shade), paint)
    return found


def _points(at: Sequence[tuple[float | None, float | None]], marker: Mapping[str, Any], shade: Any, paint: Paint) -> list[str]:
    radius, edge = marker.get("size", 6) / 2, marker.get("line", {})
    opacity = f' fill-opacity="{marker["opacity"]:g}"' if "opacity" in marker else ""
    outline = f' stroke="{paint(edge["color"])}" stroke-width="{edge.get("width", 1):g}"' if "color" in edge else ""
    symbol = marker.get("symbol", "circle")
    hollow = symbol.endswith("-open")
    style = f'fill="none" stroke="{paint(shade)}" stroke-width="1.5"' if hollow else f'fill="{paint(shade)}"{opacity}{outline}'
    glyph = glyph_of(symbol, radius)
    return [
        element("path", f'data-i="{i}" transform="translate({a:.1f} {b:.1f})" d="{glyph}" {style}')
        for i, (a, b) in enumerate(at)
        if a is not None and b is not None
    ]


def glyph_of(symbol: str, r: float) -> str:
    """Return the outline of a symbol around the origin."""
    name = symbol.removesuffix("-open")
    if name == "circle":
        return f"M{-r:.2g} 0a{r:.2g} {r:.2g} 0 1 0 {2 * r:.2g} 0a{r:.2g} {r:.2g} 0 1 0 {-2 * r:.2g} 0z"
    if name == "square":
        side = 0.88 * r
        return f"M{-side:.2g} {-side:.2g}h{2 * side:.2g}v{2 * side:.2g}h{-2 * side:.2g}z"
    if name == "line-ns":
        return f"M-1.5 {-r:.2g}h3v{2 * r:.2g}h-3z"
    if name == "cross":
        a, b = 0.37 * r, r
        return "M" + "L".join(f"{p:.2g} {q:.2g}" for p, q in _cross(a, b)) + "z"
    corners = {"diamond": 4, "triangle-up": 3, "triangle-down": 3, "hexagon": 6, "star": 10}
    if name not in corners:
        raise ValueError(f"marker.symbol is {symbol!r}: must be circle, square, line-ns, cross or one of {', '.join(corners)}")
    count, turn = corners[name], (math.pi / 2 if name == "triangle-down" else -math.pi / 2)
    edge = [1.15 * r * (0.45 if name == "star" and k % 2 else 1) for k in range(count)]
    ends = [
        (e * math.cos(turn + 2 * math.pi * k / count), e * math.sin(turn + 2 * math.pi * k / count)) for k, e in enumerate(edge)
    ]
    return "M" + "L".join(f"{p:.2f} {q:.2f}" for p, q in ends) + "z"


def _cross(a: float, b: float) -> list[tuple[float, float]]:
    return [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)]


def _path(points: Sequence[tuple[float | None, float | None]]) -> str:
    """A line through the points, broken where one is missing."""
    found, pen = [], "M"
    for x, y in points:
        if x is None or y is None:
            pen = "M"
            continue
        found.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L"
    return "".join(found)


def bars(trace: Trace, own: Sequence[Bar], x: Axis, y: Axis, paint: Paint) -> list[str]:
    """Draw the bars of a trace and their texts."""
    lying, colours = trace.get("orientation") == "h", trace.get("marker", {}).get("color", "@c0")
    place, value = (y, x) if lying else (x, y)
    found = []
    for bar in own:
        a, b = sorted((place.pixel(bar.place - bar.half), place.pixel(bar.place + bar.half)))
        low, high = sorted((value.pixel(bar.base), value.pixel(bar.top)))
        left, top, wide, tall = (low, a, high - low, b - a) if lying else (a, low, b - a, high - low)
        shade = paint(colours[bar.index] if isinstance(colours, list) else colours)
        found.append(element("path", f'data-i="{bar.index}" fill="{shade}" d="{box(left, top, wide, tall)}"'))
        if (texts := trace.get("text")) is not None:
            where = trace.get("textposition", "auto")
            inside = (where[bar.index] if isinstance(where, list) else where) == "inside"
            if lying:
                spot, anchor = (left + 6 if inside else left + wide + 5, top + tall / 2 + 4), "start"
            else:
                spot, anchor = (left + wide / 2, top + 14 if inside else top - 5), "middle"
            fill = paint("@surface" if inside else "@ink")
            found.append(words(*spot, str(texts[bar.index]), anchor=anchor, fill=fill, more=' data-text=""'))
    return found


def box(left: float, top: float, wide: float, tall: float) -> str:
    """Return the outline of a rectangle."""
    return f"M{left:.1f} {top:.1f}h{wide:.1f}v{tall:.1f}h{-wide:.1f}z"


def heat_map(trace: Trace, x: Axis, y: Axis, paint: Paint) -> list[str]:
    """Draw cells: neighbours of one colour in a row as one rectangle, all rectangles of a colour as one path."""
    cells: defaultdict[tuple[str, float], list[str]] = defaultdict(list)
    edges, between = limits(trace), cell_edges(trace["x"])
    for row, values in enumerate(trace["z"]):
        top, bottom = sorted((y.pixel(row - 0.5), y.pixel(row + 0.5)))
        shades = [_shade(trace, value, edges) for value in values]
        first = 0
        for k in range(1, len(shades) + 1):
            if k < len(shades) and shades[k] == shades[first]:
                continue
            if (shade := shades[first]) is not None:
                left, right = x.pixel(between[first]), x.pixel(between[k])
                cells[shade].append(box(left, top + 0.5, right - left, bottom - top - 1))
            first = k
    return [
        element("path", f'fill="{paint(shade)}" fill-opacity="{opacity:g}" d="{"".join(paths)}"')
        for (shade, opacity), paths in cells.items()
    ]


def cell_edges(places: Sequence[float]) -> list[float]:
    """Return the edges of a heat map's columns: halfway between neighbours, so that no gap is left at a round without values.

    Args:
        places: Places of the columns, ascending, at least one.
    """
    inner = [(a + b) / 2 for a, b in itertools.pairwise(places)]
    first, last = (inner[0], inner[-1]) if inner else (places[0] + 0.5, places[-1] - 0.5)
    return [2 * places[0] - first, *inner, 2 * places[-1] - last]


def limits(trace: Trace) -> tuple[float, float]:
    """Return the values at the ends of a heat map's colours."""
    values = [value for row in trace["z"] for value in row if value is not None] or [0]
    return trace.get("zmin", min(values)), trace.get("zmax", max(values))


def _shade(trace: Trace, value: float | None, edges: tuple[float, float]) -> tuple[str, float] | None:
    """Colour and opacity of a cell."""
    if value is None:
        return None
    share, scale = (value - edges[0]) / (edges[1] - edges[0]) if edges[1] > edges[0] else 1.0, trace["colorscale"]
    for (low, shade), (high, other) in itertools.pairwise(scale):
        if low <= share <= high and shade == other:
            return str(shade), 1.0
    return str(scale[-1][1]), round(0.06 + 0.94 * round(share * LEVELS) / LEVELS, 3)


def image(trace: Trace, x: Axis, y: Axis) -> list[str]:
    """Draw a PNG over the whole range of the axes."""
    if not IMAGE.fullmatch(trace["source"]):
        raise ValueError("source of an image must be a PNG as a data URI")
    left, right = sorted((x.start, x.end))
    top, bottom = sorted((y.start, y.end))
    place = (
        f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" style="image-rendering:pixelated"'
    )
    return [element("image", f'{place} preserveAspectRatio="none" href="{trace["source"]}"')]
