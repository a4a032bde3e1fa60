"""Privacy loss distributions on a grid: built from divergences, composed by one Fourier transform, converted to epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

# Fourier coefficients of a composition below e^-80 count as zero: their sum is below the precision of the result.
_NEGLIGIBLE = 80.0
# Octaves around the best exponent for a normal distribution in which Chernoff's bound is searched.
_OCTAVES = 8
# Mass of a tilted composition that may lie on either side of the window: it wraps to the other end, which only adds mass.
_BEYOND = 1e-9
# Bisections of the distance between two grid points.
_HALVINGS = 48
# Contribution of one release to the rounding of the Fourier transforms and of the powers of their coefficients.
_ROUNDING = 1e-15


@dataclass(frozen=True, eq=False)
class Losses:
    """Distribution of one privacy loss on a grid.

    Attributes:
        interval: Distance between grid points.
        lowest: Index of the first grid point; its loss is lowest * interval.
        probabilities: Masses of the grid points, (n,) float64, none negative.
        infinite: Mass of infinite loss.
        tilt: Exponent of a tilted composition.
        log_rounding: Logarithm of the rounding error of the divergence at 0; at epsilon it is e^(-tilt * epsilon) times that.
    """

    interval: float
    lowest: int
    probabilities: np.ndarray
    infinite: float
    tilt: float = 0.0
    log_rounding: float = -math.inf
    _moments: dict[float, float] = field(default_factory=dict)
    _spectra: dict[tuple[int, float], np.ndarray] = field(default_factory=dict)

    @property
    def highest(self) -> int:
        """Index of the last grid point."""
        return self.lowest + len(self.probabilities) - 1

    @cached_property
    def variance(self) -> float:
        """Variance of the finite losses."""
        losses = self._losses()
        mean = float(np.sum(self.probabilities * losses))
        return float(np.sum(self.probabilities * (losses - mean) ** 2))

    def rounding(self, epsilon: float) -> float:
        """Bound the rounding error of the divergence at `epsilon`."""
        return math.exp(min(self.log_rounding - self.tilt * epsilon, 0.0))

    def delta(self, epsilon: float) -> float:
        """Compute the hockey-stick divergence at `epsilon`, which may be negative; never too small."""
        first = max(math.floor(epsilon / self.interval) + 1 - self.lowest, 0)
        gaps = np.maximum(self._losses()[first:] - epsilon, 0.0)
        return self.infinite + self.rounding(epsilon) + float(np.sum(self.probabilities[first:] * -np.expm1(-gaps)))

    def epsilon(self, delta: float) -> float:
        """Compute the smallest epsilon >= 0 whose divergence is at most `delta`, never too small; inf if there is none."""
        low, high = max(self.lowest - 1, 0), max(self.highest, 0)
        shares = -np.expm1(-self.interval * np.arange(1, high - low + 1))

        def finite(index: int) -> float:
            tail = self.probabilities[index + 1 - self.lowest :]
            return float(np.sum(tail * shares[: len(tail)]))

        def excess(index: int) -> float:
            return finite(index) + self.infinite + self.rounding(self.interval * index) - delta

        if excess(high) > 0:
            return math.inf
        if excess(low) <= 0:
            return self.interval * low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if excess(middle) > 0 else (low, middle)
        # Between two grid points the divergence is a - b e^epsilon, plus the bound on rounding.
        tail = self.probabilities[low + 1 - self.lowest :]
        slope, here = float(np.sum(tail * (1 - shares[: len(tail)]))), finite(low) + self.infinite - delta
        near, far = 0.0, self.interval
        for _ in range(_HALVINGS):
            step = (near + far) / 2
            left = here - slope * math.expm1(min(step, 700.0)) + self.rounding(self.interval * low + step)
            near, far = (step, far) if left > 0 else (near, step)
        return self.interval * low + far

    def log_moment(self, exponent: float) -> float:
        """Compute the logarithm of the mean of e^(exponent * loss) over the finite losses; cached for later compositions."""
        if exponent not in self._moments:
            with np.errstate(divide="ignore"):
                terms = np.log(self.probabilities) + exponent * self._losses()
            most = float(np.max(terms))
            self._moments[exponent] = most + math.log(float(np.sum(np.exp(terms - most))))
        return self._moments[exponent]

    def spectrum(self, size: int, tilt: float) -> np.ndarray:
        """Compute the Fourier coefficients of the tilted distribution.

        Args:
            size: Number of points of the transform, to which the distribution is folded.
            tilt: Exponent.

        Returns:
            Coefficients of mass * e^(tilt * loss), scaled to sum to 1, (size // 2 + 1,) complex128.
        """
        from scipy import fft

        found = self._spectra.get((size, tilt))
        if found is None:
            folds = math.ceil(len(self.probabilities) / size)
            padded = np.zeros(folds * size)
            padded[: len(self.probabilities)] = self.probabilities * np.exp(tilt * self._losses() - self.log_moment(tilt))
            found = fft.rfft(padded.reshape(folds, size).sum(axis=0))
            self._spectra.clear()
            self._spectra[size, tilt] = found
        return found

    def _losses(self) -> np.ndarray:
        return self.interval * np.arange(self.lowest, self.highest + 1)


def two_sided(profile: np.ndarray, opposite: np.ndarray, interval: float) -> Losses:
    """Build the distribution whose divergence is the chords, in e^epsilon, between given points of a divergence.

    Divergences are convex in e^epsilon and chords lie above them: the distribution is never better than the mechanism.

    Args:
        profile: Divergence of the two inputs, or an upper bound on it, at the losses 0, interval, 2 * interval, ..., (n,).
        opposite: The same for the inputs exchanged, (m,). With it the divergence below zero is F(-y) = 1 - e^-y + e^-y G(y);
            without the term 1 - e^-y it is as precise as G, and the masses below zero are e^-y times those of the exchanged
            inputs at y.
        interval: Distance between the losses.

    Returns:
        The distribution.

    Source: Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, "Connect the dots", Algorithm 1.
    """
    # At zero both are the total variation, and one number, so that all masses sum to 1.
    both = max(profile[0], opposite[0])
    ours, theirs = (_falling(np.concatenate(([both], side[1:]))) for side in (profile, opposite))
    below = _masses(theirs, interval) * np.exp(-interval * np.arange(1, len(theirs)))
    shrink = math.exp(-interval)
    middle = 1 - ((1 + shrink) * ours[0] - shrink * (ours[1] + theirs[1])) / -math.expm1(-interval)
    masses = np.concatenate((below[::-1], [max(middle, 0.0)], _masses(ours, interval)))
    return Losses(interval, 1 - len(theirs), masses, float(ours[-1]))


def _falling(profile: np.ndarray) -> np.ndarray:
    """Make a divergence in [0, 1] non-increasing by raising the values before a rise, which only rounding causes."""
    return np.maximum.accumulate(np.clip(profile, 0.0, 1.0)[::-1])[::-1]


def _masses(profile: np.ndarray, interval: float) -> np.ndarray:
    """Masses of the grid points above zero, (n - 1,); none negative, which rounding alone could make one."""
    falls = -np.diff(profile)
    masses = falls - math.exp(-interval) * np.append(falls[1:], 0.0)
    return np.maximum(masses, 0.0) / -math.expm1(-interval)


def symmetric(profile: np.ndarray, interval: float) -> Losses:
    """Build the distribution of a mechanism whose two inputs may be exchanged; arguments as in `two_sided`."""
    return two_sided(profile, profile, interval)


def compose(parts: Sequence[tuple[Losses, int]], cut: float, tilt: float = 0.0) -> Losses:
    """Compose independent losses on one grid, by one Fourier transform of the length of the result's window.

    The window's upper end excludes at most `cut`, by Chernoff's bound; that counts as infinite loss, and the transform wraps it
    into the window, which only adds mass. Masses are multiplied by e^(tilt * loss) before the transform and divided by it
    afterwards, so that rounding is small relative to the masses around which the tilted composition lies, and not relative to 1.

    With K the logarithm of the mean of e^(tilt * loss), rounding of the coefficients by a share r moves the divergence at
    epsilon by r e^(K - tilt epsilon) times the largest (1 - e^-x) e^(-tilt x), which is tilt^tilt / (1 + tilt)^(1 + tilt);
    this bound is added wherever the result is read.

    Args:
        parts: Pairs of a distribution and the number of times that it is composed.
        cut: Mass above the window that counts as infinite loss.
        tilt: Exponent of the tilt, from `best_tilt`; 0 if the divergence will be read everywhere.

    Returns:
        The composition inside the window. Epsilon below the window is given as its lower end.
    """
    from scipy import fft

    ((first, count), *others) = parts
    if count == 1 and not others:
        return first
    low, high = _window(parts, cut, tilt)
    size = fft.next_fast_len(high - low + 1, real=True)
    masses = np.roll(fft.irfft(_product(parts, size, tilt), size), _start(parts, low) % size)[: high - low + 1]
    moment = _log_moment(parts, tilt) if tilt else 0.0
    # Far below the middle this is rounding times a huge number; the only known bound on a mass there is 1.
    masses *= np.exp(np.minimum(moment - tilt * first.interval * np.arange(low, high + 1), 700.0))
    infinite = cut - math.expm1(sum(count * math.log1p(-losses.infinite) for losses, count in parts))
    releases = sum(count for _, count in parts)
    rounding = math.log(_ROUNDING * (releases + 1)) + moment + _conversion(tilt)
    return Losses(first.interval, low, np.clip(masses, 0.0, 1.0), infinite, tilt, rounding)


def best_tilt(parts: Sequence[tuple[Losses, int]], delta: float) -> float:
    """Find the exponent whose moment gives the smallest bound on epsilon.

    Args:
        parts: Pairs of a distribution and the number of times that it is composed.
        delta: Target delta, in (0, 1).

    Returns:
        The exponent.

    Source: Canonne, Kamath, Steinke 2020, Proposition 12.
    """
    return _minimum(parts, delta, lambda t: (_log_moment(parts, t) - math.log(delta) + _conversion(t)) / t)[1]


def _conversion(tilt: float) -> float:
    """Logarithm of the largest (1 - e^-x) e^(-tilt x) over x > 0."""
    return -tilt * math.log1p(1 / tilt) - math.log1p(tilt) if tilt else 0.0


def _start(parts: Sequence[tuple[Losses, int]], low: int) -> int:
    """Distance of the lowest loss of the composition from the window's lower end."""
    return sum(count * losses.lowest for losses, count in parts) - low


def _product(parts: Sequence[tuple[Losses, int]], size: int, tilt: float) -> np.ndarray:
    """Fourier coefficients (size // 2 + 1,) of the tilted composition."""
    kept = np.ones(size // 2 + 1, dtype=bool)
    for losses, count in parts:
        coefficients = losses.spectrum(size, tilt)
        kept &= coefficients.real**2 + coefficients.imag**2 > math.exp(-2 * _NEGLIGIBLE / count)
    product = np.zeros(size // 2 + 1, dtype=np.complex128)
    product[kept] = 1.0
    for losses, count in parts:
        product[kept] *= losses.spectrum(size, tilt)[kept] ** count
    return product


def _window(parts: Sequence[tuple[Losses, int]], cut: float, tilt: float) -> tuple[int, int]:
    """Index of the first and the last grid point of the composition that are kept."""
    interval = parts[0][0].interval
    bottom, top = -_chernoff(parts, -1.0, cut), _chernoff(parts, 1.0, cut)
    if tilt:
        # Epsilon is not below zero, and not below what all but `cut` of the losses exceed.
        bottom = min(_edge(parts, tilt, [0.0, *(-tilt * 2.0 ** (step / 2) for step in range(-4, 5))]), max(bottom, 0.0))
        top = max(top, -_edge(parts, tilt, [tilt * 2.0 ** (step / 2) for step in range(1, 7)]))
    low = max(sum(count * losses.lowest for losses, count in parts), math.floor(bottom / interval))
    high = min(sum(count * losses.highest for losses, count in parts), math.ceil(top / interval))
    return low, max(low, high)


def _edge(parts: Sequence[tuple[Losses, int]], tilt: float, others: Sequence[float]) -> float:
    """Loss below which at most `_BEYOND` of the tilted composition lies; with exponents above the tilt, -loss above which."""
    total = _log_moment(parts, tilt) + math.log(_BEYOND)
    return max((total - _log_moment(parts, other)) / abs(tilt - other) for other in others)


def _log_moment(parts: Sequence[tuple[Losses, int]], exponent: float) -> float:
    return sum(count * losses.log_moment(exponent) for losses, count in parts)


def _chernoff(parts: Sequence[tuple[Losses, int]], sign: float, mass: float) -> float:
    """Bound that sign * loss exceeds with probability at most `mass` (Chernoff)."""
    return _minimum(parts, mass, lambda exponent: (_log_moment(parts, sign * exponent) - math.log(mass)) / exponent)[0]


def _minimum(parts: Sequence[tuple[Losses, int]], mass: float, bound: Callable[[float], float]) -> tuple[float, float]:
    """Minimum of a bound over exponents in half octaves, searched from the best one for a normal distribution; and its exponent."""
    variance = sum(count * losses.variance for losses, count in parts)
    start = round(2 * math.log2(math.sqrt(-2 * math.log(mass) / variance))) if variance > 0 else 0
    best = bound(2.0 ** (start / 2)), 2.0 ** (start / 2)
    for step in (1, -1):
        for at in range(start + step, start + 2 * _OCTAVES * step, step):
            if (following := (bound(2.0 ** (at / 2)), 2.0 ** (at / 2))) >= best:
                break
            best = following
    return best
