"""Processes that a signal does not end at once: one computes a long operation, which no signal handler in Python interrupts."""

import signal
import time
from pathlib import Path


def compute(begun: str) -> None:
    """Create a file, and compute for minutes."""
    Path(begun).touch()
    sum(range(10**11))


def ignore_sigterm(begun: str) -> None:
    """Ignore SIGTERM, create a file, and rest for minutes."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(begun).touch()
    time.sleep(600)
