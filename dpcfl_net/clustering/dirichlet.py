"""Dirichlet process mixture of updates with known noise: samples partitions, so that the number of clusters need not be given."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

PSEUDO_CLIENTS = 1.0  # weight of the prior on the variance within clusters, in clients
FAINTEST = 4.0  # least variance between clusters, in units of noise / sqrt(p): a fainter one cannot be told from none
PAIRS = 3  # split-merge proposals after each Gibbs sweep


@dataclass(frozen=True, eq=False)
class Partition:
    """Most probable partition that the sampler visited.

    Attributes:
        labels: Cluster of each row, (n,) int64; numbered by their first row.
        clusters: Number of clusters.
        score: Its log posterior up to a constant.
        counts: Number of clusters after each sweep.
    """

    labels: np.ndarray
    clusters: int
    score: float
    counts: list[int]


def partition(
    gram: np.ndarray,
    dimension: int,
    noise: np.ndarray,
    *,
    concentration: float,
    sweeps: int,
    rng: np.random.Generator,
    start: np.ndarray | None = None,
) -> Partition:
    """Sample partitions of n vectors from the posterior of a Dirichlet process mixture of Gaussians.

    Vector i of cluster k is drawn from N(phi_k, (s + noise_i) I) and phi_k from N(mu, tau I). phi and mu are integrated out, so that
    only inner products are needed. s, the variance within clusters beyond the noise, is estimated again from the partition
    before each sweep; tau is the variance of all vectors beyond their noise, at least FAINTEST noise / sqrt(p). A sweep is
    Gibbs sampling of each row (Neal 2000, algorithm 3) and PAIRS split-merge proposals with sequential allocation (Dahl 2003).

    Args:
        gram: Inner products of the vectors after subtraction of their mean, (n, n).
        dimension: p.
        noise: Known variance of the noise in a coordinate of each vector, (n,), at least 0.
        concentration: Concentration of the Dirichlet process, positive; larger values prefer more clusters.
        sweeps: Number of sweeps, at least 1.
        rng: Randomness.
        start: Labels to start from, (n,); None: one cluster.

    Raises:
        ValueError: If an argument is out of range.
    """
    n = len(gram)
    if gram.shape != (n, n) or n < 1 or noise.shape != (n,) or not (noise >= 0).all():
        raise ValueError(f"gram must be (n, n) and noise (n,) and at least 0, got {gram.shape} and {noise.shape}")
    if not (concentration > 0 and sweeps >= 1 and dimension >= 1):
        raise ValueError(f"concentration {concentration}, sweeps {sweeps} and dimension {dimension}: must be positive")
    if start is not None and np.shape(start) != (n,):
        raise ValueError(f"start must be (n,), n = {n}, got {np.shape(start)}")
    sampler = _Sampler(gram, dimension, noise, concentration, rng)
    labels = np.zeros(n, np.int64) if start is None else _numbered(start)
    best, best_score, counts = labels, -math.inf, []
    for _ in range(sweeps):
        sampler.estimate(labels)
        labels = sampler.gibbs(labels)
        for _ in range(PAIRS if n > 1 else 0):
            labels = sampler.split_or_merge(labels)
        labels = _numbered(labels)
        counts.append(int(labels.max()) + 1)
        sampler.estimate(labels)
        if (score := sampler.score(labels)) > best_score:
            best, best_score = labels, score
    return Partition(best, int(best.max()) + 1, best_score, counts)


class _Sampler:
    """State of the sampler: variance of the means, and each vector's precision around the mean of its cluster."""

    def __init__(self, gram: np.ndarray, p: int, noise: np.ndarray, concentration: float, rng: np.random.Generator) -> None:
        self._gram, self._p, self._noise, self._rng = gram, p, noise, rng
        self._log_alpha = math.log(concentration)
        n = len(gram)
        self._total = max(float(np.trace(gram)) / (p * max(1, n - 1)), 1e-300)  # variance of a coordinate
        typical = float(noise.mean())
        self._tau = max(self._total - typical, FAINTEST * (typical or self._total) / math.sqrt(p))
        self._weights, self._weighted = noise, gram
        self.estimate(np.zeros(n, np.int64))

    def estimate(self, labels: np.ndarray) -> None:
        """Set the precision of each vector around its cluster's mean: of the noise, and what is within clusters beyond it."""
        together = labels[:, None] == labels
        sizes = together.sum(axis=1)
        squares = float(np.trace(self._gram) - (self._gram * together / sizes[:, None]).sum())
        free = len(labels) - round(float((1 / sizes).sum()))
        within = (squares / self._p + PSEUDO_CLIENTS * self._total / 2) / (free + PSEUDO_CLIENTS)
        beyond = max(0.0, within - float(self._noise.mean()))
        self._weights = 1 / (self._noise + max(beyond, 1e-6 * self._total))
        self._weighted = self._gram * np.outer(self._weights, self._weights)

    def evidence(self, precisions: np.ndarray, products: np.ndarray) -> float:
        """Log marginal likelihood of clusters, with their means and the mean of these integrated out (flat prior).

        `precisions` (K,) are sums over each cluster's vectors, `products` (K, K) inner products of their weighted sums. A term of
        the vectors and their variances alone is left out.
        """
        shrunk = 1 / (1 + self._tau * precisions)
        known = float((precisions * shrunk).sum())  # precision of the mean of the cluster means
        sizes = -self._p / 2 * (float(np.log1p(self._tau * precisions).sum()) + math.log(known))
        return sizes + float(self._tau * (shrunk * np.diag(products)).sum() + shrunk @ products @ shrunk / known) / 2

    def summed(self, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Precisions and products of the clusters 0 to K - 1."""
        ones = np.eye(int(labels.max()) + 1)[labels]
        return self._weights @ ones, ones.T @ self._weighted @ ones

    def score(self, labels: np.ndarray) -> float:
        """Log posterior, with the terms that `evidence` leaves out, since the estimate of s differs between partitions."""
        vectors = self._p * float(np.log(self._weights).sum()) - float((np.diag(self._gram) * self._weights).sum())
        return vectors / 2 + self._prior(labels) + self.evidence(*self.summed(labels))

    def _prior(self, labels: np.ndarray) -> float:
        sizes = np.bincount(labels)
        return float(sum(self._log_alpha + math.lgamma(size) for size in sizes if size))

    def gibbs(self, labels: np.ndarray) -> np.ndarray:
        """Draw the cluster of each row given all others."""
        labels = labels.copy()
        for i in self._rng.permutation(len(labels)):
            others = np.delete(np.arange(len(labels)), i)
            if not len(others):
                break
            names, rest = np.unique(labels[others], return_inverse=True)
            ones = np.zeros((len(labels), len(names) + 1))  # the last column is a new cluster
            ones[others, rest] = 1
            chances = np.append(np.log(ones.sum(axis=0)[:-1]), self._log_alpha)
            labels[others] = rest
            labels[i] = self._draw(chances + self._each(int(i), self._weights @ ones, ones.T @ self._weighted @ ones, ones))
        return labels

    def _each(self, i: int, precisions: np.ndarray, products: np.ndarray, ones: np.ndarray) -> np.ndarray:
        """Evidence with row i added to each column's cluster."""
        cross, own = self._weighted[i] @ ones, float(self._weighted[i, i])
        found = np.empty(len(precisions))
        for k in range(len(found)):
            more, moved = products.copy(), precisions.copy()
            more[k] += cross
            more[:, k] += cross
            more[k, k] += own
            moved[k] += self._weights[i]
            used = moved > 0
            found[k] = self.evidence(moved[used], more[np.ix_(used, used)])
        return found

    def split_or_merge(self, labels: np.ndarray) -> np.ndarray:
        """Propose to split the cluster of two random rows, or to merge their clusters (Metropolis-Hastings)."""
        i, j = (int(row) for row in self._rng.choice(len(labels), 2, replace=False))
        together = labels[i] == labels[j]
        rest = [int(k) for k in np.flatnonzero((labels == labels[i]) | (labels == labels[j])) if k not in (i, j)]
        order = [int(k) for k in self._rng.permutation(np.array(rest, np.int64))]
        second, log_q = self._allocate(i, j, order, None if together else {k for k in order if labels[k] == labels[j]})
        split, merged = labels.copy(), labels.copy()
        split[second] = labels.max() + 1
        merged[labels == labels[j]] = labels[i]
        split, merged = _numbered(split), _numbered(merged)
        ratio = self._prior(split) - self._prior(merged) - log_q
        ratio += self.evidence(*self.summed(split)) - self.evidence(*self.summed(merged))
        if math.log(1 - self._rng.random()) >= (ratio if together else -ratio):
            return labels
        return split if together else merged

    def _allocate(self, i: int, j: int, order: list[int], given: set[int] | None) -> tuple[list[int], float]:
        """Allocate rows one by one to {i} or {j}, by chance, or those `given` to {j}; the rows with j, and the log probability.

        Any probabilities are valid here; these are of clusters around the mean of all vectors.
        """
        groups, log_q = ([i], [j]), 0.0
        for k in order:
            chances = np.array([math.log(len(rows)) + self._gain(np.array(rows), k) for rows in groups])
            side = self._draw(chances) if given is None else int(k in given)
            log_q += float(chances[side] - np.logaddexp(*chances))
            groups[side].append(k)
        return groups[1], log_q

    def _gain(self, rows: np.ndarray, k: int) -> float:
        """Log predictive likelihood of a row in a cluster of a known mean of means, up to a term of the row alone."""

        def alone(members: np.ndarray) -> float:
            precision = float(self._weights[members].sum())
            square = float(self._weighted[np.ix_(members, members)].sum())
            return -self._p / 2 * math.log1p(self._tau * precision) + square / (2 * (precision + 1 / self._tau))

        return alone(np.append(rows, k)) - alone(rows)

    def _draw(self, log_chances: np.ndarray) -> int:
        chances = np.exp(log_chances - log_chances.max())
        return int(self._rng.choice(len(chances), p=chances / chances.sum()))


def _numbered(labels: np.ndarray) -> np.ndarray:
    """Number clusters by their first row."""
    names: dict[int, int] = {}
    return np.array([names.setdefault(int(label), len(names)) for label in labels], np.int64)
