"""Gram matrix and principal coordinates of n updates of p >> n parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BLOCK = 1 << 18
_RANK = 1e-13


def centred_gram(updates: np.ndarray | Sequence[np.ndarray], chunk: int | None = None) -> np.ndarray:
    """Compute the inner products of the updates after subtraction of their mean.

    Reads the data once, `chunk` columns at a time, and allocates nothing of size n x p. Each block is centred before the
    product, which avoids cancellation.

    Args:
        updates: n rows of p numbers.
        chunk: Columns per block; default: blocks of about 2 MiB.

    Returns:
        Gram matrix, (n, n) float64.

    Raises:
        ValueError: If there are no rows, rows of different lengths, or a value that is not finite.
    """
    n = len(updates)
    if n < 1 or len({np.shape(row) for row in updates}) != 1 or np.ndim(updates[0]) != 1:
        raise ValueError("updates must be n >= 1 rows of one length")
    p = len(updates[0])
    chunk = chunk or max(64, BLOCK // n)
    gram = np.zeros((n, n))
    block = np.empty((n, min(chunk, p)))
    with np.errstate(invalid="ignore"):
        for start in range(0, p, chunk):
            part = block[:, : min(chunk, p - start)]
            for i in range(n):
                part[i] = updates[i][start : start + chunk]
            part -= part.mean(axis=0)
            gram += part @ part.T
    if not np.isfinite(gram).all():
        raise ValueError("an update holds a value that is not finite")
    return gram


def coordinates(gram: np.ndarray) -> np.ndarray:
    """Compute principal coordinates whose distances equal those of the updates.

    The sign of each column makes its entry of largest magnitude positive.

    Args:
        gram: Centred Gram matrix, (n, n).

    Returns:
        Coordinates, (n, r) with r <= n - 1, ordered by decreasing variance; r = 0 if all updates are equal.
    """
    values, vectors = np.linalg.eigh(gram)
    values, vectors = values[::-1], vectors[:, ::-1]
    keep = values > max(values[0] * _RANK, 0.0)
    vectors, values = vectors[:, keep], values[keep]
    largest = np.argmax(np.abs(vectors), axis=0)
    signs = np.where(vectors[largest, np.arange(vectors.shape[1])] < 0, -1.0, 1.0)
    return vectors * signs * np.sqrt(values)
