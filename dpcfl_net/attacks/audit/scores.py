"""Canary scores: log-likelihood ratio of an observation with the canary in and out.

A sum over S Poisson-sampled steps holds an inserted canary k ~ Bin(S, q) times, with noise of variance S deviation^2. The deviation
is measured over all canaries: with the stated one, a noise of 0.7 of it would make every score of a long run negative, and the
audit would miss it. In differences of two clients or two rounds, common noise cancels.
"""

from __future__ import annotations

import math

import numpy as np

LEAST = 0.05  # deviation assumed if noise was removed or cancels, in units of clip; far above rounding
_FORGET = -60.0  # smaller log-probabilities are dropped

Counts = tuple[np.ndarray, np.ndarray]  # values and their log-probabilities
NONE: Counts = (np.zeros(1), np.zeros(1))


def counts(steps: int, rate: float) -> Counts:
    """Return the values of Bin(steps, rate) with relevant probability."""
    from scipy.stats import binom

    values = np.arange(steps + 1)
    logs = binom.logpmf(values, steps, rate)
    kept = logs > _FORGET
    return values[kept].astype(np.float64), logs[kept]


def likelihood(seen: np.ndarray, steps: int, rate: float, deviation: float) -> np.ndarray:
    """Compute the log-likelihood ratio, log sum_k Bin(k) e^((k x - k^2/2) / (S d^2)).

    Args:
        seen: (n,) sums over `steps` steps, in units of clip.
        steps: Number of steps S.
        rate: Sampling rate.
        deviation: Deviation d of the noise of one step, in units of clip.

    Returns:
        (n,).
    """
    return _over_nothing(seen, counts(steps, rate), steps * deviation**2)


def measured(seen: np.ndarray, steps: int, rate: float) -> float:
    """Estimate the noise deviation of one step from sums over `steps` steps, each with a canary with probability 1/2."""
    # A fair bit times Bin(S, q) has this mean square.
    return _left(seen, steps, steps * rate * (1 - rate) / 2 + (steps * rate) ** 2 / 2)


def over_time(now: np.ndarray, before: np.ndarray, steps: int, rate: float) -> np.ndarray:
    """Score (m,) from two rounds' (r, m) sums over `steps` steps each; equal noise cancels."""
    differences, own = now - before, counts(steps, rate)
    deviation = _left(differences, steps, steps * rate * (1 - rate))
    each = _over_nothing(differences.ravel(), _difference(own, own), steps * deviation**2)
    return np.asarray(each.reshape(now.shape).sum(0))


class Apart:
    """Scores of the first of two clients from differences of their sums; the second client's canary is in with probability 1/2."""

    def __init__(self, canaries: int) -> None:
        self._logs = np.zeros((2, 2, canaries))  # by bits of both clients

    def add(self, first: np.ndarray, second: np.ndarray, steps: int, rate: float) -> None:
        """Add (r, m) sums over `steps` steps of each client."""
        differences, own = first - second, counts(steps, rate)
        deviation = _left(differences, steps, steps * rate * (1 - rate) + (steps * rate) ** 2 / 2)
        for one in (0, 1):
            for two in (0, 1):
                apart = _difference(own if one else NONE, own if two else NONE)
                each = _log_mixture(differences.ravel(), apart, steps * deviation**2)
                self._logs[one, two] += each.reshape(differences.shape).sum(0)

    @property
    def scores(self) -> np.ndarray:
        """Return the scores, (m,)."""
        out, held = np.logaddexp(*self._logs[0]), np.logaddexp(*self._logs[1])
        return np.asarray(held - out)


def _left(seen: np.ndarray, steps: int, canaries: float) -> float:
    """Deviation of one step after subtracting the mean square of the canaries."""
    return max(LEAST, math.sqrt(max(0.0, float(np.mean(seen**2)) - canaries) / steps))


def _difference(first: Counts, second: Counts) -> Counts:
    """Distribution of the difference of two independent counts."""
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
