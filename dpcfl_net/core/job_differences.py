"""Differences between two jobs, field by field, and client by client in their rosters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from dpcfl_net.core.frozen import FrozenModel
from dpcfl_net.core.protocol import Protocol

SHOWN = 20  # clients that a comparison of two jobs names


def differences(mine: FrozenModel, theirs: FrozenModel) -> list[str]:
    """List the fields in which two parts of jobs differ.

    Args:
        mine: One part.
        theirs: The other part, of the same kind.

    Returns:
        One line for each field, and for each of the first SHOWN clients in which the rosters of two protocols differ.
    """
    found: list[str] = []

    def walk(path: str, a: Any, b: Any) -> None:
        if isinstance(a, dict) and isinstance(b, dict):
            for key in sorted({*a, *b}):
                walk(f"{path}.{key}" if path else key, a.get(key), b.get(key))
        elif a != b:
            found.append(f"{path}: {a!r} here, {b!r} there")

    documents = [part.model_dump(mode="json") for part in (mine, theirs)]
    if not (isinstance(mine, Protocol) and isinstance(theirs, Protocol)):
        walk("", *documents)
        return found
    rosters = [document.pop("roster") for document in documents]
    walk("", *documents)
    return [*found, *(_different_clients(mine, theirs) if rosters[0] != rosters[1] else ())]


def _different_clients(mine: Protocol, theirs: Protocol) -> Iterator[str]:
    """Describe how two rosters differ: their numbers of clients, and the first SHOWN clients that differ."""
    counts = len(mine.roster), len(theirs.roster)
    if counts[0] != counts[1]:
        yield f"roster: {counts[0]} clients here, {counts[1]} there"
    both = zip(mine.roster, theirs.roster, strict=False)
    different = ((a.model_dump(), b.model_dump()) for a, b in both if a != b)
    for a, b in islice(different, SHOWN):
        fields = [f"{key} {a.get(key)!r} here, {b.get(key)!r} there" for key in sorted({*a, *b}) if a.get(key) != b.get(key)]
        yield f"roster: client {a['id']}: {'; '.join(fields)}"
    if more := sum(1 for _ in different):
        yield f"roster: {more} more clients differ"
