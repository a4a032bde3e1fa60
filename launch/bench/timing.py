"""Interleaved repetitions: processor time of this process and its children, wall time, medians and quartiles."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Sample:
    """Seconds of one repetition, per unit.

    Attributes:
        cpu: Processor time (user and system) of the process and its ended children.
        wall: Elapsed time.
    """

    cpu: float
    wall: float


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarize one or more values."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def processor_seconds() -> float:
    """Return the processor time of this process and its ended children so far."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def timed(run: Callable[[], Any], units: int = 1) -> Callable[[], Sample]:
    """Wrap a function so that it returns its seconds per unit.

    Args:
        run: What to measure.
        units: Steps, messages or rounds that one call does.
    """

    def sample() -> Sample:
        wall, cpu = time.perf_counter(), processor_seconds()
        run()
        return Sample((processor_seconds() - cpu) / units, (time.perf_counter() - wall) / units)

    return sample


def interleave(ways: Mapping[str, Callable[[], Measured]], repeats: int) -> dict[str, list[Measured]]:
    """Run all ways in turn, again and again; every other time in reverse order.

    Args:
        ways: Ways to do the same, by name.
        repeats: Repetitions of each.
    """
    samples: dict[str, list[Measured]] = {name: [] for name in ways}
    for repetition in range(repeats):
        for name in list(ways)[:: -1 if repetition % 2 else 1]:
            samples[name].append(ways[name]())
    return samples


def enough(run: Callable[[int], Any], least: int, seconds: float) -> int:
    """Return how many steps take about `seconds` of processor time, at least `least`; also warms up.

    Args:
        run: Runs a number of steps.
        least: Fewest steps.
        seconds: Processor time.
    """
    run(least)
    begin = time.process_time()
    run(least)
    return max(least, int(least * seconds / max(1e-6, time.process_time() - begin)))
