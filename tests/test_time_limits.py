"""The time limit of a command that runs in the process of the tests leaves that of its test as it was."""

from __future__ import annotations

import signal

from conftest import time_limit


def test_the_time_limit_of_a_test_goes_on_after_a_command():
    """A test that waited for ever after a command was never ended."""
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, 500.0)
    try:
        with time_limit(["schema"], 50):
            assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 50
        assert 50 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s)
