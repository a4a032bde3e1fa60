"""How far apart the clusters of a mixture are: the paper's separation score, and one that estimation error cannot fake."""

from __future__ import annotations

import math

import numpy as np

# Few clients tell little of a deviation along one line; 4 gave up least on simulated and real updates alike
PRIOR = 4
_SHARPEST = 1e-9


def plain(means: np.ndarray, variances: np.ndarray) -> float:
    """R's minimum separation score: min over pairs of ||mu_a - mu_b|| / (2 s), s the larger deviation per coordinate.

    With n points in p >> n dimensions it is large whatever the data: estimated means differ by their errors alone.
    """
    deviations = np.sqrt(variances)
    scores = []
    for a, b in _pairs(len(means)):
        d = float(np.linalg.norm(means[a] - means[b]))
        scores.append(_ratio(d, 2 * max(deviations[a], deviations[b]), d))
    return min(scores, default=0.0)


def effective(points: np.ndarray, labels: np.ndarray, clusters: int, dimension: int) -> float:
    """Minimum over pairs of (d^2 - p (s_a^2/n_a + s_b^2/n_b)) / (2 s d), p = dimension.

    points: (n, r) coordinates with the distances of the full space. d: distance of the two estimated centres; s_a^2 =
    sum ||x - c_a||^2 / (p (n_a - 1)); s = max(s_a, s_b, s_ab), s_ab the pooled deviation of both clusters' points along
    the line that joins their centres, max(s_a, s_b) counting as 4 more degrees of freedom of it. Equals R's score when
    noise is spherical and centres are known exactly, and shrinks as their estimation error grows. What clients' data add
    to spherical noise lies in few directions: s_a alone is blind to it, and such a direction cut in two would look like
    two clusters; s_ab sees it. 0 (no evidence of clusters) if a cluster has fewer than two points.
    """
    counts = np.bincount(labels, minlength=clusters)
    if clusters < 2 or counts.min() < 2:
        return 0.0
    centres = np.stack([points[labels == m].mean(axis=0) for m in range(clusters)])
    residuals = points - centres[labels]
    spread = np.array([(residuals[labels == m] ** 2).sum() / (counts[m] - 1) for m in range(clusters)])
    scores = []
    for a, b in _pairs(clusters):
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
    """The sum of squared distances of points (n, r) from the centre of their cluster."""
    return sum(float(((own - own.mean(axis=0)) ** 2).sum()) for m in np.unique(labels) for own in [points[labels == m]])


def maximum_pairwise_overlap(score: float) -> float:
    """R's MPO = 2 Q(MSS), Q the upper tail of the standard normal; a score below 0 counts as 0 (MPO 1)."""
    return math.erfc(max(0.0, score) / math.sqrt(2))


def _ratio(above: float, below: float, largest: float) -> float:
    """above / below, `below` being at least 1e-9 of the largest `above` can be: finite where nothing deviates at all."""
    return above / max(below, _SHARPEST * largest) if largest > 0 else 0.0


def _pairs(clusters: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(clusters) for b in range(a + 1, clusters)]
