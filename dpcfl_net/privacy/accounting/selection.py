"""The tight privacy loss distribution of k adaptive bounded-range selections (exponential mechanisms), as one block."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from dpcfl_net.privacy.accounting.composition import Losses, symmetric

# The work grows with the square of a block, and large blocks lose next to nothing by being several.
_LARGEST, _LARGEST_WIDE = 256, 128
_WIDE, _WIDEST = 4.0, 500.0
_ROUNDING = 2.0**-48  # of one step of the recursion, relative; a dozen operations on numbers of one sign


def block_sizes(epsilon: float, count: int) -> dict[int, int]:
    """Split `count` selections of range `epsilon` into blocks: how many blocks there are of each size."""
    if epsilon > _WIDEST:
        return {count: 1}
    largest = _LARGEST if epsilon <= _WIDE else _LARGEST_WIDE
    whole, rest = divmod(count, largest)
    return ({largest: whole} if whole else {}) | ({rest: 1} if rest else {})


@lru_cache(maxsize=32)
def selection_block(epsilon: float, size: int, interval: float) -> Losses:
    """Losses of `size` selections of one range together, chosen adaptively; never better than the truth.

    The divergence of a block, for all selections and all dependence on earlier ones, is at most F_size:
    F_0(y) = (1 - e^y)^+, F_{j+1}(y) = max over 0 < t < E of p_t F_j(y - t) + (1 - p_t) F_j(y - t + E),
    p_t = e^t (1 - e^{t-E}) / (e^t - e^{t-E}) = (1 - e^{t-E}) / (1 - e^{-E}).
    Values between grid points are taken on the chord in e^y, above the convex F_j, and the maximum over t is exact for the
    chords. F_j is of the order of E, and every step keeps its relative precision, so that narrow ranges lose none of it.

    Args:
        epsilon: Range of each selection, > 0.
        size: Number of selections, a key of `block_sizes`.
        interval: Grid interval of the losses.

    Returns:
        The block's distribution. Above a range of 500 it is that of size * epsilon pure differential privacy. The worst
        selections have a mean loss of E - 1 - log E each, so that this is nearly exact.

    Source: Dong, Durfee, Rogers 2020, "Optimal differential privacy composition for exponential mechanisms".
    """
    if epsilon > _WIDEST:
        return _pure(size * epsilon, interval)
    points = _points(epsilon, size)
    for smaller in range(1, size):  # fills the cache from below
        _profile(epsilon, points, smaller)
    return _on_grid(_profile(epsilon, points, size), epsilon / points, interval)


def _points(epsilon: float, size: int) -> int:
    """Grid points to a range: as many as the work allows, which grows with the square of points * size.

    Above a range of 4 they are more the wider it is, up to that, so that the curve neither jumps nor falls.
    """
    if epsilon <= _WIDE:
        return max(64 if size <= 64 else 32, math.ceil(epsilon / 0.04))
    return min(math.ceil(100 * (epsilon / _WIDE) ** 2), 400 if size <= 32 else 200 if size <= 64 else 100)


@lru_cache(maxsize=768)
def _profile(epsilon: float, points: int, size: int) -> np.ndarray:
    """F_size at epsilon * i / points for i = 0, 1, ... up to where it is negligible or zero."""
    if size == 0:
        return np.zeros(points + 1)
    # Hoeffding: a sum of k losses of range E and mean at most k E^2 / 8 passes this with probability below 1e-18.
    top = min(size, math.ceil(size * epsilon / 8 + 4.6 * math.sqrt(size)))
    return _one_more(_profile(epsilon, points, size - 1), epsilon, points, points * top + 1)


def _one_more(profile: np.ndarray, epsilon: float, points: int, size: int) -> np.ndarray:
    """F_{j+1}, (size,), from F_j, both at y = epsilon * i / points >= 0.

    Below zero F(y) = 1 - e^y + e^y F(-y), since exchanging the two inputs maps the class of selections to itself. On one
    interval of the grid let e^t = e^left (1 + v), 0 <= v <= r. With chords A = F_j(y - t) and B = F_j(y - t + E) in 1 / e^t
    and p linear in e^t, p A + (1 - p) B is its value at v = 0 plus c v (s - v) / (1 + v): c >= 0 is taken from the slopes of
    the chords and s from the values at both ends. Its maximum is at v = sqrt(1 + s) - 1, or at the nearer end. No two
    numbers much larger than the result are subtracted.
    """
    width = epsilon / points
    ratio, inverse = math.expm1(width), -math.expm1(-width)
    losses = width * np.arange(points, 0, -1)
    below = np.exp(-losses) * profile[points:0:-1] - np.expm1(-losses)
    extended = np.concatenate((below, profile, np.full(points + size - len(profile), profile[-1])))
    slopes = -np.diff(extended) / inverse
    best = np.zeros(size)
    value = extended[points : points + size]  # t = 0 has p = 1
    for i in range(points):
        near, far = (slice(offset - i, offset - i + size) for offset in (points, 2 * points))
        left = extended[near] - extended[far]
        curvature = slopes[near.start - 1 : near.stop - 1] - slopes[far.start - 1 : far.stop - 1] + left
        curvature *= math.exp(width * i - epsilon) / -math.expm1(-epsilon)
        np.maximum(curvature, 1e-200, out=curvature)  # where it is zero a huge s makes the sum linear
        follows = slice(far.start - 1, far.stop - 1)
        right = extended[near.start - 1 : near.stop - 1] - extended[follows]
        right *= math.expm1(width * (i + 1) - epsilon) / math.expm1(-epsilon) if i + 1 < points else 0.0
        right += extended[follows]
        s = np.maximum((right - value) / curvature * ((1 + ratio) / ratio) + ratio, 0.0)
        v = np.minimum(s / (1 + np.sqrt(1 + s)), ratio)
        np.maximum(best, value + curvature * v * (s - v) / (1 + v), out=best)
        value = right
    return best * (1 + _ROUNDING)


def _on_grid(profile: np.ndarray, width: float, interval: float) -> Losses:
    """The profile, known at multiples of `width` >= 0, carried to multiples of `interval` along its chords; symmetric."""
    top = math.ceil(width * (len(profile) - 1) / interval)
    losses = interval * np.arange(top + 1)
    index = np.minimum((losses / width).astype(np.int64), len(profile) - 2)
    share = np.clip(np.expm1(losses - width * index) / math.expm1(width), 0.0, 1.0)
    return symmetric(profile[index] + share * (profile[index + 1] - profile[index]), interval)


def _pure(loss: float, interval: float) -> Losses:
    """Losses of a mechanism whose loss never passes `loss`, as bad as that allows: randomised response."""
    losses = interval * np.arange(math.ceil(loss / interval) + 1)
    return symmetric(np.maximum(-np.expm1(losses - loss), 0.0) / (1 + math.exp(-loss)), interval)
