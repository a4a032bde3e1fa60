"""Robust principal component analysis: a matrix as the sum of a low-rank and a sparse one."""

from __future__ import annotations

import numpy as np

TOLERANCE = 1e-5  # the steps end when ||matrix - L - S||_F is below this fraction of ||matrix||_F
MOST_STEPS = 1000
GROWTH = 1.05  # of the penalty in a step. At 1.5, as published, the steps end at 1 to 3 % above the minimum, and noisy columns look clean


def robust_pca(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split a matrix into low-rank and sparse parts by principal component pursuit.

    Minimises ||L||_* + ||S||_1 / sqrt(max(p, n)) subject to L + S = matrix, in about a hundred steps. A step takes O(p n^2) operations
    and memory for six matrices of that size.

    Args:
        matrix: (p, n) with p >= n.

    Returns:
        L and S, (p, n) float64 each; L + S is the matrix up to `TOLERANCE`.

    Source: Candes et al. 2011; inexact augmented Lagrange multipliers of Lin, Chen, Ma 2010, Algorithm 5, with a smaller growth.
    """
    given = matrix.astype(np.float64)
    size, spectral = float(np.linalg.norm(given)), _singular_values(given)[0]
    if size == 0:
        return given, np.zeros_like(given)
    threshold = 1 / np.sqrt(max(given.shape))
    penalty, most_penalty = 1.25 / spectral, 1.25e7 / spectral
    dual = given / max(spectral, float(np.abs(given).max()) / threshold)
    sparse = np.zeros_like(given)
    for _ in range(MOST_STEPS):
        low_rank = _shrunk_values(given - sparse + dual / penalty, 1 / penalty)
        rest = given - low_rank
        sparse = _shrunk(rest + dual / penalty, threshold / penalty)
        residual = rest - sparse
        if np.linalg.norm(residual) <= TOLERANCE * size:
            break
        dual += penalty * residual
        penalty = min(GROWTH * penalty, most_penalty)
    return low_rank, sparse


def _singular_values(matrix: np.ndarray) -> np.ndarray:
    return np.sqrt(np.maximum(np.linalg.eigvalsh(matrix.T @ matrix)[::-1], 0.0))


def _shrunk_values(matrix: np.ndarray, by: float) -> np.ndarray:
    """Reduce each singular value by `by`, at least to 0; by the (n, n) Gram matrix, since p is much larger than n."""
    squares, right = np.linalg.eigh(matrix.T @ matrix)
    values = np.sqrt(np.maximum(squares, 0.0))
    kept = np.where(values > by, (values - by) / np.maximum(values, by), 0.0)
    found: np.ndarray = matrix @ ((right * kept) @ right.T)
    return found


def _shrunk(matrix: np.ndarray, by: float) -> np.ndarray:
    found: np.ndarray = np.sign(matrix) * np.maximum(np.abs(matrix) - by, 0.0)
    return found
