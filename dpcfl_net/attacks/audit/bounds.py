"""From scores of canaries to lower bounds on epsilon: by guesses, by mu-GDP, by the far tail; and the trade-off that is claimed.

Every bound holds with confidence 1 - alpha. What each one assumes stands at its function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dpcfl_net.privacy.accounting.accountant import deltas
from dpcfl_net.privacy.events.base import Event

SHARES = (0.01, 0.02, 0.04, 0.10, 0.20)  # of the canaries that are guessed at, in `by_guesses`
TAIL = 1e-6  # how often the total of an empty slot passes the threshold of `by_tail`
MOST = 100.0  # no bound says more
_EPSILONS = np.concatenate([np.arange(0.0, 12.0, 0.02), np.arange(12.0, 40.0, 0.25)])


@dataclass(frozen=True)
class Errors:
    """What the test "the score is above 0: the canary is in" got wrong."""

    false_positives: int
    outs: int
    false_negatives: int
    ins: int

    @classmethod
    def of(cls, scores: np.ndarray, bits: np.ndarray) -> Errors:
        """scores (n,), bits (n,) bool: the threshold is fixed before any score is seen."""
        said = scores > 0
        return cls(int((said & ~bits).sum()), int((~bits).sum()), int((~said & bits).sum()), int(bits.sum()))

    def at_most(self, alpha: float) -> tuple[float, float]:
        """Upper limits (Clopper and Pearson 1934) of false positive and false negative rate, both right with 1 - alpha."""
        return (
            at_most(self.false_positives, self.outs, alpha / 2),
            at_most(self.false_negatives, self.ins, alpha / 2),
        )


def at_most(hits: int, trials: int, alpha: float) -> float:
    """Clopper-Pearson upper limit of a rate; 1 without trials."""
    from scipy.stats import beta

    return 1.0 if hits >= trials else float(beta.ppf(1 - alpha, hits + 1, trials - hits))


def at_least(hits: int, trials: int, alpha: float) -> float:
    """Clopper-Pearson lower limit of a rate."""
    return 1.0 - at_most(trials - hits, trials, alpha)


def by_guesses(scores: np.ndarray, bits: np.ndarray, delta: float, alpha: float) -> float:
    """Steinke, Nasr, Jagielski 2023 (Theorem 5.2 and its proof's p-value): epsilon from how many guesses are right.

    The r/2 highest scores are guessed in and the r/2 lowest out, for each share r of `SHARES`, the best by Bonferroni. Assumes
    that bits are independent fair coins, and nothing of scores or mechanism.
    """
    order = np.argsort(scores, kind="stable")
    found = 0.0
    for share in SHARES:
        half = max(1, round(share * len(scores) / 2))
        right = int((~bits[order[:half]]).sum() + bits[order[-half:]].sum())
        found = max(found, _guessed(len(scores), 2 * half, right, delta, alpha / len(SHARES)))
    return found


def _guessed(canaries: int, guesses: int, right: int, delta: float, alpha: float) -> float:
    """The largest epsilon that so many right guesses refute."""
    return _largest(lambda epsilon: _guess_p_value(canaries, guesses, right, epsilon, delta) < alpha)


def _guess_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """A bound on the chance of `right` right guesses or more of `guesses` against an (epsilon, delta)-DP mechanism."""
    from scipy.stats import binom

    accuracy = 1 / (1 + math.exp(-epsilon))
    short = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, accuracy))  # P[right > B >= right - i], i = 1..right
    worst = float((short / np.arange(1, right + 1)).max(initial=0.0))
    return min(1.0, float(binom.sf(right - 1, guesses, accuracy)) + 2 * canaries * delta * worst)


def by_gdp(errors: Errors, delta: float, alpha: float) -> float:
    """Epsilon of the mu-GDP curve (Dong, Roth, Su 2022) through the upper limits of both error rates.

    Assumes that canaries are independent (isotropic noise, empty slots elsewhere), and that the mechanism's curve is a
    Gaussian one; where it is not, this is a bound on mu and a guess at epsilon.
    """
    from scipy.stats import norm

    false_positive, false_negative = errors.at_most(alpha)
    return gdp_epsilon(float(-norm.ppf(false_positive) - norm.ppf(false_negative)), delta)


def gdp_epsilon(mu: float, delta: float) -> float:
    """Epsilon at delta of a mu-GDP mechanism (Dong, Roth, Su 2022, Corollary 2.13); 0 where mu is not positive."""
    from scipy.stats import norm

    if not mu > 0:
        return 0.0

    def above(epsilon: float) -> bool:
        tail = math.exp(min(epsilon + norm.logcdf(-epsilon / mu - mu / 2), 0.0))
        return bool(norm.cdf(-epsilon / mu + mu / 2) - tail > delta)

    return _largest(above)


def _largest(holds: Callable[[float], bool]) -> float:
    """The largest epsilon in 0..MOST for which a condition holds that larger ones lose; 0 if none does."""
    if not holds(0.0):
        return 0.0
    low, high = 0.0, MOST
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Tail:
    """How many canaries that are in have a total beyond a threshold that an empty slot passes with chance `TAIL`."""

    hits: int
    ins: int

    @classmethod
    def of(cls, totals: np.ndarray, bits: np.ndarray) -> Tail:
        """totals (n,): of each canary the sum over all steps, over the deviation of the stated noise in it.

        Assumes Gaussian noise. Where the canaries that are out show more than the stated noise, theirs counts.
        """
        from scipy.stats import norm

        measured = math.sqrt(float(np.mean(totals[~bits] ** 2))) if (~bits).any() else math.inf
        return cls(int((totals[bits] > norm.isf(TAIL) * max(1.0, measured)).sum()), int(bits.sum()))

    def at_least(self, alpha: float) -> float:
        """The lower limit of the true positive rate."""
        return at_least(self.hits, self.ins, alpha)

    def epsilon(self, delta: float, alpha: float) -> float:
        """True positives may be at most e^epsilon * TAIL + delta: what a mechanism that gives a few records away whole breaks."""
        surplus = self.at_least(alpha) - delta
        return min(MOST, math.log(surplus / TAIL)) if surplus > TAIL else 0.0


@dataclass(frozen=True)
class Noise:
    """The squares of so many sums over empty slots, all added, in units of the stated noise's variance."""

    squares: float
    sums: int

    @property
    def ratio(self) -> float:
        """The deviation of the noise over what is stated."""
        return math.sqrt(self.squares / self.sums) if self.sums else math.nan

    def too_little(self, alpha: float) -> bool:
        """Whether the stated noise would be so small with a chance below alpha (chi-square; assumes independent Gaussian noise)."""
        from scipy.stats import chi2

        return bool(self.sums and chi2.cdf(self.squares, self.sums) < alpha)


@dataclass(frozen=True)
class TradeOff:
    """What a mechanism claims of every test on one record: delta at each of many epsilons."""

    epsilons: np.ndarray
    deltas: np.ndarray

    @classmethod
    def of(cls, plans: Sequence[Sequence[Event]]) -> TradeOff:
        """The weakest claim of several clients' events, under zero-out."""
        return cls(_EPSILONS, np.max([deltas(events, list(_EPSILONS)) for events in plans], axis=0))

    def refuted(self, false_positive: float, false_negative: float) -> bool:
        """Whether error rates of at most so much cannot be: a + e^epsilon b >= 1 - delta for all epsilons, both ways round."""
        return false_negative < float(self.least_negatives(np.array([false_positive]))[0])

    def least_negatives(self, false_positives: np.ndarray) -> np.ndarray:
        """The least false negative rate that goes with each false positive rate (n,)."""
        room, growth = 1 - self.deltas[:, None], np.exp(self.epsilons)[:, None]
        both = np.maximum(room - growth * false_positives, (room - false_positives) / growth)
        return np.maximum(both.max(axis=0), 0.0)

    def most_true_positives(self, false_positive: float) -> float:
        """The highest true positive rate that goes with a false positive rate."""
        return float(1 - self.least_negatives(np.array([false_positive]))[0])
