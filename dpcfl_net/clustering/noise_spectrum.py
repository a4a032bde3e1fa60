"""Largest singular value expected from noise alone (Tracy-Widom edge), and directions that exceed it."""

from __future__ import annotations

import math

import numpy as np

from dpcfl_net.clustering.known_noise import KnownNoise
from dpcfl_net.clustering.separation import centre

# Upper 0.001 quantile of the Tracy-Widom law of order 1 (Bejan 2005, table of quantiles)
TRACY_WIDOM = 3.2724


def noise_spectrum_edge(rows: int, dimension: int) -> float:
    """Compute the 0.999 quantile of the largest squared singular value of a standard normal matrix.

    (a + b)^2 + t (a + b) (1/a + 1/b)^(1/3) with a = sqrt(rows - 1/2) and b = sqrt(dimension - 1/2).

    Args:
        rows: Rows of the matrix, at least 1.
        dimension: Columns of the matrix, at least 1.

    Source: Johnstone 2001, with the shifts by 1/2 of Ma 2012.
    """
    a, b = math.sqrt(rows - 0.5), math.sqrt(dimension - 0.5)
    return (a + b) ** 2 + TRACY_WIDOM * (a + b) * (1 / a + 1 / b) ** (1 / 3)


def beyond(points: np.ndarray, dimension: int, deviation: float, rows: int) -> int:
    """Count the singular values of the points that exceed the edge of the noise.

    Args:
        points: Coordinates with the distances of the full space, (n, r).
        dimension: Dimension of the full space.
        deviation: Standard deviation of the noise in each coordinate.
        rows: Independent rows of noise, at least 1.
    """
    return int((np.linalg.svd(points, compute_uv=False) ** 2 > deviation**2 * noise_spectrum_edge(rows, dimension)).sum())


def explained(points: np.ndarray, labels: np.ndarray, noise: KnownNoise) -> bool:
    """Return True if clusters and noise explain the points: no residual direction exceeds the edge of the noise.

    Residuals of unequal noise are scaled to equal noise first.

    Args:
        points: Coordinates with the distances of the full space, (n, r).
        labels: Cluster of each point, (n,).
        noise: Noise of the points, in the coordinates of the full space.
    """
    residuals = points.copy()
    clusters = np.unique(labels)
    for cluster in clusters:
        residuals[labels == cluster] -= centre(points, labels == cluster, noise.weights)
    if noise.weights is not None:
        residuals *= np.sqrt(noise.weights)[:, None]
    return beyond(residuals, noise.dimension, noise.deviation, max(1, len(points) - len(clusters))) == 0
