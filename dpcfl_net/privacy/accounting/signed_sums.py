"""Sums of independent numbers of both signs, on a grid that is finest at zero; each rounding is a mean-preserving spread."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

_CUT = 1e-22  # mean of a term that may be cut off at the ends; `excess` counts what is cut off at the upper one
_FINENESS = 8.0  # the finest level reaches at least to the mean of the positive numbers over this


@dataclass(frozen=True, eq=False)
class SignedSum:
    """Distribution of a sum of independent numbers, rounded upwards in convex order.

    For the true sum T, the distribution S here, and every real a,

        E max(T - a, 0) <= E max(S - a, 0) + excess.

    Proof: a number between two points is moved to one of them, at random with the same mean. By Jensen's inequality, given the
    other terms, this lowers no mean of a convex function of the sum. A number below the lowest point is raised to it, which raises
    max(T - a, 0). A number above the highest point c is lowered to c, which lowers max(T - a, 0) by at most max(x - c, 0) for a term
    x, whose mean is added to `excess`.

    Level k has the points n * 2^k * unit, with m <= abs(n) < 2m, and level 0 all with abs(n) < 2m. Points are exact floating-point
    numbers. All masses are sums of products of non-negative numbers, so that rounding has a small relative error in each.

    Attributes:
        exponent: log2 of `unit`.
        levels: Masses, (4m - 1,) float64 each, of n = 1 - 2m to 2m - 1; zero for abs(n) < m above level 0.
        terms: Number of terms.
        excess: Bound on the mean above the upper end.
    """

    exponent: int
    levels: tuple[np.ndarray, ...]
    terms: int
    excess: float

    @property
    def resolution(self) -> int:
        """Points of a level on one side, m."""
        return (len(self.levels[0]) + 1) // 4

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all points, level by level, and their masses, (n,) float64 each."""
        steps = _steps(self.resolution)
        scaled = np.concatenate([steps * 2.0**k for k in range(len(self.levels))])
        return scaled * 2.0**self.exponent, np.concatenate(self.levels)

    def plus(self, other: SignedSum) -> SignedSum:
        """Add an independent sum of the same resolution; this object for the sum with an independent copy."""
        ours, theirs = self, other
        while ours.exponent < theirs.exponent:
            ours = ours._raised()
        while theirs.exponent < ours.exponent:
            theirs = theirs._raised()
        return replace(
            ours, levels=ours._convolved(theirs), terms=self.terms + other.terms, excess=self.excess + other.excess
        ).trimmed()

    def trimmed(self) -> SignedSum:
        """Without levels that are finer than needed, and without levels of negligible mean at the ends."""
        found, m = self, self.resolution
        values, masses = self.points()
        above = values > 0
        scale = float(values[above] @ masses[above]) / max(float(masses[above].sum()), 1e-300)
        while len(found.levels) > 1 and _FINENESS * 2 * m * 2.0**found.exponent <= scale:
            found = found._raised()
        levels, steps = list(found.levels), _steps(m)
        excess, allowed = found.excess, _CUT * self.terms
        while len(levels) > 1:
            # Moved to the last point of the level below, n = 2m - 1, whose unit is half as large.
            up, down = (levels[-1] * (side * steps > 0) for side in (1, -1))
            gaps = (2 * np.abs(steps) - (2 * m - 1)) * 2.0 ** (found.exponent + len(levels) - 2)
            lost = float(up @ gaps)
            if lost + float(down @ gaps) > allowed:
                break
            excess, allowed = excess + lost, allowed - lost
            levels.pop()
            levels[-1] = levels[-1].copy()
            levels[-1][-1] += up.sum()
            levels[-1][0] += down.sum()
        return replace(found, levels=tuple(levels), excess=excess)

    def _convolved(self, other: SignedSum) -> tuple[np.ndarray, ...]:
        """Levels of the sum, for equal units: for each k the pairs whose larger level is k, on the grid of level k."""
        m, size = self.resolution, max(len(self.levels), len(other.levels))
        nothing = np.zeros(4 * m - 1)
        products = np.zeros((size, 8 * m - 3))
        ours, theirs = nothing, nothing  # all lower levels, on the grid of level k
        for k in range(size):
            own, their = (each.levels[k] if k < len(each.levels) else nothing for each in (self, other))
            _add_product(products[k], own, theirs + their)
            _add_product(products[k], ours, their)
            ours = _inner(_coarser(ours + own), 4 * m - 1)
            theirs = ours if other is self else _inner(_coarser(theirs + their), 4 * m - 1)
        found = np.zeros((size + 1, 4 * m - 1))
        near = products[:, 2 * m - 1 : 6 * m - 2].copy()
        products[:, 2 * m - 1 : 6 * m - 2] = 0
        found[1:] = _coarser(products)
        for k in reversed(range(1, size)):
            # Points near zero belong to finer levels, which have them.
            near[k - 1, 1:-1:2] += near[k, m : 3 * m - 1]
            near[k, m : 3 * m - 1] = 0
        found[:-1] += near
        return tuple(found)

    def _raised(self) -> SignedSum:
        """The two finest levels merged into one, of twice the unit."""
        merged = _inner(_coarser(self.levels[0]), len(self.levels[0]))
        if len(self.levels) > 1:
            merged = merged + self.levels[1]
        return replace(self, exponent=self.exponent + 1, levels=(merged, *self.levels[2:]))


def _steps(m: int) -> np.ndarray:
    return np.arange(1 - 2 * m, 2 * m)


def _add_product(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """Add a convolution of masses around zero; zeros at both ends are left out."""
    first, second = np.flatnonzero(a), np.flatnonzero(b)
    if len(first) and len(second):
        start = first[0] + second[0]
        part = np.convolve(a[first[0] : first[-1] + 1], b[second[0] : second[-1] + 1])
        total[start : start + len(part)] += part


def _coarser(masses: np.ndarray) -> np.ndarray:
    """Masses around zero on every second point, along the last axis; a point between two gives half of its mass to each."""
    middle = masses.shape[-1] // 2
    reach = (middle + 1) // 2
    even, odd = masses[..., middle % 2 :: 2], masses[..., 1 - middle % 2 :: 2] / 2
    found = np.zeros((*masses.shape[:-1], 2 * reach + 1))
    found[..., reach - middle // 2 : reach + middle // 2 + 1] = even
    first, count = reach - (middle + 1) // 2, odd.shape[-1]
    found[..., first : first + count] += odd
    found[..., first + 1 : first + 1 + count] += odd
    return found


def _inner(masses: np.ndarray, length: int) -> np.ndarray:
    """The same masses around zero in a longer array."""
    found = np.zeros(length)
    start = (length - len(masses)) // 2
    found[start : start + len(masses)] = masses
    return found


def sum_of(one: SignedSum, terms: int) -> SignedSum:
    """Add independent copies of a number.

    Args:
        one: Distribution of the number.
        terms: Number of copies, at least 1.
    """
    total, power = None, one.trimmed()
    while terms:
        if terms & 1:
            total = power if total is None else total.plus(power)
        terms >>= 1
        if terms:
            power = power.plus(power)
    assert total is not None
    return total
