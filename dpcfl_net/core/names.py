"""The nearest right name for a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 64  # a longer word is no mistyped name


def nearest(word: str, names: Iterable[str], most: int | None = None) -> str | None:
    """The name that was probably meant.

    Args:
        word: What was written.
        names: Right names; of equally near ones the one that begins alike the longest counts, then the first.
        most: Largest `distance`; a third of the word's length, at least 1, if it is not given.

    Returns:
        The nearest name, or None if none is near. Case, and the difference between a hyphen and an underscore, do not count.
    """
    if not 0 < len(word) <= LONGEST:
        return None
    found = [(distance(_plain(word), _plain(name)), -_alike(word, name), name) for name in names]
    if not found:
        return None
    least, _, name = min(found, key=lambda item: item[:2])
    return name if least <= (max(1, len(word) // 3) if most is None else most) else None


def hint(word: str, names: Iterable[str]) -> str:
    """`; did you mean 'name'?`, or nothing where no name is near."""
    found = nearest(word, names)
    return f"; did you mean {found!r}?" if found else ""


def distance(first: str, second: str) -> int:
    """Edits from one word to the other: insertions, deletions, substitutions, and swaps of two neighbours, 1 each.

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
    """How many letters the words begin with alike."""
    different = (k for k, (letter, other) in enumerate(zip(first, second, strict=False)) if letter != other)
    return next(different, min(len(first), len(second)))


def _plain(word: str) -> str:
    return word.lower().replace("_", "-")
