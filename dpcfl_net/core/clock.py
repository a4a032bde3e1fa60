"""Monotonic clock for timeouts on other processes; it excludes time in which its own process was stopped."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_STEP_S = 5.0


class AwakeClock:
    """Monotonic clock without the time in which this process was stopped or its host suspended.

    For loops that call `now` about every second: a step longer than `LONGEST_STEP_S` counts as `LONGEST_STEP_S`.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._slept = 0.0

    def now(self) -> float:
        """Return seconds since an arbitrary start."""
        now = self._clock()
        self._slept += max(0.0, now - self._last - LONGEST_STEP_S)
        self._last = now
        return now - self._slept
