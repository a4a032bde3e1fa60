"""Legend of a figure: entries in rows above the plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpcfl_net.report.svg import marks, text
from dpcfl_net.report.svg.marks import Paint
from dpcfl_net.report.svg.text import element, words

ROW, SWATCH, APART = 20.0, 24.0, 16.0


class Legend:
    """Legend of a figure.

    Args:
        traces: Traces of the figure; a group of traces has one entry, and one trace alone has none.
        layout: Layout of the figure.
        width: Pixels.
    """

    def __init__(self, traces: Sequence[Mapping[str, Any]], layout: Mapping[str, Any], width: float) -> None:
        self._entries: list[tuple[str, Mapping[str, Any], list[int], float, float]] = []
        named = [(i, t) for i, t in enumerate(traces) if t.get("name") and t.get("showlegend", True) and t["type"] != "heatmap"]
        left, top, high = 0.0, 0.0, ROW
        for index, trace in named if len(named) > 1 and layout.get("showlegend", True) else ():
            label = text.wrapped(str(trace["name"]).replace("<br>", " "), width - SWATCH)
            rows = text.lines(label)
            group = trace.get("legendgroup")
            own = [
                i for i, other in enumerate(traces) if i == index or (group is not None and other.get("legendgroup") == group)
            ]
            need = SWATCH + max(map(text.width, rows))
            if left and left + need > width:
                left, top = 0.0, top + high
                high = ROW
            self._entries.append((label, trace, own, left, top))
            left, high = left + need + APART, max(high, ROW + text.LEADING * text.SIZE * (len(rows) - 1))
        self.height = top + high + 4 if self._entries else 0.0

    def draw(self, paint: Paint) -> list[str]:
        """Return a group per entry; `data-own` are its traces."""
        found = []
        for label, trace, own, left, top in self._entries:
            parts = [*_swatch(trace, left, top, paint), words(left + SWATCH, top + 14, label)]
            found.append(element("g", f'class="entry" fill="{paint("@ink")}" data-own="{json_list(own)}"', parts))
        return found


def json_list(numbers: Sequence[int]) -> str:
    """Format numbers as a JSON list."""
    return f"[{','.join(map(str, numbers))}]"


def _swatch(trace: Mapping[str, Any], left: float, top: float, paint: Paint) -> list[str]:
    marker, middle = trace.get("marker", {}), top + 10
    if trace["type"] == "bar":
        shade = marker.get("color", "@c0")
        return [
            element(
                "path", f'fill="{paint(shade[0] if isinstance(shade, list) else shade)}" d="{marks.box(left, top + 4, 14, 12)}"'
            )
        ]
    style = {**trace, "x": [0, 1] if "lines" in trace.get("mode", "lines") else [0.5], "type": "scatter"}
    end = left + 18
    found = []
    line = trace.get("line", {})
    shade = line.get("color", marker.get("color", "@ink"))
    if len(style["x"]) == 2:
        dash = f' stroke-dasharray="{marks.DASH[line["dash"]]}"' if line.get("dash") in marks.DASH else ""
        found.append(
            element(
                "path",
                f'd="M{left:.1f} {middle:.1f}H{end:.1f}" stroke="{paint(shade)}" stroke-width="{line.get("width", 2):g}"{dash}',
            )
        )
    if "markers" in trace.get("mode", "lines"):
        symbol, colour = marker.get("symbol", "circle"), paint(marker.get("color", shade))
        fill = f'fill="none" stroke="{colour}"' if symbol.endswith("-open") else f'fill="{colour}"'
        glyph = marks.glyph_of(symbol, min(5.0, marker.get("size", 6) / 2))
        found.append(element("path", f'transform="translate({left + 9:.1f} {middle:.1f})" d="{glyph}" {fill}'))
    return found
