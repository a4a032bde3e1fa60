"""A clock that stands still while its process does: timeouts are about others, not about a pause of one's own."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_STEP_S = 5.0


class AwakeClock:
    """Monotonic seconds without the gaps in which this process did not run: it was stopped, or its host asleep.

    For loops that ask at least every second or so: a longer step than `LONGEST_STEP_S` counts as that much.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._slept = 0.0

    def now(self) -> float:
        """Seconds since some start."""
        now = self._clock()
        self._slept += max(0.0, now - self._last - LONGEST_STEP_S)
        self._last = now
        return now - self._slept
