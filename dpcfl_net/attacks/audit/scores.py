"""Scores of canaries: how much likelier what was seen is with the canary in than without it. Any score is a fair one.

A sum over S Poisson-sampled steps shows a canary that is in k times, k ~ Bin(S, q), in noise of variance S deviation^2. The
deviation is measured over all canaries: with the stated one, noise of 0.7 of it would make every score of a long run negative
and the audit blind, where it should see more. Differences of two clients, or of two rounds, show noise that they share by not
showing it.
"""

from __future__ import annotations

import math

import numpy as np

LEAST = 0.05  # deviation that is assumed where noise was taken off or cancels, in units of clip: rounding is far below it
_FORGET = -60.0  # logarithms of chances below are none

Counts = tuple[np.ndarray, np.ndarray]  # values and their log-probabilities
NONE: Counts = (np.zeros(1), np.zeros(1))


def counts(steps: int, rate: float) -> Counts:
    """The values of Bin(steps, rate) that matter."""
    from scipy.stats import binom

    values = np.arange(steps + 1)
    logs = binom.logpmf(values, steps, rate)
    kept = logs > _FORGET
    return values[kept].astype(np.float64), logs[kept]


def likelihood(seen: np.ndarray, steps: int, rate: float, deviation: float) -> np.ndarray:
    """log of in over out for each of (n,) sums over `steps` steps, in units of clip: log sum_k Bin(k) e^((k x - k^2/2)/(S d^2))."""
    return _over_nothing(seen, counts(steps, rate), steps * deviation**2)


def measured(seen: np.ndarray, steps: int, rate: float) -> float:
    """The noise's deviation in each of `steps` steps, from sums that each hold a canary with chance 1/2."""
    # A fair bit times Bin(S, q) has this mean square.
    return _left(seen, steps, steps * rate * (1 - rate) / 2 + (steps * rate) ** 2 / 2)


def over_time(now: np.ndarray, before: np.ndarray, steps: int, rate: float) -> np.ndarray:
    """(m,) scores from two rounds' (r, m) sums over `steps` steps each: noise that is the same in both cancels."""
    differences, own = now - before, counts(steps, rate)
    deviation = _left(differences, steps, steps * rate * (1 - rate))
    each = _over_nothing(differences.ravel(), _difference(own, own), steps * deviation**2)
    return np.asarray(each.reshape(now.shape).sum(0))


class Apart:
    """Scores of the first of two clients from the differences of their sums, in which noise that they share cancels.

    Whether the second client's canary is in is open, half and half.
    """

    def __init__(self, canaries: int) -> None:
        self._logs = np.zeros((2, 2, canaries))  # by bit of the first client and of the second

    def add(self, first: np.ndarray, second: np.ndarray, steps: int, rate: float) -> None:
        """(r, m) sums over `steps` steps of each client."""
        differences, own = first - second, counts(steps, rate)
        deviation = _left(differences, steps, steps * rate * (1 - rate) + (steps * rate) ** 2 / 2)
        for one in (0, 1):
            for two in (0, 1):
                apart = _difference(own if one else NONE, own if two else NONE)
                each = _log_mixture(differences.ravel(), apart, steps * deviation**2)
                self._logs[one, two] += each.reshape(differences.shape).sum(0)

    @property
    def scores(self) -> np.ndarray:
        """(m,)."""
        out, held = np.logaddexp(*self._logs[0]), np.logaddexp(*self._logs[1])
        return np.asarray(held - out)


def _left(seen: np.ndarray, steps: int, canaries: float) -> float:
    """The deviation a step of what the canaries' own mean square leaves."""
    return max(LEAST, math.sqrt(max(0.0, float(np.mean(seen**2)) - canaries) / steps))


def _difference(first: Counts, second: Counts) -> Counts:
    """The difference of two independent counts."""
    chances = np.convolve(np.exp(first[1]), np.exp(second[1])[::-1])
    values = first[0][0] - second[0][-1] + np.arange(len(chances))
    kept = chances > math.exp(_FORGET)
    return values[kept], np.log(chances[kept])


def _over_nothing(seen: np.ndarray, held: Counts, variance: float) -> np.ndarray:
    return _log_mixture(seen, held, variance) + seen**2 / (2 * variance)


def _log_mixture(seen: np.ndarray, held: Counts, variance: float) -> np.ndarray:
    """log sum_k p_k e^(-(x - k)^2 / (2 variance)) for each x of (n,)."""
    found = np.full(seen.shape, -math.inf)
    for value, log in zip(*held, strict=True):
        np.logaddexp(found, log - (seen - value) ** 2 / (2 * variance), out=found)
    return found
