"""Restarts after crashes: delays, and for coordinator, observer, relay and aggregators also how many and when."""

from __future__ import annotations

import time
from collections import Counter

# A role that crashed starts again after RESTART_S seconds, then after twice as long each time, at most MOST_RESTART_S.
RESTART_S, MOST_RESTART_S = 0.2, 10.0


def delay_s(earlier: int) -> float:
    """Return the seconds before a restart.

    Args:
        earlier: Delayed restarts before this one.
    """
    return min(RESTART_S * 2**earlier, MOST_RESTART_S)


class Restarts:
    """Counts the restarts of each role, and delays them.

    Args:
        most: Restarts of one role.

    Attributes:
        most: Restarts of one role.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._counts: Counter[str] = Counter()
        self._due: dict[str, float] = {}

    @property
    def scheduled(self) -> set[str]:
        """Roles that will start again."""
        return set(self._due)

    def schedule(self, title: str) -> int | None:
        """Schedule the restart of a role that crashed.

        Args:
            title: Name of the process.

        Returns:
            Number of this restart, from 1; None if the role has used up its restarts.
        """
        count = self._counts[title]
        if count >= self.most:
            return None
        self._counts[title] += 1
        self._due[title] = time.monotonic() + delay_s(count)
        return count + 1

    def due(self) -> list[str]:
        """Return the roles whose time has come."""
        return [title for title, due in self._due.items() if due <= time.monotonic()]

    def begin(self, title: str) -> None:
        """Remove a role from those that will start again: it starts now.

        Args:
            title: Name of the process.
        """
        del self._due[title]
