"""Text of a figure: estimated widths, numbers of axes, escaped markup."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence

SIZE = 12  # of the font in pixels
LEADING = 1.25  # times the size, from line to line
NARROW, WIDE, DIGITS = set(" .,:;|!'()[]ijlft"), set("mwMW@%"), set("0123456789")
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def width(text: str) -> float:
    """Estimate the width of a text in pixels: no browser measures it here. The shares are those of DejaVu Sans, a wide font."""
    return SIZE * sum(
        0.34 if c in NARROW else 0.95 if c in WIDE else 0.64 if c in DIGITS else 0.68 if c.isupper() else 0.58 for c in text
    )


def lines(text: str) -> list[str]:
    """Split a label of plotly at its line breaks and resolve its entities."""
    return [html.unescape(line) for line in text.split("<br>")]


def wrapped(label: str, room: float) -> str:
    """Break the lines of a label that are wider than `room` pixels, at spaces where there are any."""
    found: list[str] = []
    for line in lines(label):
        if width(line) <= room:
            found.append(line)
            continue
        found.append("")
        for word in re.findall(r"\S+\s*", line):
            if found[-1] and width((found[-1] + word).rstrip()) > room:
                found.append("")
            for letter in word:
                if found[-1] and width(found[-1] + letter.rstrip()) > room:
                    found.append("")
                found[-1] += letter
    return "<br>".join(line.rstrip() for line in found)


def escaped(text: str) -> str:
    """Escape a text for markup; characters that XML forbids become spaces."""
    return html.escape("".join(c if c.isprintable() else " " for c in text))


def label(value: float, step: float) -> str:
    """Format the number of a tick with the digits that its distance to the next one needs."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.3g}"
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def formatted(value: float, tickformat: str) -> str:
    """Format the number of a tick in one of the formats of figures: `.0%`, `.3~g`."""
    if found := re.fullmatch(r"\.(\d)~?([%gf])", tickformat):
        return f"{value:.{found[1]}{found[2]}}"
    raise ValueError(f"tickformat is {tickformat!r}: must be like .0%, .3~g or .1f")


def power(exponent: int) -> str:
    """Format a power of ten: 0.01, 100, 10⁻⁵."""
    return f"{10.0**exponent:g}" if -3 <= exponent <= 3 else f"10{str(exponent).translate(SUPERSCRIPT)}"


def element(name: str, attributes: str, content: Sequence[str] = ()) -> str:
    """Write an element."""
    return f"<{name} {attributes}>{''.join(content)}</{name}>" if content else f"<{name} {attributes}/>"


def words(x: float, y: float, text: str, *, anchor: str = "start", size: float = SIZE, fill: str = "", more: str = "") -> str:
    """Write text in one or more lines, the first with its baseline at y."""
    rows = lines(text)
    paint = f' fill="{fill}"' if fill else ""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}"{paint}{more}'
    if len(rows) == 1:
        return f"<text {place}>{escaped(rows[0])}</text>"
    spans = [
        f'<tspan x="{x:.1f}" dy="{0 if i == 0 else LEADING * size:.1f}">{escaped(row)}</tspan>' for i, row in enumerate(rows)
    ]
    return f"<text {place}>{''.join(spans)}</text>"
