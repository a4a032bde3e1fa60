"""Ascending numbers as spans."""

from __future__ import annotations

from collections.abc import Sequence


def spans(numbers: Sequence[int]) -> list[str]:
    """Format ascending numbers as spans: 0-3 and 7 for 0, 1, 2, 3, 7."""
    found: list[list[int]] = []
    for one in numbers:
        if found and one == found[-1][1] + 1:
            found[-1][1] = one
        else:
            found.append([one, one])
    return [str(first) if first == last else f"{first}-{last}" for first, last in found]
