"""Separation scores of a mixture: the paper's, and one that is corrected for the estimation error of the centres."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np

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


def effective(points: np.ndarray, labels: np.ndarray, clusters: int, dimension: int) -> float:
    """Compute the minimum over pairs of (d^2 - p (s_a^2 / n_a + s_b^2 / n_b)) / (2 s d), with p the dimension.

    d is the distance of the estimated centres and s_a^2 = sum ||x - c_a||^2 / (p (n_a - 1)). s = max(s_a, s_b, s_ab), where
    s_ab is the pooled standard deviation of both clusters along the line through their centres, with max(s_a, s_b) as 4 more
    degrees of freedom. The score equals R's if noise is spherical and centres are exact, and decreases as the estimation error
    grows. The clients' heterogeneity lies in few directions, to which s_a is blind; s_ab prevents a split along such a
    direction from looking like two clusters.

    Args:
        points: Coordinates with the distances of the full space, (n, r).
        labels: Cluster of each point, (n,) int.
        clusters: Number of clusters M.
        dimension: Dimension p of the full space.

    Returns:
        The score; 0 (no evidence of clusters) if a cluster has fewer than two points.
    """
    counts = np.bincount(labels, minlength=clusters)
    if clusters < 2 or counts.min() < 2:
        return 0.0
    centres = np.stack([points[labels == m].mean(axis=0) for m in range(clusters)])
    residuals = points - centres[labels]
    spread = np.array([(residuals[labels == m] ** 2).sum() / (counts[m] - 1) for m in range(clusters)])
    scores = []
    for a, b in combinations(range(clusters), 2):
        line = centres[a] - centres[b]
        squared = float((line**2).sum())
        d = math.sqrt(squared)
        along = residuals[(labels == a) | (labels == b)] @ (line / d if d > 0 else line)
        spherical = max(spread[a], spread[b]) / dimension
        pooled = (float((along**2).sum()) + PRIOR * spherical) / (counts[a] + counts[b] - 2 + PRIOR)
        s = math.sqrt(max(spherical, pooled))
        scores.append(_ratio(squared - spread[a] / counts[a] - spread[b] / counts[b], 2 * s * d, squared))
    return min(scores)


def within(points: np.ndarray, labels: np.ndarray) -> float:
    """Compute the sum of squared distances of points, (n, r), from the centre of their cluster."""
    return sum(float(((own - own.mean(axis=0)) ** 2).sum()) for m in np.unique(labels) for own in [points[labels == m]])


def maximum_pairwise_overlap(score: float) -> float:
    """Compute R's maximum pairwise overlap 2 Q(MSS), Q the upper tail of the standard normal; negative scores count as 0."""
    return math.erfc(max(0.0, score) / math.sqrt(2))


def _ratio(above: float, below: float, largest: float) -> float:
    """Return above / below with `below` at least 1e-9 of `largest`, the maximum of `above`: finite without any deviation."""
    return above / max(below, _SHARPEST * largest) if largest > 0 else 0.0
