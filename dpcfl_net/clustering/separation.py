"""How far apart the clusters of a mixture are: the paper's separation score, and one that estimation error cannot fake."""

from __future__ import annotations

import math

import numpy as np

_SHARPEST = 1e-9


def plain(means: np.ndarray, variances: np.ndarray) -> float:
    """R's minimum separation score: min over pairs of ||mu_a - mu_b|| / (2 s), s the larger deviation per coordinate.

    With n points in p >> n dimensions it is large whatever the data: estimated means differ by their errors alone.
    """
    deviations = np.sqrt(variances)
    scores = [
        _ratio(float(np.linalg.norm(means[a] - means[b])), 2 * max(deviations[a], deviations[b])) for a, b in _pairs(len(means))
    ]
    return min(scores, default=0.0)


def effective(points: np.ndarray, labels: np.ndarray, clusters: int, dimension: int) -> float:
    """Minimum over pairs of (d^2 - p (s_a^2/n_a + s_b^2/n_b)) / (2 s d), p = dimension.

    points: (n, r) coordinates with the distances of the full space. d: distance of the two estimated centres; s_a^2 =
    sum ||x - c_a||^2 / (p (n_a - 1)); s = max(s_a, s_b). Equals R's score when centres are known exactly, and shrinks
    as their estimation error grows. 0 (no evidence of clusters) if a cluster has fewer than two points.
    """
    counts = np.bincount(labels, minlength=clusters)
    if clusters < 2 or counts.min() < 2:
        return 0.0
    centres = np.stack([points[labels == m].mean(axis=0) for m in range(clusters)])
    spread = np.array([((points[labels == m] - centres[m]) ** 2).sum() / (counts[m] - 1) for m in range(clusters)])
    scores = []
    for a, b in _pairs(clusters):
        squared = float(((centres[a] - centres[b]) ** 2).sum())
        s = math.sqrt(max(spread[a], spread[b]) / dimension)
        scores.append(_ratio(squared - spread[a] / counts[a] - spread[b] / counts[b], 2 * s * math.sqrt(squared), squared))
    return min(scores)


def maximum_pairwise_overlap(score: float) -> float:
    """R's MPO = 2 Q(MSS), Q the upper tail of the standard normal; a score below 0 counts as 0 (MPO 1)."""
    return math.erfc(max(0.0, score) / math.sqrt(2))


def _ratio(above: float, below: float, squared: float | None = None) -> float:
    """above / below; no deviation at all counts as 1e-9 of the distance, so that scores stay finite."""
    scale = squared if squared is not None else above
    return above / max(below, 2 * _SHARPEST * scale) if scale > 0 else 0.0


def _pairs(clusters: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(clusters) for b in range(a + 1, clusters)]
