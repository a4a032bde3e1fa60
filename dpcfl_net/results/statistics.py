"""Tests of a mean against a margin over seeds, their intervals, and Holm's correction."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

# Paired t, not a bootstrap: with 3 to 10 seeds the percentile bootstrap covers too rarely (84 % instead of 95 % with 5 seeds of
# a normal difference), while t is exact for normal differences. tests/reproduce/test_verdicts.py measures its coverage.
Test = Literal["t", "share", "sign"]
LEVEL = 0.95
MOST_SEEDS = 200  # search limit of `seeds_needed`
ROUNDING = 1e-12  # of values up to 1, relative to larger ones: differences of this size are errors of floating point


def p_values(values: Sequence[float], margin: float, test: Test = "t") -> tuple[float, float]:
    """Test whether the mean of independent values is at least a margin.

    Args:
        values: One value per seed. share: shares of a seed's rounds, in [0, 1].
        margin: The margin; in (0, 1) for shares.
        test: "t": Student's t, exact for normal values. "share": a valid bound for independent values in [0, 1], under any
            dependence within a seed; exact for values of 0 and 1. "sign": for the median, ties with the margin are dropped.

    Returns:
        One-sided p-values: of "the mean is at most the margin" and of "it is at least the margin". (1, 1) for fewer than two
        values, or if one is not finite, as of a run that diverged. Values that are equal up to rounding get the sign test instead of t.
    """
    from scipy import stats

    if len(values) < 2 or not all(map(math.isfinite, values)):
        return 1.0, 1.0
    if test == "share":
        return _share(values, margin)
    spread = _spread(values)
    if test == "sign" or spread == 0:
        tie = _rounding([*values, margin])
        above, below = sum(value > margin + tie for value in values), sum(value < margin - tie for value in values)
        draws = above + below
        return float(stats.binom.sf(above - 1, draws, 0.5)), float(stats.binom.sf(below - 1, draws, 0.5))
    t = (statistics.fmean(values) - margin) / (spread / math.sqrt(len(values)))
    return float(stats.t.sf(t, len(values) - 1)), float(stats.t.cdf(t, len(values) - 1))


def _spread(values: Sequence[float]) -> float:
    """Standard deviation; 0 for values that are equal up to rounding, as differences of 80.1 - 79.6 and 70.3 - 69.8 are."""
    return 0.0 if max(values) - min(values) <= _rounding(values) else statistics.stdev(values)


def _rounding(values: Sequence[float]) -> float:
    return ROUNDING * max(1.0, *map(abs, values))


def _share(values: Sequence[float], margin: float) -> tuple[float, float]:
    """Test a mean share; a seed counts as one trial, since its rounds may fail together."""
    from scipy import stats

    n, mean = len(values), statistics.fmean(values)
    if set(values) <= {0, 1}:
        right = int(sum(values))
        return float(stats.binom.sf(right - 1, n, margin)), float(stats.binom.cdf(right, n, margin))
    bound = math.exp(-n * _divergence(mean, margin))
    return (bound, 1.0) if mean > margin else (1.0, bound)


def _divergence(x: float, y: float) -> float:
    """Relative entropy of two coins: its exponent bounds the tail of a mean in [0, 1] (Hoeffding 1963, Theorem 1)."""
    parts = ((x, y), (1 - x, 1 - y))
    return sum(p * math.log(p / q) for p, q in parts if p > 0)


def interval(values: Sequence[float], test: Test = "t") -> tuple[float, float] | None:
    """Compute a two-sided confidence interval of the mean, with coverage LEVEL.

    Args:
        values: One value per seed.
        test: As `p_values`; "share": Clopper-Pearson if every value is 0 or 1.

    Returns:
        Lower and upper end; None if the values do not give one: fewer than two, no spread, one not finite, "sign", or shares
        between 0 and 1.
    """
    from scipy import stats

    n = len(values)
    if test == "share" and n > 1 and set(values) <= {0, 1}:
        found = stats.binomtest(int(sum(values)), n).proportion_ci(LEVEL)
        return float(found.low), float(found.high)
    if test != "t" or n < 2 or not all(map(math.isfinite, values)) or not (spread := _spread(values)):
        return None
    half = stats.t.ppf((1 + LEVEL) / 2, n - 1) * spread / math.sqrt(n)
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values of a family, so that the chance of any false rejection stays below the level.

    Args:
        p_values: p-values of the family.

    Returns:
        Adjusted p-values, in the same order.

    Source: Holm 1979.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda k: p_values[k])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def seeds_needed(values: Sequence[float], margin: float, level: float = LEVEL) -> int | None:
    """Estimate how many seeds decide a comparison by t, if mean and spread stay as measured.

    Args:
        values: Measured values, one per seed.
        margin: The margin.
        level: Level of the interval.

    Returns:
        Number of seeds; None for fewer than two values, no spread, one not finite, or more than MOST_SEEDS.
    """
    from scipy import stats

    if len(values) < 2 or not all(map(math.isfinite, values)) or not (spread := _spread(values)):
        return None
    distance = abs(statistics.fmean(values) - margin)
    counts = range(2, MOST_SEEDS + 1)
    return next((n for n in counts if stats.t.ppf((1 + level) / 2, n - 1) * spread / math.sqrt(n) < distance), None)


def fewest_seeds(margin: float, test: Test, level: float = LEVEL) -> int:
    """Compute the fewest seeds with which a comparison can be above its margin at a level, if every value is as high as can be.

    Args:
        margin: The margin; in (0, 1) for shares.
        test: As `p_values`.
        level: Level of the two-sided test.

    Returns:
        Number of seeds: 2 by t, since two values that are close together can be above any margin.
    """
    if test == "t":
        return 2
    right = margin if test == "share" else 0.5  # chance of the best value of a seed if the mean, or the median, is the margin
    return max(2, math.ceil(math.log((1 - level) / 2) / math.log(right) - 1e-9))
