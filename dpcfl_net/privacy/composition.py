"""The composition of mixed events: what has run is tallied, then composed as Renyi divergences or as loss distributions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dpcfl_net.types import Adjacency, BoundedRangeSelection, Event, SampledGaussian, Unprotected

if TYPE_CHECKING:
    import numpy as np

    from dpcfl_net.privacy.losses import Losses, Pair

# Grid points per typical loss of a step: the error of epsilon falls with the square, 0.2 % at 5 and 0.01 % at 25.
COARSE, FINE = 6.0, 25.0
# No grid is coarser than the first or finer than the second, and no distribution has many more points than the third.
_WIDEST_STEP, _NARROWEST_STEP, _MOST_POINTS = 0.01, 1e-10, 2**21
# Less noise protects nothing, and more is counted as this much: both are on the safe side, and no power overflows.
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e9


@dataclass
class Tally:
    """How often each mechanism runs: events of one kind and one parameter are one entry."""

    gaussians: Counter[tuple[float, float]] = field(default_factory=Counter)
    selections: Counter[float] = field(default_factory=Counter)
    unprotected: bool = False

    def add(self, events: Iterable[Event]) -> Tally:
        for event in events:
            if isinstance(event, SampledGaussian):
                if event.steps and event.sampling_rate:
                    self.unprotected |= event.noise_multiplier < _LEAST_NOISE
                    self.gaussians[min(event.noise_multiplier, _MOST_NOISE), event.sampling_rate] += event.steps
            elif isinstance(event, BoundedRangeSelection):
                if event.count and event.epsilon:
                    self.selections[event.epsilon] += event.count
            elif isinstance(event, Unprotected):
                self.unprotected = True
            else:
                raise ValueError(f"events must be SampledGaussian, BoundedRangeSelection or Unprotected, got {event!r}")
        return self

    def __bool__(self) -> bool:
        return bool(self.gaussians or self.selections)


def rdp_by_prefix(tallies: Sequence[Tally], delta: float) -> list[float]:
    from dpcfl_net.privacy import renyi

    gaussian: dict[tuple[float, float], np.ndarray] = {}
    selection: dict[float, np.ndarray] = {}
    total: np.ndarray | float = 0.0
    found = []
    for tally in tallies:
        for noise_rate, steps in tally.gaussians.items():
            if noise_rate not in gaussian:
                gaussian[noise_rate] = renyi.sampled_gaussian(*noise_rate)
            total = total + steps * gaussian[noise_rate]
        for extent, count in tally.selections.items():
            if extent not in selection:
                selection[extent] = renyi.selection(extent)
            total = total + count * selection[extent]
        found.append(0.0 if isinstance(total, float) else renyi.to_epsilon(total, delta))
    return found


def pld_by_prefix(tallies: Sequence[Tally], delta: float, adjacency: Adjacency, resolution: float) -> list[float]:
    """Epsilon of every prefix. The selections of one range are one block, wherever they stand between the other releases:
    who knows all the noisy sums beforehand can only choose the selections better, so the order does not matter."""
    from dpcfl_net.privacy.losses import compose

    whole = Tally()
    running: list[dict[float, int]] = []
    for tally in tallies:
        whole.gaussians.update(tally.gaussians)
        whole.selections.update(tally.selections)
        running.append(dict(whole.selections))
    if not whole:
        return [0.0] * len(tallies)
    pairs: tuple[Pair, ...] = ("remove", "add") if adjacency == "zero-out" else ("replace",)
    step = _grid_step(whole, pairs, resolution)
    blocks = _blocks(running, step)
    found = [0.0] * len(tallies)
    for pair in pairs:
        sums = _gaussian_prefixes([tally.gaussians for tally in tallies], pair, step)
        for i, (gaussians, selections) in enumerate(zip(sums, running, strict=True)):
            parts = gaussians + [blocks[item] for item in selections.items()]
            if parts:
                found[i] = max(found[i], compose(parts).epsilon(delta))
    if math.inf in found:
        raise ValueError(
            f'delta {delta!r} is below what accountant "pld" resolves for these events: use a larger one, or "rdp"'
        )
    return found


def _grid_step(tally: Tally, pairs: Iterable[Pair], resolution: float) -> float:
    """A grid that adds little to the variance of the total loss, whatever the mixture of large and small releases."""
    from dpcfl_net.privacy.losses import loss_range

    variance, releases, extent = 0.0, 0, 0.0
    for (noise, rate), steps in _merged(tally.gaussians).items():
        inverse = min(noise**-2, 700.0)
        variance += steps * min(rate**2 * math.expm1(inverse), rate * (inverse + inverse**2))
        releases += steps
        for pair in pairs:
            low, high = loss_range(noise, rate, pair)
            extent = max(extent, high - low)
    for width, count in tally.selections.items():
        variance += count * width**2 / 4
        releases += 1
    wanted = min(math.sqrt(variance / releases) / resolution, _WIDEST_STEP)
    return max(wanted, extent / _MOST_POINTS, 8 * math.sqrt(variance) / _MOST_POINTS, _NARROWEST_STEP)


def _merged(gaussians: Counter[tuple[float, float]]) -> dict[tuple[float, float], int]:
    """The same releases with every full-batch one joined into a single Gaussian: their 1 / z^2 add up."""
    sampled = {key: steps for key, steps in gaussians.items() if key[1] < 1}
    precision = sum(steps / noise**2 for (noise, rate), steps in gaussians.items() if rate == 1)
    return sampled | ({(precision**-0.5, 1.0): 1} if precision else {})


def _gaussian_prefixes(groups: Sequence[Counter[tuple[float, float]]], pair: Pair, step: float) -> list[list[Losses]]:
    """For every prefix the composition of its Gaussian releases: no distribution (none so far) or one."""
    from dpcfl_net.privacy.losses import compose, gaussian, repeat

    known: dict[tuple[tuple[tuple[float, float], int], ...], list[Losses]] = {}
    found: list[list[Losses]] = []
    for group in groups:
        key = tuple(sorted(_merged(group).items()))
        if key not in known:
            known[key] = [repeat(gaussian(noise, rate, pair, step), steps) for (noise, rate), steps in key]
        parts = (found[-1] if found else []) + known[key]
        found.append([compose(parts)] if parts else [])
    return found


def _blocks(running: Sequence[dict[float, int]], step: float) -> dict[tuple[float, int], Losses]:
    from dpcfl_net.privacy.selection_losses import selection_blocks

    wanted: dict[float, set[int]] = {}
    for selections in running:
        for width, count in selections.items():
            wanted.setdefault(width, set()).add(count)
    return {
        (width, count): block
        for width, counts in wanted.items()
        for count, block in selection_blocks(width, counts, step).items()
    }
