"""How often each mechanism runs: the input of every accountant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from dpcfl_net.types import BoundedRangeSelection, Event, FixedSizeGaussian, SampledGaussian, Unprotected

# Less noise protects nothing. More noise, and rates above 0 but below the last, are counted as these: on the safe side.
LEAST_NOISE, MOST_NOISE, LEAST_RATE = 1e-3, 1e9, 1e-100


@dataclass
class Tally:
    """Events of one kind and one parameter are one entry; what releases nothing has none."""

    gaussians: Counter[tuple[float, float]] = field(default_factory=Counter)  # Steps by (noise multiplier, rate)
    fixed: Counter[tuple[float, int, int]] = field(default_factory=Counter)  # By (noise multiplier, sample size, population)
    selections: Counter[float] = field(default_factory=Counter)
    unprotected: bool = False

    def add(self, events: Iterable[Event]) -> Tally:
        for event in events:
            if isinstance(event, SampledGaussian):
                if event.steps and event.sampling_rate:
                    self.unprotected |= event.noise_multiplier < LEAST_NOISE
                    key = min(event.noise_multiplier, MOST_NOISE), max(event.sampling_rate, LEAST_RATE)
                    self.gaussians[key] += event.steps
            elif isinstance(event, FixedSizeGaussian):
                if event.steps:
                    self.unprotected |= event.noise_multiplier < LEAST_NOISE
                    self.fixed[min(event.noise_multiplier, MOST_NOISE), event.sample_size, event.population] += event.steps
            elif isinstance(event, BoundedRangeSelection):
                if event.count and event.epsilon:
                    self.selections[event.epsilon] += event.count
            elif isinstance(event, Unprotected):
                self.unprotected = True
            else:
                allowed = "SampledGaussian, FixedSizeGaussian, BoundedRangeSelection or Unprotected"
                raise ValueError(f"events must be {allowed}, got {event!r}")
        return self

    def merged(self) -> dict[tuple[float, float], int]:
        """Steps by (noise multiplier, rate), every full-batch release joined into a single Gaussian: their 1 / z^2 add up."""
        sampled = {key: steps for key, steps in self.gaussians.items() if key[1] < 1}
        precision = sum(steps / noise**2 for (noise, rate), steps in self.gaussians.items() if rate == 1)
        return sampled | ({(precision**-0.5, 1.0): 1} if precision else {})
