"""Deadlines of many keys, of which a look costs only those that have passed."""

from __future__ import annotations

import heapq
import math

SPARE = 64  # replaced deadlines that are kept in any case


class Timers:
    """At most one deadline per key, on the clock of the caller."""

    def __init__(self) -> None:
        self._due: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def set(self, key: int, due: float) -> None:
        """Set the deadline of a key in place of its last one."""
        self._due[key] = due
        if len(self._heap) > SPARE + 2 * len(self._due):  # mostly deadlines that were replaced: a peer may cause any number
            self._heap = [(due, key) for key, due in self._due.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (due, key))

    def drop(self, key: int) -> None:
        """Remove the deadline of a key."""
        self._due.pop(key, None)

    def expired(self, now: float) -> list[int]:
        """Remove and return the keys whose deadline has passed, earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            due, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:  # otherwise it was set again or dropped
                del self._due[key]
                found.append(key)
        return found

    @property
    def next(self) -> float:
        """Earliest time at which a deadline may have passed; inf without deadlines."""
        return self._heap[0][0] if self._heap else math.inf
