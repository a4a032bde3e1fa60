"""Exact distributions of noisy counts under a claim, tests that use them, and the samples that a test needs.

A count of records in a batch plus Gaussian noise has a known distribution. Its distribution function turns measured values into
independent standard normal scores, so that every test below holds exactly for any number of samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpcfl_net.attacks.conformance.claim import Claim
from dpcfl_net.attacks.conformance.findings import LEVEL, MISS, Finding

_NEGLIGIBLE = 1e-18
_MOST_SAMPLES = 10**7
_PART = 2**22  # numbers of one intermediate array


@dataclass(frozen=True)
class NoisyCount:
    """Distribution of step * count + noise.

    Attributes:
        counts: Values of the count, (k,).
        masses: Their probabilities, (k,).
        step: Contribution of one.
        deviation: Deviation of the noise.
    """

    counts: np.ndarray
    masses: np.ndarray
    step: float
    deviation: float

    @property
    def mean(self) -> float:
        """Mean of the count."""
        return float(self.counts @ self.masses)

    @property
    def variance(self) -> float:
        """Variance of the count, without noise."""
        return float(self.masses @ (self.counts - self.mean) ** 2)

    @property
    def share(self) -> float:
        """Share of the count in the variance: correlation of two values with the same count and independent noise."""
        counted = self.step**2 * self.variance
        return counted / (counted + self.deviation**2)

    def scores(self, values: np.ndarray) -> np.ndarray:
        """Normal scores: independent N(0, 1) for independent values of this distribution; the shape of `values`."""
        from scipy.special import ndtr, ndtri

        found = []
        for part in np.array_split(values.ravel(), max(1, values.size * len(self.counts) // _PART)):
            deviations = (part[:, None] - self.step * self.counts) / self.deviation
            # Each tail from its own side: 1 - F loses all digits where F is almost 1.
            below, above = ndtr(deviations) @ self.masses, ndtr(-deviations) @ self.masses
            low, high = ndtri(np.clip(below, 1e-300, 0.5)), -ndtri(np.clip(above, 1e-300, 0.5))
            found.append(np.where(below < above, low, high))
        return np.concatenate(found).reshape(values.shape)

    def times(self, sums: int) -> NoisyCount:
        """Distribution of the sum of independent values."""
        total, power, left = (0, np.ones(1)), (0, self.masses), sums
        while left:
            if left % 2:
                total = _sum(total, power)
            left //= 2
            if left:
                power = _sum(power, power)
        first, masses = total
        counts = float(self.counts[0]) * sums + first + np.arange(len(masses))
        return NoisyCount(counts, masses, self.step, self.deviation * math.sqrt(sums))


def _sum(one: tuple[int, np.ndarray], other: tuple[int, np.ndarray]) -> tuple[int, np.ndarray]:
    """First value and masses of the sum of two counts, without negligible ends."""
    counts, masses = _likely(np.convolve(one[1], other[1]))
    return one[0] + other[0] + int(counts[0]), masses


def _likely(masses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts from 0 on and their masses, without negligible ends; counts have no gaps, so that sums are convolutions."""
    kept = np.flatnonzero(masses > _NEGLIGIBLE)
    counts = np.arange(kept[0], kept[-1] + 1)
    return counts, masses[counts]


def records_in_batch(claim: Claim, records: int, step: float, noises: int = 1) -> NoisyCount:
    """Number of `records` of the data set that are in the batch of one step, with noise.

    Args:
        claim: The claim.
        records: Number of records that are counted.
        step: Contribution of each, in clip norms.
        noises: Number of coordinates that were added up.
    """
    from scipy.stats import binom, hypergeom

    if claim.sampling in ("poisson", "allocation"):
        masses = binom.pmf(np.arange(records + 1), records, claim.rate)
    else:
        masses = hypergeom.pmf(np.arange(records + 1), claim.records, records, claim.batch)
    counts, masses = _likely(masses)
    return NoisyCount(counts.astype(float), masses, step, claim.noise_multiplier * math.sqrt(noises))


def allocated_records(claim: Claim, records: int, steps: int, step: float, noises: int = 1) -> NoisyCount:
    """Number of batches with one of `records`, over the first steps of a run with a random allocation or a shuffle, with noise.

    Args:
        claim: The claim.
        records: Number of records that are counted.
        steps: Steps from the start of an epoch.
        step: Contribution of each, in clip norms.
        noises: Number of coordinates that were added up.
    """
    from scipy.stats import binom, hypergeom

    epochs, begun = divmod(steps, claim.epoch)
    if claim.sampling == "shuffle":
        masses = hypergeom.pmf(np.arange(records + 1), claim.records, records, begun * claim.batch)
    else:
        masses = binom.pmf(np.arange(records + 1), records, begun / claim.epoch)
    counts, masses = _likely(masses)
    deviation = claim.noise_multiplier * math.sqrt(noises * steps)
    return NoisyCount((epochs * records + counts).astype(float), masses, step, deviation)


def constant(count: float, claim: Claim, step: float, noises: int) -> NoisyCount:
    """A count that does not vary, with the noise of `noises` coordinates or steps."""
    return NoisyCount(np.array([count]), np.ones(1), step, claim.noise_multiplier * math.sqrt(noises))


def spread(what: str, scores: np.ndarray, *, lower_only: bool = False) -> Finding:
    """Test the variance of normal scores (chi-square); the value is measured over claimed deviation."""
    from scipy.stats import chi2

    n, share = scores.size, LEVEL if lower_only else LEVEL / 2
    high = None if lower_only else math.sqrt(chi2.isf(share, n) / n)
    return Finding(what, math.sqrt(float((scores**2).mean())), math.sqrt(chi2.ppf(share, n) / n), high)


def centre(what: str, score: float) -> Finding:
    """Test one normal score, two-sided."""
    from scipy.stats import norm

    limit = float(norm.isf(LEVEL / 2))
    return Finding(what, score, -limit, limit)


def correlation(what: str, first: np.ndarray, second: np.ndarray) -> Finding:
    """Test the correlation of two sets of independent normal scores, two-sided."""
    from scipy.stats import beta

    a, b = first.ravel(), second.ravel()
    limit = math.sqrt(float(beta.isf(LEVEL, 0.5, (a.size - 1) / 2)))
    value = float(a @ b) / math.sqrt(float(a @ a) * float(b @ b) or 1.0)
    return Finding(what, value, -limit, limit)


def successive(what: str, values: np.ndarray, axis: int) -> Finding:
    """Test the correlation of the first and second, third and fourth, ... of independent normal scores along an axis."""
    rows = np.moveaxis(values, axis, 0)
    even = len(rows) // 2 * 2
    return correlation(what, rows[0:even:2], rows[1:even:2])


def samples_for(ratio: float, miss: float = MISS) -> int:
    """Smallest number of normal scores whose variance test finds a variance of `ratio` instead of 1.

    Args:
        ratio: True over claimed variance.
        miss: Allowed probability that the test does not find it.

    Returns:
        The number; at most 10^7, which is also the answer for a ratio too close to 1.
    """
    low, high = 1, 2
    while misses(high, ratio) > miss and high < _MOST_SAMPLES:
        low, high = high, 2 * high
    while high - low > 1 and high < _MOST_SAMPLES:
        middle = (low + high) // 2
        low, high = (low, middle) if misses(middle, ratio) <= miss else (middle, high)
    return min(high, _MOST_SAMPLES)


def pairs_for(correlated: float, miss: float = MISS) -> int:
    """Smallest number of pairs of normal scores whose test of `correlation` finds a correlation; at most 10^7."""
    pairs = 4
    while misses_correlation(pairs, correlated) > miss and pairs < _MOST_SAMPLES:
        pairs = math.ceil(1.1 * pairs)
    return min(pairs, _MOST_SAMPLES)


def misses_correlation(pairs: int, correlated: float) -> float:
    """Probability that the test of `correlation` does not find a correlation above 0 (Fisher 1921: its area tangent is normal)."""
    from scipy.stats import beta, norm

    if pairs < 4:
        return 1.0
    limit = math.sqrt(float(beta.isf(LEVEL, 0.5, (pairs - 1) / 2)))
    return float(norm.cdf((math.atanh(limit) - math.atanh(min(correlated, 1 - 1e-9))) * math.sqrt(pairs - 2)))


def misses(samples: int, ratio: float) -> float:
    """Probability that the variance test of `spread` does not find a variance of `ratio` instead of 1."""
    from scipy.stats import chi2

    if ratio < 1:
        return float(chi2.sf(chi2.ppf(LEVEL / 2, samples) / ratio, samples)) if ratio > 0 else 0.0
    return float(chi2.cdf(chi2.isf(LEVEL / 2, samples) / ratio, samples))
