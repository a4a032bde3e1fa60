"""Accounting by privacy loss distributions: the losses of every mechanism, composed on one grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.accounting.composition import Losses, best_tilt, compose
from dpcfl_net.privacy.accounting.event_counts import MergedEvents


@dataclass(frozen=True)
class Grid:
    """Resolution of the grid of losses. The error of epsilon falls with the square of `points`: 0.2 % at 8, 0.03 % at 20.

    Attributes:
        interval: Widest grid interval.
        points: Minimum number of grid points that a typical loss of a release spans.
    """

    interval: float
    points: float


COARSE, FINE, CURVE = Grid(1e-3, 3), Grid(1e-4, 8), Grid(8e-4, 20)
_MOST_POINTS = 2**18
# The share of delta that a composition may cut off and count as infinite loss, and the share that rounding may cost.
_CUT, _ROUNDING = 1e-7, 1e-8
# Tilts to try, relative to the best one for Renyi accounting, which is too strong for a few releases with a heavy tail.
_TILTS = (0.5, 0.125, 0.0)
_MIN_DELTA = 1e-6  # precision for which a curve of deltas is computed


def pld_epsilon(events: MergedEvents, delta: float, adjacency: Adjacency, grid: Grid) -> float:
    """Compute epsilon of all mechanisms together, rounded up; a function of its arguments alone.

    Args:
        events: Composed mechanisms.
        delta: Target delta, in (0, 1).
        adjacency: "zero-out" or "replace-one".
        grid: Resolution of the losses.

    Returns:
        Epsilon, >= 0.

    Raises:
        ValueError: If delta is too small to be resolved for so many releases.
    """
    if sum(mechanism.total_variation(adjacency) for mechanism in events.mechanisms) <= delta:
        return 0.0
    if len(events.mechanisms) == 1 and (exact := events.mechanisms[0].closed_form(delta, adjacency)) is not None:
        return exact
    spent, directions = math.inf, _directions(events, adjacency, grid)
    for share in _TILTS if _CUT * delta > 0 else ():
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


def pld_deltas(events: MergedEvents, epsilons: Sequence[float], adjacency: Adjacency, grid: Grid) -> np.ndarray:
    """Compute delta of all mechanisms together at each epsilon, rounded up.

    Args:
        events: Composed mechanisms.
        epsilons: Values of epsilon, n of them.
        adjacency: "zero-out" or "replace-one".
        grid: Resolution of the losses.

    Returns:
        Deltas, (n,) float64, at most 1.
    """
    if not events.mechanisms:
        return np.zeros(len(epsilons))
    composed = [compose(parts, _CUT * _MIN_DELTA) for parts in _directions(events, adjacency, grid)]
    return np.minimum(np.max([[losses.delta(epsilon) for epsilon in epsilons] for losses in composed], axis=0), 1.0)


def _directions(events: MergedEvents, adjacency: Adjacency, grid: Grid) -> list[list[tuple[Losses, int]]]:
    """Distributions in each direction of the adjacency, each with the number of times that it is composed."""
    interval = _interval(events, adjacency, grid)
    parts = [part for mechanism in events.mechanisms for part in mechanism.losses(adjacency, interval)]
    directions = max(len(losses) for losses, _ in parts)
    return [[(losses[i % len(losses)], count) for losses, count in parts] for i in range(directions)]


def _interval(events: MergedEvents, adjacency: Adjacency, grid: Grid) -> float:
    """Grid interval for these events: the grid's widest times a power of two, so that few values occur and caches hit.

    Finer where rounding each loss would add much to the variance of the total (small rates, narrow selections); wider where
    the losses span more points than are affordable (little noise).
    """
    variance, releases, extent, min_interval = 0.0, 0, 0.0, 0.0
    for mechanism in events.mechanisms:
        spread = mechanism.spread(adjacency)
        variance += spread.variance
        releases += spread.releases
        extent = max(extent, spread.extent)
        min_interval = max(min_interval, spread.min_interval)
    wanted = min(math.sqrt(variance / releases) / grid.points, grid.interval)
    affordable = max(extent, 8 * math.sqrt(variance)) / _MOST_POINTS
    return grid.interval * 2.0 ** math.floor(math.log2(max(wanted, 2 * affordable, min_interval) / grid.interval))
