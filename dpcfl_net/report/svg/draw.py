"""A figure as one SVG element of a given width."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpcfl_net.report.svg import marks, text
from dpcfl_net.report.svg.axes import Axis
from dpcfl_net.report.svg.bars import Bar, place_bars
from dpcfl_net.report.svg.legend import Legend
from dpcfl_net.report.svg.marks import Paint
from dpcfl_net.report.svg.text import element, words

COLOUR = re.compile(r"#[0-9a-fA-F]{3,8}|[a-z]+|rgba?\([\d., ]+\)")
FONT = 'font-family="system-ui, sans-serif"'


def by_theme(value: Any) -> str:
    """Return a colour for a page: names such as `@c0` become the style sheet's variables.

    Raises:
        ValueError: If it is not a colour.
    """
    if isinstance(value, str) and re.fullmatch(r"@[a-z]+\d?", value):
        return f"var(--{value[1:]})"
    if isinstance(value, str) and COLOUR.fullmatch(value):
        return value
    raise ValueError(f"colour is {str(value)[:40]!r}: must be a name such as @c0, #rrggbb, rgb(...) or a word")


def draw(
    spec: Mapping[str, Any], width: float, paint: Paint = by_theme, *, name: str = "", title: str = "", background: str = ""
) -> str:
    """Draw a figure.

    Args:
        spec: {data, layout, height}, as `report.figures.spec` builds it; with `aspect` the height follows the width.
        width: Pixels.
        paint: Returns the colour to write for a colour of the figure.
        name: Start of ids in the element, unique on its page; empty for a drawing outside a page.
        title: Words for those who cannot see it.
        background: Colour behind the figure; empty: none.

    Returns:
        The element. Every point and bar has `data-i`, its number in its trace, in a group with `data-t`, the number of the trace.

    Raises:
        ValueError, KeyError, TypeError: If the figure is malformed.
    """
    return Drawing(spec, width, paint, name).svg(title, background)


def check(spec: Mapping[str, Any]) -> str:
    """Describe what is wrong with a figure from a file; empty if it can be drawn."""
    try:
        draw(spec, 600)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


class Drawing:
    """One figure on its canvas.

    Args:
        spec: As `draw`.
        width: As `draw`.
        paint: As `draw`.
        name: As `draw`.
    """

    def __init__(self, spec: Mapping[str, Any], width: float, paint: Paint, name: str) -> None:
        self.layout, self.traces, self.paint, self.width, self.name = spec["layout"], spec["data"], paint, width, name
        self.legend = Legend(self.traces, self.layout, width)
        self.axes = {key: Axis(key, self._settings(key)) for key in self._names()}
        for axis in self.axes.values():
            self._categories(axis)
        self.bars = {pair: self._bars(*pair) for pair in dict.fromkeys(map(_pair, self.traces))}
        for axis in self.axes.values():
            self._fit(axis)
        self.height = self._place(spec)
        if anchor := self.layout.get("yaxis", {}).get("scaleanchor"):
            self._equal(self.axes[anchor], self.axes["y"])

    def svg(self, title: str, background: str) -> str:
        """Return the element."""
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}"'
        clip = f"{self.name}-clip"
        plot = text.element("rect", 'x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"'.format(*self._plot()))
        return element(
            "svg",
            f'xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{text.escaped(title)}" {size} {FONT} {self._data_axes()}',
            [
                element("rect", f'width="100%" height="100%" fill="{self.paint(background)}"') if background else "",
                element("defs", "", [element("clipPath", f'id="{clip}"', [plot])]),
                *self.legend.draw(self.paint),
                *self._grid(),
                element("g", f'clip-path="url(#{clip})"', [element("g", 'class="marks"', self._marks())]),
                *self._notes(),
            ],
        )

    def _names(self) -> list[str]:
        used = [key for trace in self.traces for key in _pair(trace)]
        return list(dict.fromkeys(["x", "y", *used]))

    def _settings(self, key: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.layout.get(f"{key[0]}axis{key[1:]}", {})
        return found

    def _categories(self, axis: Axis) -> None:
        side, settings = axis.name[0], axis.layout
        values = [value for trace in self.traces if axis.name in _pair(trace) for value in trace.get(side, ())]
        if settings.get("type") == "category" or "categoryarray" in settings or any(isinstance(value, str) for value in values):
            axis.index([str(label) for label in settings.get("categoryarray", ())] + [str(value) for value in values])
        numbers = [value for value in values if isinstance(value, int | float)]
        axis.whole = side == "x" and bool(numbers) and all(value == int(value) for value in numbers)

    def _bars(self, x: str, y: str) -> dict[int, list[Bar]]:
        own = [trace if _pair(trace) == (x, y) else {"type": "other"} for trace in self.traces]
        return place_bars(own, self.layout, self.axes[x], self.axes[y])

    def _fit(self, axis: Axis) -> None:
        side, padded, found = axis.name[0], False, []
        for index, trace in enumerate(self.traces):
            if axis.name not in _pair(trace):
                continue
            if trace["type"] == "scatter":
                found += [(c, c) for value in trace.get(side, ()) if (c := axis.coordinate(value)) is not None]
                padded = padded or side == "y" or "markers" in trace.get("mode", "lines")
            elif trace["type"] == "bar":
                valued = (trace.get("orientation") == "h") == (side == "x")
                bars = self.bars[_pair(trace)][index]
                found += [
                    (bar.base, bar.top) if valued else (bar.place - bar.half * 1.2, bar.place + bar.half * 1.2) for bar in bars
                ]
                if valued and side == "y":
                    padded, highest = True, max((top for _, top in found), default=0.0)
                    if trace.get("text") is not None:  # above the bars
                        found.append((highest, highest * 1.1))
            elif trace["type"] == "heatmap":
                edges = marks.cell_edges(trace["x"]) if side == "x" else [-0.5, len(trace["z"]) - 0.5]
                found.append((edges[0], edges[-1]))
            elif trace["type"] != "image":
                raise ValueError(f"type is {trace['type']!r}: must be scatter, bar, heatmap or image")
        axis.fit(found, padded=padded)

    def _place(self, spec: Mapping[str, Any]) -> float:
        """Set the pixels of the axes and return the height of the figure."""
        bare = all(not axis.shown for axis in self.axes.values())
        titles = {side: bool(self._settings(side).get("title", {}).get("text")) for side in "xy"}
        self.bottom = 0.0 if bare else 24.0 + 18.0 * titles["x"]
        self.top = self.legend.height + (0.0 if bare else 10.0) + self.layout.get("margin", {}).get("t", 0)
        most = 0.45 * self.width
        height = self.width / spec["aspect"] if "aspect" in spec else spec["height"] + max(0.0, self.legend.height - 24)
        height += sum(axis.wrap(most) for axis in self.axes.values() if axis.name[0] == "y" and axis.shown)
        self._down(self.top, height - self.bottom)
        labels = [
            line
            for axis in self.axes.values()
            if axis.name[0] == "y" and axis.shown
            for _, t in axis.ticks()
            for line in text.lines(t)
        ]
        self.left = 0.0 if bare else 4 + min(most, max(map(text.width, labels), default=0)) + 6 + 18 * titles["y"]
        self.right = self.width - (0.0 if bare else 14.0)
        for axis in self.axes.values():
            if axis.name[0] == "x":
                low, high = axis.layout.get("domain", (0, 1))
                ends = [self.left + share * (self.right - self.left) for share in (low, high)]
                axis.start, axis.end = ends[::-1] if axis.reversed and axis.low < axis.high else ends
        return round(height, 1)

    def _down(self, top: float, bottom: float) -> None:
        for axis in self.axes.values():
            if axis.name[0] == "y":
                low, high = axis.layout.get("domain", (0, 1))
                ends = [bottom - share * (bottom - top) for share in (low, high)]
                upside = axis.reversed
                if axis.low > axis.high:  # an image: its first row on top
                    axis.low, axis.high = axis.high, axis.low
                axis.start, axis.end = ends[::-1] if upside else ends

    def _equal(self, x: Axis, y: Axis) -> None:
        """Enlarge one range so that a unit has as many pixels on both axes."""
        scale = min(abs(axis.end - axis.start) / (axis.high - axis.low) for axis in (x, y))
        for axis in (x, y):
            middle, half = (axis.low + axis.high) / 2, abs(axis.end - axis.start) / scale / 2
            axis.low, axis.high = middle - half, middle + half

    def _plot(self) -> tuple[float, float, float, float]:
        bottom = self.height - self.bottom
        return self.left, self.top, self.right - self.left, bottom - self.top

    def _grid(self) -> Iterable[str]:
        left, top, wide, tall = self._plot()
        for axis in self.axes.values():
            if not axis.shown:
                continue
            side, ticks, grid = axis.name[0], axis.ticks(), axis.layout.get("showgrid", True) and axis.categories is None
            at = [axis.pixel(c) for c, _ in ticks]
            if side == "x":
                rules = "".join(f"M{p:.1f} {top:.1f}v{tall:.1f}" for p in at)
                labels = [words(p, top + tall + 16, label, anchor="middle") for p, (_, label) in zip(at, ticks, strict=True)]
            else:
                rules = "".join(f"M{left:.1f} {p:.1f}h{wide:.1f}" for p in at)
                labels = [
                    words(left - 6, p + 4 - text.LEADING * text.SIZE / 2 * (len(text.lines(label)) - 1), label, anchor="end")
                    for p, (_, label) in zip(at, ticks, strict=True)
                ]
            line = (
                [element("path", f'class="rules" d="{rules}" stroke="{self.paint("@grid")}" fill="none"')]
                if grid and rules
                else []
            )
            yield element("g", f'class="ticks {side}" fill="{self.paint("@muted")}"', [*line, *labels]) if ticks else ""
            yield self._title(axis)
        yield (
            element("path", f'd="M{left:.1f} {top + tall:.1f}h{wide:.1f}" stroke="{self.paint("@grid")}"')
            if self.bottom
            else ""
        )

    def _title(self, axis: Axis) -> str:
        title = axis.layout.get("title", {}).get("text")
        if not title:
            return ""
        if axis.name[0] == "x":
            return words((axis.start + axis.end) / 2, self.height - 4, title, anchor="middle", fill=self.paint("@ink"))
        middle = (axis.start + axis.end) / 2
        turn = f' transform="rotate(-90 12 {middle:.1f})"'
        return words(12, middle, title, anchor="middle", fill=self.paint("@ink"), more=turn)

    def _marks(self) -> list[str]:
        found = [self._circle(shape) for shape in self.layout.get("shapes", ())]
        for index, trace in enumerate(self.traces):
            x, y = (self.axes[key] for key in _pair(trace))
            if trace["type"] == "scatter":
                drawn = marks.scatter(trace, x, y, self.paint)
            elif trace["type"] == "bar":
                drawn = marks.bars(trace, self.bars[_pair(trace)][index], x, y, self.paint)
            elif trace["type"] == "heatmap":
                drawn = marks.heat_map(trace, x, y, self.paint)
            else:
                drawn = marks.image(trace, x, y)
            found.append(element("g", f'data-t="{index}"', drawn) if drawn else "")
        return found

    def _circle(self, shape: Mapping[str, Any]) -> str:
        (left, right), (bottom, top) = (sorted(self.axes[side].at(shape[f"{side}{k}"]) or 0.0 for k in (0, 1)) for side in "xy")
        style = f'fill="none" stroke="{self.paint(shape["line"]["color"])}" stroke-opacity="{shape.get("opacity", 1):g}" stroke-width="1.5"'
        place = f'cx="{(left + right) / 2:.1f}" cy="{(bottom + top) / 2:.1f}" rx="{(right - left) / 2:.1f}" ry="{(top - bottom) / 2:.1f}"'
        return element("ellipse", f"{place} {style}")

    def _notes(self) -> Sequence[str]:
        anchors = {"left": "start", "center": "middle", "right": "end"}
        notes = self.layout.get("annotations", ())
        shrink = min(1.0, self.width / 480)
        return [
            words(
                self.axes["x"].at(note["x"]) or 0.0,
                (self.axes["y"].at(note["y"]) or 0.0) + (12 * shrink if note.get("yanchor") == "top" else -3),
                note["text"],
                anchor=anchors[note.get("xanchor", "center")],
                size=note.get("font", {}).get("size", text.SIZE) * shrink,
                fill=self.paint("@ink"),
            )
            for note in notes
        ]

    def _data_axes(self) -> str:
        """Scales for the script of the page, if the figure has one pair of axes."""
        if not self.name or len(self.axes) != 2 or any(not axis.shown for axis in self.axes.values()):
            return ""
        found = {}
        for side, axis in self.axes.items():
            ticks = axis.ticks() if axis.categories is not None or "tickvals" in axis.layout else None
            found[side] = {
                "low": axis.low, "high": axis.high, "start": round(axis.start, 1), "end": round(axis.end, 1), "log": axis.log, "whole": axis.whole,
                "categories": axis.categories, "ticks": ticks,
            }  # fmt: skip
        return f'data-axes="{text.escaped(json.dumps(found))}"'


def _pair(trace: Mapping[str, Any]) -> tuple[str, str]:
    return trace.get("xaxis", "x"), trace.get("yaxis", "y")
