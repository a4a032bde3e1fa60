"""Clocks that no change of the system's time moves, and one without the time in which its own process was stopped."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_STEP_S = 5.0
WAIT_S = 1.0
MOST_SECONDS = 1e11  # since the epoch, in the year 5138; no record states a later time


def since_epoch(*moments: float) -> tuple[float, ...]:
    """Convert times of the monotonic clock to seconds since the epoch.

    For records with begin and end: a change of the system's time in between does not change the duration.

    Args:
        moments: Seconds on the monotonic clock.
    """
    shift = time.time() - time.monotonic()
    return tuple(moment + shift for moment in moments)


class AwakeClock:
    """Monotonic clock without the time in which this process was stopped or its host suspended.

    For loops that call `now` about every second: a step longer than `LONGEST_STEP_S` counts as `LONGEST_STEP_S`.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._slept = 0.0

    def now(self) -> float:
        """Return seconds since an arbitrary start."""
        now = time.monotonic()
        self._slept += max(0.0, now - self._last - LONGEST_STEP_S)
        self._last = now
        return now - self._slept


def wait_awake(wait: Callable[[float], object], seconds: float) -> bool:
    """Wait for something, without counting time in which this process was stopped or its host suspended.

    Args:
        wait: Waits at most as many seconds as its argument says; returns something true once it has happened.
        seconds: Time limit.

    Returns:
        False if it has not happened within the limit.
    """
    clock = AwakeClock()
    now = clock.now()
    deadline = now + seconds
    while now < deadline:
        if wait(min(WAIT_S, deadline - now)):
            return True
        now = clock.now()
    return bool(wait(0))
