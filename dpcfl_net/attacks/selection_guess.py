"""The server's guess of a client's cluster, named most often: exact bounds, posterior, and simulated probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

REPETITIONS = 4000  # simulated runs of every client's choices for each predicted probability


@lru_cache(maxsize=256)
def right_after(epsilon: float, clusters: int, rounds: int) -> tuple[float, ...]:
    """Compute the probability of guessing a secret cluster after 1..rounds choices that name it as often as epsilon allows.

    A choice names the secret cluster with the largest probability that epsilon allows, p = e^epsilon / (e^epsilon + clusters
    - 1), and each other cluster with equal probability: the exponential mechanism with scores that are epsilon apart. With a uniform
    prior, the best guess is the cluster named most often, with ties broken uniformly. No scores within epsilon make this guess better.
    With four clusters or more, other scores and another guess may: two models with the larger score, in changing pairs.

    The result is exact. The secret cluster is named n ~ Binomial(t, p) times. It wins with probability
    sum_a P(a of the others fewer than n times, the rest at most n times) / clusters, averaged over the order of breaking ties.

    Args:
        epsilon: Epsilon of one choice, >= 0.
        clusters: Number of clusters, >= 1.
        rounds: Number of choices, >= 0.

    Returns:
        Probability after each number of choices, of length `rounds`.

    Raises:
        ValueError: If an argument is out of range.
    """
    if not epsilon >= 0 or clusters < 1 or rounds < 0:
        raise ValueError(f"epsilon >= 0, clusters >= 1 and rounds >= 0, got {epsilon!r}, {clusters!r} and {rounds!r}")
    from scipy.stats import binom

    draws = np.arange(rounds + 1)
    named = binom.pmf(draws[None, :], draws[:, None], 1 / (1 + (clusters - 1) * math.exp(-epsilon)))  # [t, n]
    right = np.zeros(rounds + 1)
    for n in draws:
        right[n:] += named[n:, n] * _wins(int(n), clusters - 1, rounds)[: rounds + 1 - n]
    return tuple(float(value) for value in right[1:])


def _wins(n: int, others: int, rounds: int) -> np.ndarray:
    """P(n votes win, ties broken uniformly, against `others` that share r votes uniformly), (rounds + 1,) over r."""
    chance = np.zeros(rounds + 1)
    fewer = np.eye(1, rounds + 1)[0]  # each of the first `a` others has fewer than n votes
    for a in range(others + 1):
        level = fewer
        for c in range(a + 1, others + 1):
            level = _with_another(level, c, n)
        chance += level / (others + 1)
        fewer = _with_another(fewer, a + 1, n - 1)
    return chance


def _with_another(chance: np.ndarray, c: int, most: int) -> np.ndarray:
    """Extend P(c - 1 clusters share r votes within their limits) to c, the new one with at most `most`; r = 0..len - 1."""
    own = _shares(c, len(chance))[:, : max(0, most + 1)]
    r, i = np.indices(own.shape)
    extended: np.ndarray = (own * chance[r - i]).sum(axis=1)  # own is 0 where i > r
    return extended


@lru_cache(maxsize=128)
def _shares(c: int, size: int) -> np.ndarray:
    """Binomial(i; r, 1 / c) at [r, i] for r, i < size: number of votes, of r, for one of c clusters."""
    from scipy.stats import binom

    draws = np.arange(size)
    shares: np.ndarray = binom.pmf(draws[None, :], draws[:, None], 1 / c)
    return shares


def votes_after(choices: Sequence[int], clusters: int) -> np.ndarray:
    """Count how often each cluster was named in the first 1..T choices.

    Args:
        choices: Named clusters, of length T.
        clusters: Number of clusters.

    Returns:
        Counts, (T, clusters) int64.
    """
    return np.cumsum(np.eye(clusters, dtype=np.int64)[np.asarray(choices, np.int64)], axis=0)


def posterior(votes: np.ndarray, epsilon: float) -> np.ndarray:
    """Posterior over clusters, proportional to e^(epsilon votes).

    Assumes a uniform prior, and choices that name the secret cluster e^epsilon times as often as each other one.

    Args:
        votes: Counts, (..., clusters).
        epsilon: Epsilon of one choice.

    Returns:
        Probabilities, (..., clusters).
    """
    weights = np.exp(epsilon * (votes - votes.max(axis=-1, keepdims=True)))
    probabilities: np.ndarray = weights / weights.sum(axis=-1, keepdims=True)
    return probabilities


def credit(votes: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Probability that the cluster named most often, ties broken uniformly, is the true one.

    Args:
        votes: Counts, (..., clusters).
        truth: True clusters, (...).

    Returns:
        Probabilities, (...).
    """
    winners = votes == votes.max(axis=-1, keepdims=True)
    hit = np.take_along_axis(winners, truth[..., None], axis=-1)[..., 0]
    return hit / winners.sum(axis=-1)


def predicted(scores: np.ndarray, eta: float, truth: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Simulate the probability of a correct guess for the exponential mechanism on given scores, over REPETITIONS draws.

    Args:
        scores: Scores of each choice, (T, clusters).
        eta: Epsilon per unit of score.
        truth: Best cluster of each choice, (T,).
        rng: Random generator.

    Returns:
        Probability after each number of choices, (T,).
    """
    noise = rng.gumbel(size=(REPETITIONS, *scores.shape))
    named = np.argmax(eta * (scores - scores.max(axis=1, keepdims=True)) + noise, axis=2)
    votes = np.cumsum(named[..., None] == np.arange(scores.shape[1]), axis=1)
    probability: np.ndarray = credit(votes, np.broadcast_to(truth, named.shape)).mean(axis=0)
    return probability
