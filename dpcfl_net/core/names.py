"""Nearest known name for a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 64  # letters; longer words are not compared


def nearest(word: str, names: Iterable[str], most: int | None = None) -> str | None:
    """Find the known name nearest to a word; case and the difference between hyphen and underscore are ignored.

    Args:
        word: The mistyped word.
        names: Known names. Ties are broken by the longer common prefix, then by order.
        most: Largest allowed `distance`; None for a third of the word's length, at least 1. A name that shares no
            letter with the word is never near.

    Returns:
        The nearest name; None if none is near enough.
    """
    if not 0 < len(word) <= LONGEST:
        return None
    found = [(distance(_plain(word), _plain(name)), -_alike(word, name), name) for name in names]
    if not found:
        return None
    edits, _, name = min(found, key=lambda item: item[:2])
    most = max(1, len(word) // 3) if most is None else most
    return name if edits <= min(most, len(word) - 1) else None


def hint(word: str, names: Iterable[str]) -> str:
    """Return `; did you mean 'name'?`, or an empty string if no name is near."""
    found = nearest(word, names)
    return f"; did you mean {found!r}?" if found else ""


def distance(first: str, second: str) -> int:
    """Count edits between two words: insertions, deletions, substitutions and swaps of neighbours, 1 each.

    Source: optimal string alignment (Damerau 1964).
    """
    before: list[int] = []
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        earlier, before, row = before, row, [i]
        for j, other in enumerate(second, 1):
            edits = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other:
                edits = min(edits, earlier[j - 2] + 1)
            row.append(edits)
    return row[-1]


def _alike(first: str, second: str) -> int:
    """Length of the common prefix."""
    different = (k for k, (letter, other) in enumerate(zip(first, second, strict=False)) if letter != other)
    return next(different, min(len(first), len(second)))


def _plain(word: str) -> str:
    return word.lower().replace("_", "-")
