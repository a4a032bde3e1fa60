"""Scores of canaries: log-likelihood ratio of the observation with the canary included over excluded. Any score is valid.

Canaries are records, or clients (`of_clients`).

A sum over S Poisson-sampled steps contains a canary that is in k times, k ~ Bin(S, q), in noise of variance S deviation^2. The
deviation is measured over all canaries: with the stated one, noise of 0.7 of it would make every score of a long run negative,
and the audit would detect nothing although the leak is larger. Differences of two clients, or of two rounds, reveal shared
noise, since it cancels.
"""

from __future__ import annotations

import math

import numpy as np

MIN_DEVIATION = 0.05  # in units of the clip norm, where noise is subtracted or cancels; rounding is far below it
_LOG_CUTOFF = -60.0  # smaller log-probabilities are treated as zero

Counts = tuple[np.ndarray, np.ndarray]  # values and their log-probabilities
ABSENT: Counts = (np.zeros(1), np.zeros(1))


def counts(steps: int, rate: float) -> Counts:
    """Values and log-probabilities of Bin(steps, rate), without negligible ones."""
    from scipy.stats import binom

    values = np.arange(steps + 1)
    logs = binom.logpmf(values, steps, rate)
    kept = logs > _LOG_CUTOFF
    return values[kept].astype(np.float64), logs[kept]


def likelihood(observed: np.ndarray, steps: int, rate: float, deviation: float) -> np.ndarray:
    """Log-likelihood ratio of in over out: log sum_k Bin(k) e^((k x - k^2/2)/(S d^2)).

    Args:
        observed: Sums over `steps` steps, (n,), in units of the clip norm.
        steps: Steps per sum, S.
        rate: Sampling rate.
        deviation: Deviation d of the noise in one step, in units of the clip norm.

    Returns:
        Scores, (n,).
    """
    return _log_ratio(observed, counts(steps, rate), steps * deviation**2)


def noise_deviation(observed: np.ndarray, steps: int, rate: float) -> float:
    """Estimate the deviation of the noise in one step.

    Args:
        observed: Sums over `steps` steps, in units of the clip norm; each contains a canary with probability 1/2.
        steps: Steps per sum.
        rate: Sampling rate.
    """
    # Mean square of a fair bit times Bin(S, q).
    return _residual_deviation(observed, steps, steps * rate * (1 - rate) / 2 + (steps * rate) ** 2 / 2)


def round_differences(now: np.ndarray, before: np.ndarray, steps: int, rate: float) -> np.ndarray:
    """Score canaries by the difference of two rounds, in which noise that both share cancels.

    Args:
        now: Sums over `steps` steps of one round, (r, m), in units of the clip norm.
        before: Sums of the other round, (r, m).
        steps: Steps per sum.
        rate: Sampling rate.

    Returns:
        Scores, (m,).
    """
    differences, count = now - before, counts(steps, rate)
    deviation = _residual_deviation(differences, steps, steps * rate * (1 - rate))
    each = _log_ratio(differences.ravel(), _difference(count, count), steps * deviation**2)
    return np.asarray(each.reshape(now.shape).sum(0))


def of_clients(observed: np.ndarray, weights: np.ndarray, rate: float, *, opposite: bool) -> np.ndarray:
    """Log-likelihood ratio of in over out, of canaries that are clients in one sum of a sample, in one of its blocks.

    log[1 - q + q sum_b w_b e^((x_b - 1/2) / d^2)] for x, less the same for -x if canaries that are out send the opposite update.

    Args:
        observed: Sum of each block along each canary, (k, m), in units of the clip norm.
        weights: Probability of each block for each canary, (k, m).
        rate: Probability q with which a client is in the sample.
        opposite: True if canaries that are out send the opposite update, False if they send zeros.

    Returns:
        Scores, (m,).
    """
    deviation = _residual_deviation(observed, 1, rate * (1.0 if opposite else 0.5) / len(observed))

    def evidence(x: np.ndarray) -> np.ndarray:
        from scipy.special import logsumexp

        there = logsumexp((x - 0.5) / deviation**2, b=weights, axis=0)
        return np.asarray(there if rate == 1 else np.logaddexp(math.log1p(-rate), math.log(rate) + there))

    return evidence(observed) - evidence(-observed) if opposite else evidence(observed)


class PairScores:
    """Scores of the first of two clients from differences of their sums, in which noise that both share cancels.

    The second client's canary is in with probability 1/2.
    """

    def __init__(self, canaries: int) -> None:
        self._logs = np.zeros((2, 2, canaries))  # by the bits of the first and the second client

    def add(self, first: np.ndarray, second: np.ndarray, steps: int, rate: float) -> None:
        """Add one task.

        Args:
            first: Sums over `steps` steps of the first client, (r, m), in units of the clip norm.
            second: Sums of the second client, (r, m).
            steps: Steps per sum.
            rate: Sampling rate.
        """
        differences, count = first - second, counts(steps, rate)
        deviation = _residual_deviation(differences, steps, steps * rate * (1 - rate) + (steps * rate) ** 2 / 2)
        for one in (0, 1):
            for two in (0, 1):
                difference = _difference(count if one else ABSENT, count if two else ABSENT)
                each = _log_mixture(differences.ravel(), difference, steps * deviation**2)
                self._logs[one, two] += each.reshape(differences.shape).sum(0)

    @property
    def scores(self) -> np.ndarray:
        """Log-likelihood ratios of the first client's canaries, (m,)."""
        out, held = np.logaddexp(*self._logs[0]), np.logaddexp(*self._logs[1])
        return np.asarray(held - out)


def _residual_deviation(observed: np.ndarray, steps: int, canaries: float) -> float:
    """Deviation per step after subtracting the mean square of the canaries."""
    return max(MIN_DEVIATION, math.sqrt(max(0.0, float(np.mean(observed**2)) - canaries) / steps))


def _difference(first: Counts, second: Counts) -> Counts:
    """Distribution of the difference of two independent counts."""
    probabilities = np.convolve(np.exp(first[1]), np.exp(second[1])[::-1])
    values = first[0][0] - second[0][-1] + np.arange(len(probabilities))
    kept = probabilities > math.exp(_LOG_CUTOFF)
    return values[kept], np.log(probabilities[kept])


def _log_ratio(observed: np.ndarray, held: Counts, variance: float) -> np.ndarray:
    """Log-likelihood ratio of the mixture over noise alone."""
    return _log_mixture(observed, held, variance) + observed**2 / (2 * variance)


def _log_mixture(observed: np.ndarray, held: Counts, variance: float) -> np.ndarray:
    """log sum_k p_k e^(-(x - k)^2 / (2 variance)) for each x of (n,)."""
    total = np.full(observed.shape, -math.inf)
    for value, log in zip(*held, strict=True):
        np.logaddexp(total, log - (observed - value) ** 2 / (2 * variance), out=total)
    return total
