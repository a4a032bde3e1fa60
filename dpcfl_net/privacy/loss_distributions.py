"""Accounting by privacy loss distributions: the library's objects for every release, composed on one grid of losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dpcfl_net.privacy.tally import Tally
from dpcfl_net.types import Adjacency

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution


@dataclass(frozen=True)
class Grid:
    """How fine the grid of losses is: its widest interval, and how many points a typical loss of a release spans at least.

    The error of epsilon falls with the square of the points: 0.2 % at 8, 0.03 % at 20.
    """

    interval: float
    points: float


COARSE, FINE, CURVE = Grid(1e-3, 3), Grid(1e-4, 8), Grid(8e-4, 20)
_LEAST_INTERVAL, _MOST_POINTS = 1e-7, 2**18
# What composing n releases may lose to the rounding of n-th powers of Fourier coefficients, as probability per release; and
# the share of delta that one composition may cut off and count as infinite loss.
_ROUNDING, _CUT = 1e-15, 1e-7
_LEAST_DELTA = 1e-6  # a whole curve of deltas is as good as one of this size needs


def pld_by_prefix(tallies: Sequence[Tally], delta: float, adjacency: Adjacency, grid: Grid) -> list[float]:
    """Epsilon at `delta` of tallies[0], of tallies[0] and tallies[1], and so on.

    The selections of one range are one block, wherever they stand between the other releases: who knows all the noisy sums
    beforehand can only choose the selections better, so the order does not matter.
    """
    whole = Tally()
    running: list[dict[float, int]] = []
    for tally in tallies:
        whole.gaussians.update(tally.gaussians)
        whole.fixed.update(tally.fixed)
        whole.selections.update(tally.selections)
        running.append(dict(whole.selections))
    if _total_variation(whole, adjacency) <= delta:
        return [0.0] * len(tallies)
    interval = _interval(whole, adjacency, grid)
    cut = _CUT * delta
    releases = whole.gaussians.total() + whole.fixed.total() + whole.selections.total()
    resolved = delta - _ROUNDING * (releases + len(tallies))
    blocks = _blocks(running, interval, cut)
    found = []
    for sums, selections in zip(_gaussian_prefixes(tallies, adjacency, interval, cut), running, strict=True):
        parts = sums + [blocks[item] for item in selections.items()]
        spent = _compose(parts, cut).get_epsilon_for_delta(resolved) if parts and resolved > 0 else 0.0
        if spent == math.inf or resolved <= 0:
            raise ValueError(
                f'delta {delta!r} is below what accountant "pld" resolves for these events: use a larger one, or "rdp"'
            )
        found.append(float(spent))
    return found


def delta_curve(tally: Tally, epsilons: Sequence[float], adjacency: Adjacency, grid: Grid) -> np.ndarray:
    """Delta at each epsilon of everything in the tally, rounded up."""
    running = dict(tally.selections)
    releases = tally.gaussians.total() + tally.fixed.total() + tally.selections.total()
    if not releases:
        return np.zeros(len(epsilons))
    interval, cut = _interval(tally, adjacency, grid), _CUT * _LEAST_DELTA
    blocks = _blocks([running], interval, cut)
    parts = _gaussian_prefixes([tally], adjacency, interval, cut)[0] + [blocks[item] for item in running.items()]
    found = np.asarray(_compose(parts, cut).get_delta_for_epsilon(list(epsilons)), dtype=np.float64)
    return np.minimum(found + _ROUNDING * (releases + 1), 1.0)


def _gaussians(tally: Tally, adjacency: Adjacency) -> list[tuple[float, float, int, bool]]:
    """Noise over the whole sensitivity, rate and steps of the Gaussian releases; whether their losses are symmetric."""
    shift = 1 if adjacency == "zero-out" else 2
    poisson = [(z / shift, rate, steps, rate == 1 or shift == 2) for (z, rate), steps in tally.merged().items()]
    return poisson + [(z, size / population, steps, True) for (z, size, population), steps in tally.fixed.items()]


def _total_variation(tally: Tally, adjacency: Adjacency) -> float:
    """A bound on delta at epsilon 0: releases that tell next to nothing need no grid, and would need a very fine one."""
    sums = sum(steps * rate * math.erf(1 / (2**1.5 * noise)) for noise, rate, steps, _ in _gaussians(tally, adjacency))
    return sums + sum(count * math.tanh(extent / 4) for extent, count in tally.selections.items())


def _interval(tally: Tally, adjacency: Adjacency, grid: Grid) -> float:
    """The grid's interval for these events, a power of two times its widest: few values, so that distributions are found again.

    Finer where rounding each loss would add much to the variance of the total (small rates); wider where the losses span
    more than an affordable number of points (little noise).
    """
    variance, releases, extent = 0.0, 0, 0.0
    for noise, rate, steps, symmetric in _gaussians(tally, adjacency):
        inverse = min(1 / noise, 26.0) ** 2
        variance += steps * min(rate**2 * math.expm1(inverse), rate * (inverse + inverse**2))
        releases += steps
        highest = _highest_loss(noise, rate)
        extent = max(extent, highest + (highest if symmetric else -math.log1p(-rate)))
    for width, count in tally.selections.items():
        variance += count * width**2 / 4
        releases += 1
        extent = max(extent, 2 * count * width)
    wanted = min(math.sqrt(variance / releases) / grid.points, grid.interval)
    least = max(extent, 8 * math.sqrt(variance)) / _MOST_POINTS
    return grid.interval * 2.0 ** math.floor(math.log2(max(wanted, 2 * least, _LEAST_INTERVAL) / grid.interval))


def _highest_loss(noise: float, rate: float) -> float:
    """The loss of one release, sensitivity 1, that noise of ten standard deviations gives."""
    plain = 0.5 / noise**2 + 10 / noise
    return math.log1p(rate * math.expm1(plain)) if plain < 1 else plain + math.log(rate + (1 - rate) * math.exp(-plain))


@lru_cache(maxsize=8)
def gaussian(noise: float, rate: float, adjacency: Adjacency, interval: float) -> PrivacyLossDistribution:
    """One Poisson-sampled Gaussian release (rate 1: plain), sensitivity 1; "replace-one" moves a record from +1 to -1."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution

    relation = NeighboringRelation.ADD_OR_REMOVE_ONE if adjacency == "zero-out" else NeighboringRelation.REPLACE_ONE
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=interval, neighboring_relation=relation
    )


def _compose(parts: Iterable[PrivacyLossDistribution], cut: float) -> PrivacyLossDistribution:
    first, *rest = parts
    for part in rest:
        first = first.compose(part, cut)
    return first


def _gaussian_prefixes(
    tallies: Sequence[Tally], adjacency: Adjacency, interval: float, cut: float
) -> list[list[PrivacyLossDistribution]]:
    """For every prefix the composition of its Gaussian releases: no distribution (none so far) or one."""
    from dpcfl_net.privacy.fixed_size_losses import fixed_size_gaussian

    known: dict[Any, list[PrivacyLossDistribution]] = {}
    found: list[list[PrivacyLossDistribution]] = []
    for tally in tallies:
        key = poisson, fixed = tuple(sorted(tally.merged().items())), tuple(sorted(tally.fixed.items()))
        if key not in known:
            plds = [_repeat(gaussian(noise, rate, adjacency, interval), steps, cut) for (noise, rate), steps in poisson]
            plds += [_repeat(fixed_size_gaussian(z, m / n, interval), steps, cut) for (z, m, n), steps in fixed]
            known[key] = [_compose(plds, cut)] if plds else []
        parts = (found[-1] if found else []) + known[key]
        found.append([_compose(parts, cut)] if parts else [])
    return found


def _repeat(pld: PrivacyLossDistribution, count: int, cut: float) -> PrivacyLossDistribution:
    return pld if count == 1 else pld.self_compose(count, cut)


def _blocks(
    running: Sequence[dict[float, int]], interval: float, cut: float
) -> dict[tuple[float, int], PrivacyLossDistribution]:
    """The distribution of every (range, count) that a prefix has; more selections than a block takes are several blocks."""
    from dpcfl_net.privacy.selection_losses import LARGEST, selection_blocks

    found = {}
    wanted: dict[float, set[int]] = {}
    for selections in running:
        for width, count in selections.items():
            wanted.setdefault(width, set()).add(count)
    for width, counts in wanted.items():
        sizes = {count % LARGEST for count in counts if count % LARGEST} | {min(LARGEST, max(counts))}
        blocks = selection_blocks(width, sizes, interval)
        for count in counts:
            whole, rest = divmod(count, LARGEST)
            parts = ([_repeat(blocks[LARGEST], whole, cut)] if whole else []) + ([blocks[rest]] if rest else [])
            found[width, count] = _compose(parts, cut)
    return found
