"""How often each mechanism runs: the input of every accountant."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from dpcfl_net.core.types import BoundedRangeSelection, Event, FixedSizeGaussian, SampledGaussian, Unprotected

# Less noise protects nothing. More noise, and rates and ranges above 0 but below the last two, are counted as these: on the
# safe side.
LEAST_NOISE, MOST_NOISE, LEAST_RATE, LEAST_RANGE = 1e-3, 1e9, 1e-100, 1e-100


@dataclass(frozen=True)
class Charges:
    """All that an accountant's answer may depend on: equal for equal mechanisms in any order and grouping.

    Attributes:
        precision: Sum of 1 / z^2 over all full-batch Gaussian releases: together they are one release of this precision.
        poisson: (noise multiplier, sampling rate, steps) of the other Poisson-sampled Gaussians, sorted.
        fixed: (noise multiplier, sample size, population, steps) of those over samples of fixed size, sorted.
        selections: (range, count) of the selections, sorted.
        unprotected: True if an event has no guarantee.
    """

    precision: float
    poisson: tuple[tuple[float, float, int], ...]
    fixed: tuple[tuple[float, int, int, int], ...]
    selections: tuple[tuple[float, int], ...]
    unprotected: bool

    @property
    def gaussians(self) -> bool:
        """True if a SampledGaussian was charged."""
        return bool(self.precision or self.poisson)


@dataclass
class EventCounts:
    """Events of one kind and one parameter are one entry; what releases nothing has none."""

    _gaussians: Counter[tuple[float, float]] = field(default_factory=Counter)  # Steps by (noise multiplier, rate)
    _fixed: Counter[tuple[float, int, int]] = field(default_factory=Counter)  # By (noise multiplier, sample size, population)
    _selections: Counter[float] = field(default_factory=Counter)
    _unprotected: bool = False

    def add(self, events: Iterable[Event]) -> EventCounts:
        """Count the events in, and return the tally itself."""
        for event in events:
            if isinstance(event, SampledGaussian):
                if event.steps and event.sampling_rate:
                    self._unprotected |= event.noise_multiplier < LEAST_NOISE
                    key = min(event.noise_multiplier, MOST_NOISE), max(event.sampling_rate, LEAST_RATE)
                    self._gaussians[key] += event.steps
            elif isinstance(event, FixedSizeGaussian):
                if event.steps:
                    self._unprotected |= event.noise_multiplier < LEAST_NOISE
                    self._fixed[min(event.noise_multiplier, MOST_NOISE), event.sample_size, event.population] += event.steps
            elif isinstance(event, BoundedRangeSelection):
                if event.count and event.epsilon:
                    self._selections[max(event.epsilon, LEAST_RANGE)] += event.count
            elif isinstance(event, Unprotected):
                self._unprotected = True
            else:
                allowed = "SampledGaussian, FixedSizeGaussian, BoundedRangeSelection or Unprotected"
                raise ValueError(f"events must be {allowed}, got {event!r}")
        return self

    def charges(self) -> Charges:
        """Everything counted so far, in one order."""
        return Charges(
            precision=math.fsum(steps / noise**2 for (noise, rate), steps in self._gaussians.items() if rate == 1),
            poisson=tuple(sorted((*key, steps) for key, steps in self._gaussians.items() if key[1] < 1)),
            fixed=tuple(sorted((*key, steps) for key, steps in self._fixed.items())),
            selections=tuple(sorted(self._selections.items())),
            unprotected=self._unprotected,
        )
