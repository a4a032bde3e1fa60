"""Exponential-mechanism selections of bounded range: adaptive ones composed as one block, with the tight distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Self

import numpy as np

from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.accounting.composition import Losses, symmetric
from dpcfl_net.privacy.events.base import LossSpread, Mechanism, check_count, check_number

MIN_RANGE = 1e-100  # smaller ranges above 0 are counted as this

# The work grows with the square of a block's size, and splitting a large block loses next to nothing.
_LARGEST, _LARGEST_WIDE = 256, 128
_WIDE, _WIDEST = 4.0, 500.0
_ROUNDING = 2.0**-48  # of one step of the recursion, relative; a dozen operations on numbers of one sign


@dataclass(frozen=True)
class BoundedRangeSelection(Mechanism):
    """Selections by the exponential mechanism, in any order among the other releases.

    Args:
        epsilon: Bound on the range of the log-probability ratios of one selection under the adjacency that is accounted for.
        count: Number of selections.

    Raises:
        ValueError: If an argument is out of range.
    """

    epsilon: float
    count: int

    rank: ClassVar[int] = 2
    runs_field: ClassVar[str | None] = "count"
    maxima: ClassVar[dict[str, float]] = {"epsilon": 1e6, "count": 1e9}
    noisy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= check_number("epsilon", self.epsilon) < math.inf:
            raise ValueError(f"epsilon must be non-negative and finite, got {self.epsilon!r}")
        check_count("count", self.count)

    @property
    def weight(self) -> float:
        """See `Event`."""
        return self.count * self.epsilon**2 / 4

    def counted(self) -> Self | None:
        """See `Event`."""
        return replace(self, epsilon=max(self.epsilon, MIN_RANGE)) if self.count and self.epsilon else None

    def losses(self, adjacency: Adjacency, interval: float) -> list[tuple[tuple[Losses, ...], int]]:
        """See `Composable`. All selections of one range form one block, in any order among the other releases.

        Let T be a step of the recursion in `selection_block`, and C F(y) the mean of F(y - loss) over the losses of the pair of
        another release. T C F <= C T F, since a maximum of means is at most the mean of maxima: a server that knows the other
        release in advance can only choose better selections. The block of another range is such a pair, and such means commute.
        So, from the last selection backwards, each one joins the block of its range.
        """
        blocks = block_sizes(self.epsilon, self.count)
        return [((selection_block(self.epsilon, size, interval),), n) for size, n in blocks.items()]

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """See `Composable`."""
        return self.count * _renyi_of_one(self.epsilon, tuple(orders))

    def total_variation(self, adjacency: Adjacency) -> float:
        """See `Composable`."""
        return self.count * math.tanh(self.epsilon / 4)

    def spread(self, adjacency: Adjacency) -> LossSpread:
        """See `Composable`."""
        blocks = block_sizes(self.epsilon, self.count)
        return LossSpread(self.count * self.epsilon**2 / 4, sum(blocks.values()), 2 * max(blocks) * self.epsilon)


def block_sizes(epsilon: float, count: int) -> dict[int, int]:
    """Split `count` selections of range `epsilon` into blocks; returns the number of blocks of each size."""
    if epsilon > _WIDEST:
        return {count: 1}
    largest = _LARGEST if epsilon <= _WIDE else _LARGEST_WIDE
    whole, rest = divmod(count, largest)
    return ({largest: whole} if whole else {}) | ({rest: 1} if rest else {})


@lru_cache(maxsize=32)
def selection_block(epsilon: float, size: int, interval: float) -> Losses:
    """Compute the loss distribution of `size` adaptive selections of one range together, never optimistic.

    The divergence of a block, for all selections and all dependence on earlier ones, is at most F_size:
    F_0(y) = (1 - e^y)^+, F_{j+1}(y) = max over 0 < t < E of p_t F_j(y - t) + (1 - p_t) F_j(y - t + E),
    p_t = e^t (1 - e^{t-E}) / (e^t - e^{t-E}) = (1 - e^{t-E}) / (1 - e^{-E}).
    Values between grid points are taken on the chord in e^y, above the convex F_j, and the maximum over t is exact for the
    chords. F_j is of the order of E, and every step keeps its relative precision, also for narrow ranges.

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
    """Grid points per range: as many as are affordable, since the work grows with the square of points * size.

    Above a range of 4 their number grows with the range up to that limit, so that the curve neither jumps nor falls.
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
    # Limited before it is an integer: over a narrow selection the quotient may be above 2**63.
    index = np.minimum(losses / width, len(profile) - 2).astype(np.int64)
    share = np.clip(np.expm1(losses - width * index) / math.expm1(width), 0.0, 1.0)
    return symmetric(profile[index] + share * (profile[index + 1] - profile[index]), interval)


def _pure(loss: float, interval: float) -> Losses:
    """Worst losses of a mechanism whose loss is at most `loss`: randomised response."""
    losses = interval * np.arange(math.ceil(loss / interval) + 1)
    below = np.minimum(losses - loss, 0.0)  # the last one of the grid may be above `loss`
    return symmetric(-np.expm1(below) / (1 + math.exp(-loss)), interval)


@lru_cache(maxsize=64)
def _renyi_of_one(epsilon: float, orders: tuple[float, ...]) -> np.ndarray:
    return selection_renyi(epsilon, np.array(orders))


def selection_renyi(epsilon: float, orders: np.ndarray) -> np.ndarray:
    """Compute Renyi divergences of one selection, which the library does not have.

    The largest of log(w e^{at} + (1 - w) e^{a(t - E)}) / (a - 1), w = (1 - e^{t-E}) / (e^t - e^{t-E}), over 0 < t < E,
    never above min(a E^2 / 8, E).

    Args:
        epsilon: Range E, > 0.
        orders: Renyi orders above 1.

    Returns:
        Divergences, (len(orders),) float64.

    Source: Dong, Durfee, Rogers 2020 (the extreme pairs); Bun, Steinke 2016 (the bound).
    """
    low, high = np.zeros_like(orders), np.full_like(orders, epsilon)
    for _ in range(2):
        t = low + (high - low) * np.linspace(0, 1, 1001)[:, None]
        values = _two_point_divergence(t, epsilon, orders)
        best = t[np.argmax(values, axis=0), np.arange(len(orders))]
        width = (high - low) / 1000
        low, high = np.maximum(best - width, 0.0), np.minimum(best + width, epsilon)
    # For a narrow range the rounding of the logarithms exceeds the divergence, and only the bound remains.
    rounding = 2e-15 * (1 + orders * epsilon) / (orders - 1)
    return np.minimum(np.max(values, axis=0) + rounding, np.minimum(orders * epsilon**2 / 8, epsilon))


def _two_point_divergence(t: np.ndarray, epsilon: float, orders: np.ndarray) -> np.ndarray:
    """Divergences of the pair whose losses are t (n, len(orders)) and t - epsilon."""
    # w and 1 - w are quotients without cancellation or overflow: at t = 0 and t = epsilon they are exactly 0 and 1.
    scale = np.expm1(-epsilon)
    with np.errstate(divide="ignore"):
        rising = np.log(np.expm1(t - epsilon) / scale) + (orders - 1) * t
        falling = np.log(np.expm1(-t) / scale) + orders * (t - epsilon)
    return np.logaddexp(rising, falling) / (orders - 1)
