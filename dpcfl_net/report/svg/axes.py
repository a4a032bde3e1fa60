"""Axes of a figure: range, scale to pixels, ticks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpcfl_net.report.svg import text

PAD = 0.05  # of the range, beside points and lines
APART = {"x": 62.0, "y": 38.0}  # pixels between ticks, about


@dataclass
class Axis:
    """One axis.

    Attributes:
        name: `x`, `y`, `x2`, ... as traces name it.
        layout: Plotly's settings of the axis.
        categories: Labels of a category axis; None for numbers.
        low: Least coordinate: a value, its logarithm to base 10, or the index of a category.
        high: Largest coordinate.
        start: Pixel of `low`.
        end: Pixel of `high`.
        whole: True if all its numbers are whole, so that ticks are too.
        room: Pixels for the label of a category; longer ones have several lines.
    """

    name: str
    layout: Mapping[str, Any]
    categories: list[str] | None = None
    low: float = 0.0
    high: float = 1.0
    start: float = 0.0
    end: float = 1.0
    whole: bool = False
    room: float = math.inf
    _index: dict[str, int] = field(default_factory=dict)

    @property
    def log(self) -> bool:
        return self.layout.get("type") == "log"

    @property
    def shown(self) -> bool:
        return bool(self.layout.get("showticklabels", True))

    def coordinate(self, value: Any) -> float | None:
        """Return the coordinate of a value; None if it has none, as a missing value or the logarithm of 0."""
        if self.categories is not None:
            return self._index.get(str(value))
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        if self.log:
            return math.log10(value) if value > 0 else None
        return float(value)

    def pixel(self, coordinate: float) -> float:
        """Return the pixel of a coordinate."""
        return self.start + (coordinate - self.low) / (self.high - self.low) * (self.end - self.start)

    def at(self, value: Any) -> float | None:
        """Return the pixel of a value."""
        found = self.coordinate(value)
        return None if found is None else self.pixel(found)

    def ticks(self) -> list[tuple[float, str]]:
        """Return (coordinate, label) of the ticks within the range, thinned out until labels have room."""
        room = abs(self.end - self.start)
        found = [(c, label) for c, label in self._all_ticks(room) if self.low - 1e-9 <= c <= self.high + 1e-9]
        side = self.name[0]
        widest = max((text.width(line) for _, label in found for line in text.lines(label)), default=0)
        highest = max((len(text.lines(label)) for _, label in found), default=1)
        need = widest + 10 if side == "x" else 14.0 * highest
        apart = min((abs(self.pixel(b[0]) - self.pixel(a[0])) for a, b in itertools.pairwise(found)), default=need)
        every = max(1, math.ceil(need / apart)) if apart > 0 else 1
        return found[::every]

    def _all_ticks(self, room: float) -> list[tuple[float, str]]:
        values, style = self.layout.get("tickvals"), self.layout.get("tickformat")
        if values is not None:
            usual = [
                text.formatted(value, style) if style else f"{value:g}" if isinstance(value, float) else str(value)
                for value in values
            ]
            pairs = zip(map(self.coordinate, values), self.layout.get("ticktext") or usual, strict=True)
            return sorted((c, str(label)) for c, label in pairs if c is not None)
        if self.categories is not None:
            return [(float(index), text.wrapped(label, self.room)) for index, label in enumerate(self.categories)]
        if self.log:
            return self._powers()
        count = self.layout.get("nticks") or max(2, round(room / APART[self.name[0]]))
        least = 1.0 if self.whole or "dtick" in self.layout else 0.0
        for many in (count, 2 * count, 4 * count):  # a step that is rounded up may leave one tick, which gives no scale
            step = max(least, nice((self.high - self.low) / many))
            at = [step * k for k in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]
            if len(at) > 1:
                break
        return [(c, text.formatted(c, style) if style else text.label(c, step)) for c in at]

    def _powers(self) -> list[tuple[float, str]]:
        exponents = range(math.floor(self.low), math.ceil(self.high) + 1)
        if self.high - self.low >= 2:
            return [(float(k), text.power(k)) for k in exponents]
        return [(math.log10(m * 10.0**k), f"{m * 10.0**k:.3g}") for k in exponents for m in (1, 2, 5)]

    def wrap(self, room: float) -> float:
        """Limit the labels of categories to some pixels, and return the pixels of height that their further lines need."""
        labels = self.categories or ()
        self.room = room
        further = [len(text.lines(text.wrapped(label, room))) - len(text.lines(label)) for label in labels]
        return text.LEADING * text.SIZE * max(further, default=0) * len(labels)

    def fit(self, extents: Iterable[tuple[float, float]], *, padded: bool) -> None:
        """Choose the range: the layout's, or one that holds the given coordinates."""
        if self.categories is not None:
            self.low, self.high = -0.5, len(self.categories) - 0.5
        else:
            edges = [edge for pair in extents for edge in pair] or [0.0, 1.0]
            self.low, self.high = min(edges), max(edges)
            margin = PAD * (self.high - self.low) if padded else 0.0
            zero = self.layout.get("rangemode") == "tozero" and not self.log
            grounded = zero and self.low >= 0
            self.low, self.high = (0.0 if grounded else self.low - margin), self.high + margin
        given = self.layout.get("range")
        if given is not None:
            self.low, self.high = float(given[0]), float(given[1])
        if self.high == self.low:
            self.low, self.high = self.low - 0.5, self.high + 0.5

    @property
    def reversed(self) -> bool:
        return self.layout.get("autorange") == "reversed" or self.low > self.high

    def index(self, labels: Sequence[str]) -> None:
        """Make it a category axis with these labels, in order."""
        self.categories = list(dict.fromkeys(labels))
        self._index = {name: at for at, name in enumerate(self.categories)}


def nice(step: float) -> float:
    """Round a step up to 1, 2 or 5 times a power of ten."""
    if not step > 0 or not math.isfinite(step):
        return 1.0
    base = 10.0 ** math.floor(math.log10(step))
    return next(factor * base for factor in (1, 2, 5, 10) if factor * base >= step * (1 - 1e-9))
