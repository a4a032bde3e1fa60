"""Numbers as text: the same on pages and in the terminal."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context
from typing import Any

WRITTEN_OUT = 1e7  # larger numbers have an exponent


def number(value: Any) -> float | None:
    """Return a finite real number as float; None for anything else, since run files may hold null, NaN or damage."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:  # a whole number above every float
        return None
    return found if math.isfinite(found) else None


def counted(number: int, what: str, plural: str = "s") -> str:
    """Write a number with its noun: `1 round`, `1,200 rounds`; `plural` is added to the noun."""
    return f"{number:,} {what}{'' if number == 1 else plural}"


def plain(value: Any, digits: int = 4) -> str:
    """Format a number with `digits` significant digits: 5, 1.269, 0.0001, 12800; `not stated` if it is missing."""
    found = number(value)
    if found is None:
        return "not stated"
    text = f"{found:.{digits}g}"
    return f"{float(text):.0f}" if "e+" in text and abs(found) < WRITTEN_OUT else text


def at_most(value: Any, digits: int = 4) -> str:
    """Format an upper bound as `plain`, but rounded up: a promise must hold as it is printed."""
    found = number(value)
    return plain(value if found is None else float(Context(digits, ROUND_CEILING).create_decimal(repr(found))), digits)


def spent_of(epsilon: float | None, spent: float | None, counted_to: int | None, done: int) -> str:
    """Format epsilon spent of the promised one: `2.31 of 5`, `at most 5` before the first count, `inf` without a finite promise.

    Args:
        epsilon: Promised epsilon; None: it is not finite.
        spent: Epsilon spent so far; None: not counted yet.
        counted_to: Round that `spent` is counted to, named if later ones have ended; None: all of them.
        done: Rounds that have ended.
    """
    if epsilon is None:
        return "inf"
    if spent is None:
        return f"at most {at_most(epsilon)}"
    behind = f" after round {counted_to}" if counted_to is not None and counted_to < done else ""
    return f"{at_most(spent, 3)} of {at_most(epsilon)}{behind}"


def tiny(value: Any, digits: int = 4) -> str:
    """Format as `plain`; a number nearer to 0 than 1e-10 as `below 1e-10`."""
    found = number(value)
    return "below 1e-10" if found is not None and 0 < found < 1e-10 else plain(value, digits)


def percent(value: Any) -> str:
    """Format a share in [0, 1] as `71.2 %`; a dash if it is missing."""
    found = number(value)
    return "–" if found is None else f"{100 * found:.1f} %"


def yes(value: Any) -> str:
    """Format a Boolean as `yes` or `no`, a number as in `plain`; a dash if it is missing."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    found = number(value)
    return "–" if found is None else plain(found)


def size(value: Any) -> str:
    """Format a number of bytes in B, kB, MB or GB; a dash if it is missing."""
    found = number(value)
    if found is None:
        return "–"
    for unit in ("B", "kB", "MB"):
        if abs(found) < 1000:
            return f"{found:.0f} B" if unit == "B" else f"{found:.1f} {unit}"
        found /= 1000
    return f"{found:.2f} GB"


def duration(seconds: Any) -> str:
    """Format seconds as `4.1 s`, `3:07` or `1:02:45`; a dash if they are missing."""
    found = number(seconds)
    if found is None:
        return "–"
    if found < 60:
        return f"{max(found, 0):.1f} s"
    minutes, rest = divmod(round(found), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
