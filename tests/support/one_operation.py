"""A process that computes one long operation, which no signal handler in Python interrupts."""

from pathlib import Path


def compute(begun: str) -> None:
    """Create a file, and compute for minutes."""
    Path(begun).touch()
    sum(range(10**11))
