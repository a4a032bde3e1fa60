"""Accounting by privacy loss distributions: the losses of every release, composed on one grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.accounting.composition import Losses, best_tilt, compose
from dpcfl_net.privacy.accounting.event_counts import Charges
from dpcfl_net.privacy.accounting.fixed_size import fixed_size_gaussian
from dpcfl_net.privacy.accounting.gaussian import plain_epsilon, plain_gaussian, sampled_gaussian
from dpcfl_net.privacy.accounting.selection import block_sizes, selection_block


@dataclass(frozen=True)
class Grid:
    """How fine the grid of losses is: its widest interval, and how many points a typical loss of a release spans at least.

    The error of epsilon falls with the square of the points: 0.2 % at 8, 0.03 % at 20.
    """

    interval: float
    points: float


COARSE, FINE, CURVE = Grid(1e-3, 3), Grid(1e-4, 8), Grid(8e-4, 20)
# The least interval of sampled Gaussians: the divergences that they start from are rounded to 1e-16.
_LEAST_INTERVAL, _MOST_POINTS = 1e-7, 2**18
# The share of delta that a composition may cut off and count as infinite loss, and the share that rounding may cost.
_CUT, _ROUNDING = 1e-7, 1e-8
# Tilts to try, beside the best for Renyi accounting: that one is too strong where few releases have a heavy tail.
_TILTS = (0.5, 0.125, 0.0)
_LEAST_DELTA = 1e-6  # a whole curve of deltas is as good as one of this size needs


def pld_epsilon(charges: Charges, delta: float, adjacency: Adjacency, grid: Grid) -> float:
    """Epsilon at `delta` of all charges together, rounded up; a function of its arguments alone.

    All full-batch Gaussians are one, exactly, and counted as one release. The selections of one range are one block,
    wherever they stand between the other releases: a server that knows all the noisy sums beforehand can only choose the
    selections better, so the order does not matter.

    Raises:
        ValueError: If delta is too small to be resolved for so many releases.
    """
    if _total_variation(charges, adjacency) <= delta:
        return 0.0
    if not (charges.poisson or charges.fixed or charges.selections):
        return plain_epsilon(_mean(charges, adjacency), delta)
    spent, directions = math.inf, _directions(charges, adjacency, grid)
    for share in _TILTS:
        composed = [compose(parts, _CUT * delta, share * best_tilt(parts, delta)) for parts in directions]
        found = max(losses.epsilon(delta) for losses in composed)
        spent = min(spent, found)
        if found < math.inf and all(losses.rounding(found) <= _ROUNDING * delta for losses in composed):
            break
    if spent == math.inf:
        raise ValueError(
            f'delta {delta!r} is below what accountant "pld" resolves for these events: use a larger one, or "rdp"'
        )
    return spent


def pld_deltas(charges: Charges, epsilons: Sequence[float], adjacency: Adjacency, grid: Grid) -> np.ndarray:
    """Delta at each epsilon of all charges together, rounded up."""
    if not (charges.gaussians or charges.fixed or charges.selections):
        return np.zeros(len(epsilons))
    composed = [compose(parts, _CUT * _LEAST_DELTA) for parts in _directions(charges, adjacency, grid)]
    return np.minimum(np.max([[losses.delta(epsilon) for epsilon in epsilons] for losses in composed], axis=0), 1.0)


def _directions(charges: Charges, adjacency: Adjacency, grid: Grid) -> list[list[tuple[Losses, int]]]:
    """What is composed in each direction of the adjacency, and how often."""
    interval = _interval(charges, adjacency, grid)
    parts: list[tuple[tuple[Losses, ...], int]] = []
    if charges.precision:
        parts.append(((plain_gaussian(_mean(charges, adjacency), interval),), 1))
    parts += [(sampled_gaussian(z, rate, adjacency, interval), steps) for z, rate, steps in charges.poisson]
    parts += [((fixed_size_gaussian(z, m / n, interval),), steps) for z, m, n, steps in charges.fixed]
    for extent, count in charges.selections:
        parts += [((selection_block(extent, size, interval),), n) for size, n in block_sizes(extent, count).items()]
    directions = max(len(losses) for losses, _ in parts)
    return [[(losses[i % len(losses)], count) for losses, count in parts] for i in range(directions)]


def _mean(charges: Charges, adjacency: Adjacency) -> float:
    """Sensitivity over noise of all full-batch releases together."""
    return (1 if adjacency == "zero-out" else 2) * math.sqrt(charges.precision)


def _gaussians(charges: Charges, adjacency: Adjacency) -> list[tuple[float, float, int, bool]]:
    """Noise over the whole sensitivity, rate and steps of the Gaussian releases; whether their losses are symmetric."""
    shift = 1 if adjacency == "zero-out" else 2
    plain = [(1 / _mean(charges, adjacency), 1.0, 1, True)] if charges.precision else []
    poisson = [(z / shift, rate, steps, shift == 2) for z, rate, steps in charges.poisson]
    return plain + poisson + [(z, size / population, steps, True) for z, size, population, steps in charges.fixed]


def _total_variation(charges: Charges, adjacency: Adjacency) -> float:
    """A bound on delta at epsilon 0: releases that tell next to nothing need no grid, and would need a very fine one."""
    sums = sum(steps * rate * math.erf(1 / (2**1.5 * noise)) for noise, rate, steps, _ in _gaussians(charges, adjacency))
    return sums + sum(count * math.tanh(extent / 4) for extent, count in charges.selections)


def _interval(charges: Charges, adjacency: Adjacency, grid: Grid) -> float:
    """The grid's interval for these events, a power of two times its widest: few values, so that distributions are found again.

    Finer where rounding each loss would add much to the variance of the total (small rates, narrow selections); wider where
    the losses span more than an affordable number of points (little noise).
    """
    variance, releases, extent = 0.0, 0, 0.0
    for noise, rate, steps, symmetric in _gaussians(charges, adjacency):
        inverse = min(1 / noise, 26.0) ** 2
        variance += steps * min(rate**2 * math.expm1(inverse), rate * (inverse + inverse**2))
        releases += steps
        highest = _highest_loss(noise, rate)
        extent = max(extent, highest + (highest if symmetric else -math.log1p(-rate)))
    least = _LEAST_INTERVAL if releases else 0.0
    for width, count in charges.selections:
        blocks = block_sizes(width, count)
        variance += count * width**2 / 4
        releases += sum(blocks.values())
        extent = max(extent, 2 * max(blocks) * width)
    wanted = min(math.sqrt(variance / releases) / grid.points, grid.interval)
    affordable = max(extent, 8 * math.sqrt(variance)) / _MOST_POINTS
    return grid.interval * 2.0 ** math.floor(math.log2(max(wanted, 2 * affordable, least) / grid.interval))


def _highest_loss(noise: float, rate: float) -> float:
    """The loss of one release, sensitivity 1, that noise of ten standard deviations gives."""
    plain = 0.5 / noise**2 + 10 / noise
    return math.log1p(rate * math.expm1(plain)) if plain < 1 else plain + math.log(rate + (1 - rate) * math.exp(-plain))
