"""Lower bounds on epsilon of Poisson-sampled Gaussian releases: what no accountant can truthfully go below."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian

_FAILURE = 1e-4  # share of delta for the probability that rounding errors add up to more than their bound
_ERROR = 1e-3  # error of epsilon from rounding, relative, where memory allows it
_MOST_POINTS = 2**22
# Error of the masses above a loss, from the transform: at least, and for each release, as in `composition.py`.
_ROUNDING, _ROUNDING_OF_ONE = 1e-11, 1e-15
_MOST_EPSILON = 600.0  # largest bound; e^epsilon overflows above 709
_REACH = 9.5  # noise beyond this many deviations is left out, which lowers the bound


def epsilon_at_least(events: Sequence[SampledGaussian], delta: float, upper: float, adjacency: Adjacency = "zero-out") -> float:
    """Compute a lower bound on epsilon of a composition, for the worst pair of data sets.

    Losses are rounded to a grid without a change of their mean. By Hoeffding's inequality the errors of n rounded losses add up to
    at most h sqrt(n log(1/b) / 2), except with probability b; both are charged.

    Args:
        events: Poisson-sampled Gaussian releases, at least one with steps and rate above 0.
        delta: Delta, in (0, 1).
        upper: An upper bound on epsilon; sets the resolution only.
        adjacency: "zero-out" or "replace-one".

    Returns:
        The bound, at least 0.

    Source: Gopi, Lee, Wutschitz 2021 (the coupling of rounded losses).
    """
    ways = ("replaced",) if adjacency == "replace-one" else ("removed", "added")
    return max(0.0, *(_one_way(events, delta, upper, way) for way in ways))


def _one_way(events: Sequence[SampledGaussian], delta: float, upper: float, way: str) -> float:
    steps = sum(event.steps for event in events)
    spread = math.sqrt(steps * math.log(1 / (_FAILURE * delta)) / 2)
    ranges = [(event.steps, *_moments(event, way)) for event in events]
    mean = sum(count * mu for count, mu, _, _ in ranges)
    half = 10 * math.sqrt(sum(count * variance for count, _, variance, _ in ranges)) + 2 * max(top for *_, top in ranges)
    interval = max(_ERROR * max(upper, 1e-3) / spread, 2 * half / _MOST_POINTS)
    points = 2 ** math.ceil(math.log2(2 * half / interval))
    spectrum, shift = np.ones(points // 2 + 1, dtype=complex), 0.0
    for event, (count, mu, _, _) in zip(events, ranges, strict=True):
        first, masses = _rounded(event, way, interval)
        shift += count * (mu - interval * float((first + np.arange(len(masses))) @ masses))
        circle = np.zeros(points)
        np.add.at(circle, (first + np.arange(len(masses))) % points, masses)
        spectrum *= np.fft.rfft(circle) ** count
    start = round((mean - half) / interval)
    masses = np.roll(np.fft.irfft(spectrum, points), -(start % points))
    losses = (start + np.arange(points)) * interval + shift
    rounding = max(_ROUNDING, _ROUNDING_OF_ONE * (steps + 1))
    return _epsilon(losses, np.maximum(masses, 0.0), delta * (1 + _FAILURE) + rounding) - interval * spread


def _epsilon(losses: np.ndarray, masses: np.ndarray, delta: float) -> float:
    """Epsilon at delta of losses in increasing order; 0 if delta is not reached."""
    first = int(np.searchsorted(losses, 0.0, side="right"))
    losses, masses = losses[first:], masses[first:]
    # Sums over all larger losses: delta(epsilon) = sum of m (1 - e^(epsilon - l)).
    above = np.cumsum(masses[::-1])[::-1]
    weighed = np.cumsum((masses * np.exp(-losses))[::-1])[::-1]
    low, high = 0.0, min(float(losses[-1]), _MOST_EPSILON)
    while high - low > 1e-7:
        middle = (low + high) / 2
        place = int(np.searchsorted(losses, middle, side="right"))
        found = float(above[place] - math.exp(middle) * weighed[place]) if place < len(losses) else 0.0
        low, high = (middle, high) if found > delta else (low, middle)
    return low


def _rounded(event: SampledGaussian, way: str, interval: float) -> tuple[int, np.ndarray]:
    """Number of the first grid point, and the mass of each: losses rounded to the nearest one."""
    ends = _loss(event, way, np.array([-_REACH * event.noise_multiplier - 1, _REACH * event.noise_multiplier + 1]))
    first, last = math.floor(ends.min() / interval), math.ceil(ends.max() / interval)
    edges = (np.arange(first, last + 2) - 0.5) * interval
    below = _mass_below(event, way, edges)
    return first, np.maximum(np.diff(below), 0.0)


def _moments(event: SampledGaussian, way: str) -> tuple[float, float, float]:
    """Mean and variance of one loss, and the largest magnitude within reach."""
    z, q = event.noise_multiplier, event.sampling_rate
    x = np.linspace(-_REACH * z - 1, _REACH * z + 1, 200_001)
    density = np.exp(-(x**2) / (2 * z**2))
    if way != "added":
        density = (1 - q) * density + q * np.exp(-((x - 1) ** 2) / (2 * z**2))
    density /= density.sum()  # the trapezoidal rule, whose error is below that of floating point for such densities
    losses = _loss(event, way, x)
    mean = float(density @ losses)
    return mean, float(density @ (losses - mean) ** 2), float(np.abs(losses).max())


def _loss(event: SampledGaussian, way: str, x: np.ndarray) -> np.ndarray:
    z, q = event.noise_multiplier, event.sampling_rate
    out = math.log1p(-q) if q < 1 else -math.inf
    ratio = np.logaddexp(out, math.log(q) + (2 * x - 1) / (2 * z**2))
    if way == "removed":
        return ratio
    if way == "added":
        return -ratio
    return ratio - np.logaddexp(out, math.log(q) - (2 * x + 1) / (2 * z**2))


def _mass_below(event: SampledGaussian, way: str, losses: np.ndarray) -> np.ndarray:
    """Probability that the loss is at most each value."""
    from scipy.special import ndtr

    z, q = event.noise_multiplier, event.sampling_rate
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        if way == "replaced":
            x = z**2 * np.log(_root(z, q, losses))
        else:
            x = z**2 * np.log((np.exp(losses if way == "removed" else -losses) - 1 + q) / q) + 0.5
    x = np.where(np.isnan(x), -np.inf, x)  # the loss has no such value: it is above, or below, all that occur
    if way == "added":
        return np.asarray(ndtr(-x / z))
    return np.asarray((1 - q) * ndtr(x / z) + q * ndtr((x - 1) / z))


def _root(z: float, q: float, losses: np.ndarray) -> np.ndarray:
    """e^(x / z^2) where the loss of a replaced record has a value: the positive root of a quadratic equation."""
    a, e = q * math.exp(-1 / (2 * z**2)), np.exp(losses)
    b = (1 - q) * (1 - e)
    root = np.sqrt(b**2 + 4 * a**2 * e)
    return np.where(b > 0, 2 * a * e / (b + root), (root - b) / (2 * a))
