"""Lower bounds on epsilon from canary scores: by guesses, by mu-GDP, by the tail; and the claimed trade-off.

Every bound holds with confidence 1 - alpha; each function states its assumptions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dpcfl_net.core.types import Event
from dpcfl_net.privacy.accounting.accountant import deltas

SHARES = (0.01, 0.02, 0.04, 0.10, 0.20)  # shares of canaries guessed in `by_guesses`
TAIL = 1e-6  # probability that an empty slot exceeds the threshold of `Tail`
MOST = 100.0  # largest bound reported
_EPSILONS = np.concatenate([np.arange(0.0, 12.0, 0.02), np.arange(12.0, 40.0, 0.25)])


@dataclass(frozen=True)
class Errors:
    """Error counts of the test "score above 0: the canary is in"."""

    false_positives: int
    outs: int
    false_negatives: int
    ins: int

    @classmethod
    def of(cls, scores: np.ndarray, bits: np.ndarray) -> Errors:
        """Count errors for scores (n,) and bits (n,) bool; the threshold is fixed in advance."""
        said = scores > 0
        return cls(int((said & ~bits).sum()), int((~bits).sum()), int((~said & bits).sum()), int(bits.sum()))

    def at_most(self, alpha: float) -> tuple[float, float]:
        """Return upper limits of false positive and false negative rate, jointly with confidence 1 - alpha (Clopper, Pearson 1934)."""
        return (
            at_most(self.false_positives, self.outs, alpha / 2),
            at_most(self.false_negatives, self.ins, alpha / 2),
        )


def at_most(hits: int, trials: int, alpha: float) -> float:
    """Return the Clopper-Pearson upper limit of a rate; 1 without trials."""
    from scipy.stats import beta

    return 1.0 if hits >= trials else float(beta.ppf(1 - alpha, hits + 1, trials - hits))


def at_least(hits: int, trials: int, alpha: float) -> float:
    """Return the Clopper-Pearson lower limit of a rate."""
    return 1.0 - at_most(trials - hits, trials, alpha)


def by_guesses(scores: np.ndarray, bits: np.ndarray, delta: float, alpha: float) -> float:
    """Bound epsilon by the number of correct guesses.

    The r/2 highest scores are guessed in and the r/2 lowest out, for each share r of `SHARES`, with Bonferroni correction. Assumes
    independent fair bits, and nothing about scores or mechanism.

    Args:
        scores: (n,) scores.
        bits: (n,) bool; whether each canary is in.
        delta: Delta.
        alpha: 1 - confidence.

    Source: Steinke, Nasr, Jagielski 2023, Theorem 5.2 and the p-value of its proof.
    """
    order = np.argsort(scores, kind="stable")
    found = 0.0
    for share in SHARES:
        half = max(1, round(share * len(scores) / 2))
        right = int((~bits[order[:half]]).sum() + bits[order[-half:]].sum())
        found = max(found, _guessed(len(scores), 2 * half, right, delta, alpha / len(SHARES)))
    return found


def _guessed(canaries: int, guesses: int, right: int, delta: float, alpha: float) -> float:
    """Largest epsilon that the number of correct guesses refutes."""
    return _largest(lambda epsilon: _guess_p_value(canaries, guesses, right, epsilon, delta) < alpha)


def _guess_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound on the probability of at least `right` correct of `guesses` guesses under (epsilon, delta)-DP."""
    from scipy.stats import binom

    accuracy = 1 / (1 + math.exp(-epsilon))
    short = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, accuracy))  # P[right > B >= right - i], i = 1..right
    worst = float((short / np.arange(1, right + 1)).max(initial=0.0))
    return min(1.0, float(binom.sf(right - 1, guesses, accuracy)) + 2 * canaries * delta * worst)


def by_gdp(errors: Errors, delta: float, alpha: float) -> float:
    """Bound epsilon by the mu-GDP curve through the upper limits of both error rates.

    Assumes independent canaries (isotropic noise, empty slots elsewhere) and a Gaussian trade-off curve; for another curve this is a
    bound on mu and an estimate of epsilon.

    Source: Dong, Roth, Su 2022.
    """
    from scipy.stats import norm

    false_positive, false_negative = errors.at_most(alpha)
    return gdp_epsilon(float(-norm.ppf(false_positive) - norm.ppf(false_negative)), delta)


def gdp_epsilon(mu: float, delta: float) -> float:
    """Return epsilon at delta of a mu-GDP mechanism (Dong, Roth, Su 2022, Corollary 2.13); 0 for mu <= 0."""
    from scipy.stats import norm

    if not mu > 0:
        return 0.0

    def above(epsilon: float) -> bool:
        tail = math.exp(min(epsilon + norm.logcdf(-epsilon / mu - mu / 2), 0.0))
        return bool(norm.cdf(-epsilon / mu + mu / 2) - tail > delta)

    return _largest(above)


def _largest(holds: Callable[[float], bool]) -> float:
    """Largest epsilon in [0, MOST] that satisfies a monotone condition; 0 if none does."""
    if not holds(0.0):
        return 0.0
    low, high = 0.0, MOST
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Tail:
    """Number of inserted canaries whose total exceeds a threshold that an empty slot exceeds with probability `TAIL`."""

    hits: int
    ins: int

    @classmethod
    def of(cls, totals: np.ndarray, bits: np.ndarray) -> Tail:
        """Count from totals: per canary the sum over all steps, divided by the deviation of the stated noise in it.

        Assumes Gaussian noise; if the empty slots show a larger deviation than stated, theirs is used.

        Args:
            totals: (n,).
            bits: (n,) bool.
        """
        from scipy.stats import norm

        measured = math.sqrt(float(np.mean(totals[~bits] ** 2))) if (~bits).any() else math.inf
        return cls(int((totals[bits] > norm.isf(TAIL) * max(1.0, measured)).sum()), int(bits.sum()))

    def at_least(self, alpha: float) -> float:
        """Return the lower limit of the true positive rate."""
        return at_least(self.hits, self.ins, alpha)

    def epsilon(self, delta: float, alpha: float) -> float:
        """Bound epsilon by: true positive rate <= e^epsilon * TAIL + delta; finds mechanisms that reveal a few records completely."""
        surplus = self.at_least(alpha) - delta
        return min(MOST, math.log(surplus / TAIL)) if surplus > TAIL else 0.0


@dataclass(frozen=True)
class Noise:
    """Sum of squares of a number of sums over empty slots, in units of the stated variance."""

    squares: float
    sums: int

    @property
    def ratio(self) -> float:
        """Measured over stated deviation of the noise."""
        return math.sqrt(self.squares / self.sums) if self.sums else math.nan

    def too_little(self, alpha: float) -> bool:
        """Return True if the stated noise gives so small a sum with probability below alpha (chi-square; independent Gaussian noise)."""
        from scipy.stats import chi2

        return bool(self.sums and chi2.cdf(self.squares, self.sums) < alpha)


@dataclass(frozen=True)
class TradeOff:
    """Claimed trade-off of every test on one record: delta at many epsilons."""

    epsilons: np.ndarray
    deltas: np.ndarray

    @classmethod
    def of(cls, plans: Sequence[Sequence[Event]]) -> TradeOff:
        """Compute the weakest claim of several clients' events, under zero-out."""
        return cls(_EPSILONS, np.max([deltas(events, list(_EPSILONS)) for events in plans], axis=0))

    def refuted(self, false_positive: float, false_negative: float) -> bool:
        """Return True if such error rates violate a + e^epsilon b >= 1 - delta, in either order, for some epsilon."""
        return false_negative < float(self.least_negatives(np.array([false_positive]))[0])

    def least_negatives(self, false_positives: np.ndarray) -> np.ndarray:
        """Return the smallest false negative rate for each false positive rate (n,)."""
        room, growth = 1 - self.deltas[:, None], np.exp(self.epsilons)[:, None]
        both = np.maximum(room - growth * false_positives, (room - false_positives) / growth)
        return np.maximum(both.max(axis=0), 0.0)

    def most_true_positives(self, false_positive: float) -> float:
        """Return the largest true positive rate for a false positive rate."""
        return float(1 - self.least_negatives(np.array([false_positive]))[0])
