"""Privacy loss of one epoch with random allocation: each record is in exactly one of t batches, drawn uniformly."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from dpcfl_net.privacy.accounting.composition import Losses, two_sided
from dpcfl_net.privacy.accounting.positive_sums import PositiveSum, sum_of

TAIL = 10.0  # deviations of the noise beyond which a term is cut off: probability 1e-23
_FINENESS = 96.0  # points of a sum's grid in its relative deviation
_FEWEST_POINTS, _MOST_POINTS = 256, 2**15
NODES = 8  # Gauss-Legendre nodes of a cell, over which the logarithm of the density is nearly linear
# Relative bound on the rounding of a mass, for each term of the sum. It is ten times what the products can lose.
ROUNDING = 1e-10
_CANCELLATION = 1e-10  # relative bound on the rounding of cumulative sums
UNSEEN = 1e-20  # bound on what floating-point underflow loses
_END = 1e-21  # divergence at which the grid of losses ends


@lru_cache(maxsize=8)
def allocation_losses(noise: float, batches: int, interval: float) -> tuple[Losses, Losses]:
    """Compute the loss distributions of one epoch, as a record is removed and as it is added.

    Let Y_i = exp(x_i / z - 1 / (2 z^2)) for independent standard normal x_i, and S = (Y_1 + ... + Y_t) / t. Under the noise alone
    the density ratio of P = (1/t) sum_i N(e_i, z^2) to Q = N(0, z^2) is S, so that

        H_a(P, Q) = E max(S - a, 0),    H_a(Q, P) = E max(1 - a S, 0).

    Both are convex in S: S is rounded in convex order (`PositiveSum`), one rounding for both directions.

    Args:
        noise: Noise multiplier z, 0.1 to 1000.
        batches: Batches of an epoch, t.
        interval: Grid interval of the losses.

    Returns:
        One distribution for each direction.

    Source: docs/explanation/privacy.md, random allocation.
    """
    total = _density_ratio(noise, batches)
    removed, added = _profiles(total, interval)
    return two_sided(removed, added, interval), two_sided(added, removed, interval)


@lru_cache(maxsize=8)
def _density_ratio(noise: float, batches: int) -> PositiveSum:
    """Distribution of Y_1 + ... + Y_t."""
    variance = math.expm1(noise**-2)

    def resolution(terms: int) -> int:
        wanted = _FINENESS * math.sqrt(terms / variance)
        return 2 ** math.ceil(math.log2(min(max(wanted, _FEWEST_POINTS), _MOST_POINTS)))

    finer = [resolution(2**i) for i in range(batches.bit_length())]
    return sum_of(log_normal(noise, finer[0]), batches, finer)


def log_normal(noise: float, resolution: int) -> PositiveSum:
    """Compute the distribution of exp(x / z - 1 / (2 z^2)) for a standard normal x, rounded in convex order.

    Args:
        noise: z.
        resolution: Points of a block, a power of two.

    Returns:
        The distribution.
    """
    from scipy.special import ndtr

    shift, m = 1 / noise, resolution
    first = math.floor((-TAIL * shift - shift**2 / 2) / math.log(2))
    last = math.ceil((TAIL * shift + shift**2 / 2) / math.log(2))
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    places = (np.arange(m)[:, None] + (nodes + 1) / 2 + m) / m
    shares = (nodes + 1) / 2
    blocks = np.zeros((last - first + 2, m))
    for k in range(last - first):
        x = noise * ((first + k) * math.log(2) + np.log(places)) + shift / 2
        masses = np.exp(-(x**2) / 2) * (weights / 2 * noise / math.sqrt(2 * math.pi) / m) / places
        blocks[k + 1] += masses @ (1 - shares)
        right = masses @ shares
        blocks[k + 1, 1:] += right[:-1]
        blocks[k + 2, 0] += right[-1]
    # Below the first octave: to 0 or to its upper end. Above the last one: lowered to it.
    low, high = noise * first * math.log(2) + shift / 2, noise * last * math.log(2) + shift / 2
    up = float(ndtr(low - shift)) / 2.0**first
    blocks[0, 0] += max(float(ndtr(low)) - up, 0.0)
    blocks[1, 0] += up
    blocks[-1, 0] += float(ndtr(-high))
    return PositiveSum(first - (m.bit_length() - 1), tuple(blocks), 1, float(ndtr(shift - high)))


def _profiles(total: PositiveSum, interval: float) -> tuple[np.ndarray, np.ndarray]:
    """Divergences of removal and of addition at the losses 0, interval, 2 * interval, ..., rounded up."""
    values, masses = total.points()
    values /= total.terms
    factor = 1 + ROUNDING * total.terms

    def above(a: np.ndarray) -> np.ndarray:
        start = np.searchsorted(values, a)
        found = weighed_above[start] * (1 + _CANCELLATION) - a * mass_above[start]
        return np.asarray(factor * np.maximum(found, 0.0) + total.excess / total.terms + UNSEEN)

    def below(a: np.ndarray) -> np.ndarray:
        end = np.searchsorted(values, 1 / a)
        found = mass_below[end] * (1 + _CANCELLATION) - a * weighed_below[end]
        return np.asarray(factor * np.maximum(found, 0.0) + UNSEEN)

    mass_above, weighed_above = (np.append(np.cumsum(each[::-1])[::-1], 0.0) for each in (masses, masses * values))
    mass_below, weighed_below = (np.append(0.0, np.cumsum(each)) for each in (masses, masses * values))
    highest = values[max(int(np.searchsorted(-weighed_above, -_END)) - 1, 0)]
    lowest = values[max(int(np.searchsorted(mass_below, _END)) - 1, 0)]
    tops = [max(math.ceil(loss / interval), 1) for loss in (math.log(highest), -math.log(max(lowest, values[values > 0][0])))]
    removed, added = (interval * np.arange(top + 1) for top in tops)
    return above(np.exp(removed)), below(np.exp(added))
