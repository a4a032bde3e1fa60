"""How far noise of a known deviation reaches by itself: what lies beyond is the clients' data."""

from __future__ import annotations

import math

import numpy as np

# The Tracy-Widom law of order 1 is above this with probability .001 (Bejan 2005, table of quantiles)
TRACY_WIDOM = 3.2724


def noise_spectrum_edge(rows: int, dimension: int) -> float:
    """What the largest squared singular value of `rows` x `dimension` standard normals exceeds in one case of 1,000.

    rows: at least 1. Centring and scaling of Johnstone 2001 with the halves of Ma 2012: (a + b)^2 + t (a + b) (1/a + 1/b)^(1/3),
    a = sqrt(rows - 1/2), b = sqrt(dimension - 1/2).
    """
    a, b = math.sqrt(rows - 0.5), math.sqrt(dimension - 0.5)
    return (a + b) ** 2 + TRACY_WIDOM * (a + b) * (1 / a + 1 / b) ** (1 / 3)


def beyond(points: np.ndarray, dimension: int, deviation: float, rows: int) -> int:
    """How many directions of points (n, r), distances as in `dimension` coordinates, reach beyond noise of `rows` rows."""
    return int((np.linalg.svd(points, compute_uv=False) ** 2 > deviation**2 * noise_spectrum_edge(rows, dimension)).sum())


def explained(points: np.ndarray, labels: np.ndarray, dimension: int, deviation: float) -> bool:
    """Whether clusters and noise are all there is: around their cluster's centre points reach no further than noise does.

    points: (n, r) coordinates with the distances of the full space, of `dimension`. labels: (n,). deviation: that of the noise
    in each coordinate, the same for all points.
    """
    residuals = points.copy()
    clusters = np.unique(labels)
    for cluster in clusters:
        residuals[labels == cluster] -= points[labels == cluster].mean(axis=0)
    return beyond(residuals, dimension, deviation, max(1, len(points) - len(clusters))) == 0
