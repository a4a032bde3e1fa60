"""Separation scores of a mixture: the paper's, and one that is corrected for the estimation error of the centres."""

from __future__ import annotations

import math
from itertools import combinations
from statistics import NormalDist

import numpy as np

from dpcfl_net.clustering.chi_square import LEVEL, chi_square_quantile

# Prior degrees of freedom of the spherical deviation; 4 lost the smallest power on simulated and real updates.
PRIOR = 4
_SHARPEST = 1e-9


def plain(means: np.ndarray, variances: np.ndarray) -> float:
    """Compute R's minimum separation score: min over pairs of ||mu_a - mu_b|| / (2 max(s_a, s_b)).

    With n points in p >> n dimensions the score is large for any data, since estimated means differ by their errors.

    Args:
        means: Component means, (M, d).
        variances: Component variances per coordinate, (M,).

    Returns:
        The score; 0 for one component.
    """
    deviations = np.sqrt(variances)
    scores = []
    for a, b in combinations(range(len(means)), 2):
        d = float(np.linalg.norm(means[a] - means[b]))
        scores.append(_ratio(d, 2 * max(deviations[a], deviations[b]), d))
    return min(scores, default=0.0)


def effective(
    points: np.ndarray,
    labels: np.ndarray,
    clusters: int,
    dimension: int,
    *,
    weights: np.ndarray | None = None,
    alone: float | None = None,
) -> float:
    """Compute the minimum over pairs of (d^2 - p (s_a^2 / n_a + s_b^2 / n_b)) / (2 s d), with p the dimension.

    d is the distance of the estimated centres and s_a^2 = sum ||x - c_a||^2 / (p (n_a - 1)). s = max(s_a, s_b, s_ab), where
    s_ab is the pooled standard deviation of both clusters along the line through their centres, with 4 more degrees of freedom:
    those of max(s_a, s_b), or of the deviation along the lines of all pairs if that refutes max(s_a, s_b). The score equals R's
    if noise is spherical and centres are exact, and decreases as the estimation error grows. The clients' heterogeneity lies in
    few directions, to which s_a is blind; s_ab prevents a split along such a direction from looking like two clusters. With
    weights, squares are weighted, n_a is the sum of the weights, and the score is that of clients of weight 1.

    Args:
        points: Coordinates with the distances of the full space, (n, r).
        labels: Cluster of each point, (n,) int.
        clusters: Number of clusters M.
        dimension: Dimension p of the full space.
        weights: Inverse noise variances of the points relative to each other, (n,); None if all are equal.
        alone: Value of p s_a^2 for a cluster with one point, which has no deviation to estimate it from.

    Returns:
        The score; 0 (no evidence of clusters) if a cluster is empty, or has one point and `alone` is None.
    """
    counts = np.bincount(labels, minlength=clusters)
    if clusters < 2 or counts.min() < (2 if alone is None else 1):
        return 0.0
    masses = counts if weights is None else np.bincount(labels, weights, clusters)
    centres = np.stack([centre(points, labels == m, weights) for m in range(clusters)])
    residuals = points - centres[labels]
    if weights is not None:
        residuals *= np.sqrt(weights)[:, None]
    spread = np.array([
        (residuals[labels == m] ** 2).sum() / (counts[m] - 1) if counts[m] > 1 else alone for m in range(clusters)
    ])  # fmt: skip
    pairs = np.array(list(combinations(range(clusters), 2)))
    lines = centres[pairs[:, 0]] - centres[pairs[:, 1]]
    d = np.linalg.norm(lines, axis=1)
    along = np.array([
        ((residuals[(labels == a) | (labels == b)] @ (line / (length or 1.0))) ** 2).sum()
        for (a, b), line, length in zip(pairs, lines, d, strict=True)
    ])  # fmt: skip
    # Typical noise of a cluster's members: of a noisy client alone, its own.
    spherical = (spread * counts / masses)[pairs].max(axis=1) / dimension
    freedom = counts[pairs].sum(axis=1) - 2
    pooled = (along + PRIOR * _prior(along, freedom, spherical)) / (freedom + PRIOR)
    below = 2 * np.sqrt(np.maximum(spherical, pooled)) * d
    above = d**2 - (spread / masses)[pairs].sum(axis=1)
    return min(_ratio(*each) for each in zip(above.tolist(), below.tolist(), (d**2).tolist(), strict=True))


def centre(points: np.ndarray, members: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Compute the mean of some of the points, weighted if weights, (n,), are given."""
    own = points[members]
    mean: np.ndarray = own.mean(axis=0) if weights is None else np.average(own, axis=0, weights=weights[members])
    return mean


def within(points: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Compute the sum of (weighted) squared distances of points, (n, r), from the centre of their cluster."""
    total = 0.0
    for m in np.unique(labels):
        members = labels == m
        squared = (points[members] - centre(points, members, weights)) ** 2
        total += float((squared if weights is None else squared * weights[members][:, None]).sum())
    return total


def score_of_overlap(share: float) -> float:
    """Compute the MSS whose maximum pairwise overlap is the share, in (0, 1]."""
    return NormalDist().inv_cdf(1 - share / 2)


def maximum_pairwise_overlap(score: float) -> float:
    """Compute R's maximum pairwise overlap 2 Q(MSS), Q the upper tail of the standard normal; negative scores count as 0."""
    return math.erfc(max(0.0, score) / math.sqrt(2))


def _prior(along: np.ndarray, freedom: np.ndarray, spherical: np.ndarray) -> np.ndarray:
    """Return the variance that each line counts as prior, (pairs,): the spherical one, unless the residuals along all lines refute it.

    Noise is spherical, but the clients' own records differ in few directions. Where these exceed the noise, the lines share their
    variance; a spherical prior would hide it and make a split of a small cluster look like two clusters.
    """
    total = int(freedom.sum())
    if total == 0 or along.sum() <= spherical.max() * chi_square_quantile(total, LEVEL):
        return spherical
    return np.maximum(spherical, along.sum() / total)


def _ratio(above: float, below: float, largest: float) -> float:
    """Return above / below with `below` at least 1e-9 of `largest`, the maximum of `above`: finite without any deviation."""
    return above / max(below, _SHARPEST * largest) if largest > 0 else 0.0
