"""Exponential mechanism over counts of records, clipping of vectors, and Gaussian noise on a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dpcfl_net.privacy.normal_stream import NormalStream

GRID_BITS = 20
# Draws have 53 bits. From an epsilon of 37 on a label or a better score would always win, which has no finite epsilon. A larger
# epsilon is charged, and this one is used: up to it the rarest outcome has its probability up to 0.2 %.
MOST_DRAWN = 30.0
# Of clip norms and deviations of noise: infinite noise hides nothing, and squares of smaller or larger numbers vanish or overflow.
LEAST_BOUND, MOST_BOUND = 1e-100, 1e100
_BITS = 53
_ROUNDING = 2.0**-48  # of a probability, relative; a few operations


def check_bound(name: str, value: float) -> None:
    """ValueError, naming it, for a clip norm or a deviation of noise that is not from `LEAST_BOUND` to `MOST_BOUND`."""
    if not LEAST_BOUND <= value <= MOST_BOUND:
        raise ValueError(f"{name} is {value!r}: must be {LEAST_BOUND:g} to {MOST_BOUND:g}")


def gumbel(count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw standard Gumbel noise; the argmax of scores plus noise is a draw by the exponential mechanism.

    Args:
        count: Number of draws n.
        rng: Source of the noise.

    Returns:
        Finite numbers, (n,) float64.
    """
    # random() lies in [0, 1): a shift by half a step keeps both logarithms finite and stays below 1.
    uniform = rng.random(count) * (1 - 2.0**-53) + 2.0**-54
    return np.asarray(-np.log(-np.log(uniform)))


def exponential_mechanism(counts: Sequence[int], eta: float, rng: np.random.Generator) -> int:
    """Select an index m with P(m) proportional to exp(eta * counts[m]): argmax of eta * count + Gumbel(0, 1), in float64.

    Counts that all move by 0 or +1 together give log-probability ratios with a range of eta. A larger eta than `MOST_DRAWN` counts as it.

    Args:
        counts: Whole numbers, at least one.
        eta: Weight of one record, finite and not negative.
        rng: Source of the noise.

    Returns:
        The selected index.

    Raises:
        ValueError: If counts or eta are out of range.

    Source: McSherry and Talwar 2007; Durfee and Rogers 2019 (the Gumbel form).
    """
    scores = np.asarray(counts)
    if scores.ndim != 1 or scores.size == 0 or scores.dtype.kind not in "iu":
        raise ValueError(f"counts must be a non-empty sequence of whole numbers, got {counts!r}")
    if not (math.isfinite(eta) and eta >= 0):
        raise ValueError(f"eta must be finite and not negative, got {eta!r}")
    # Only differences matter; taking them as integers first keeps huge counts exact.
    lead = (scores.astype(object) - int(scores.max())).astype(np.float64)
    return int(np.argmax(min(eta, MOST_DRAWN) * lead + gumbel(scores.size, rng)))


def randomised_response(labels: Sequence[int | None], epsilon: float, categories: int, rng: np.random.Generator) -> np.ndarray:
    """Keep each label with probability e^epsilon / (e^epsilon + k - 1), else replace it by one of the k - 1 others at random.

    Draws are multiples of 2^-53. The number of those that replace a label is rounded up: to the nearest one, a label at epsilon 30
    would be replaced by 0.1 % too seldom, and delta of a claim of 1e-5 would be 1e-3.

    Args:
        labels: Labels, 0 to k - 1; None and other values give a label at random.
        epsilon: Pure epsilon of one label; a larger one than `MOST_DRAWN` counts as it.
        categories: Number of labels k.
        rng: Source of the randomness.

    Returns:
        Labels, (m,) int64.

    Source: Kairouz, Bonawitz, Ramage 2016.
    """
    others = (categories - 1) * math.exp(-min(epsilon, MOST_DRAWN))
    replaced = math.ceil(others / (1 + others) * (1 + _ROUNDING) * 2**_BITS)
    kept = rng.random(len(labels)) < (2**_BITS - replaced) / 2**_BITS
    shift, anything = rng.integers(1, categories, len(labels)), rng.integers(0, categories, len(labels))
    found = anything.astype(np.int64)
    for k, label in enumerate(labels):
        if label is not None and 0 <= label < categories:
            found[k] = label if kept[k] else (label + int(shift[k])) % categories
    return found


def lowest_by_exponential_mechanism(
    losses: np.ndarray | None, epsilon: float, categories: int, span: float, rng: np.random.Generator
) -> int:
    """Select a cluster with probability proportional to exp(epsilon / 2 * score), score = -min(loss - smallest loss, span) / span.

    Args:
        losses: Losses, (k,); None and losses that are not finite give a cluster at random.
        epsilon: Bound on the range of the log-probability ratios between any two vectors of losses; as above.
        categories: Number of clusters k.
        span: Loss above the smallest one at which scores are clipped.
        rng: Source of the randomness.

    Returns:
        The cluster.

    Source: McSherry and Talwar 2007.
    """
    scores = np.zeros(categories)
    if losses is not None and np.isfinite(losses).all():
        scores = -np.minimum(np.asarray(losses, np.float64) - float(losses.min()), span) / span
    return int(np.argmax(min(epsilon, MOST_DRAWN) / 2 * scores + gumbel(categories, rng)))


def shortened(vectors: Sequence[np.ndarray], clip: float) -> list[np.ndarray]:
    """Clip vectors jointly to an L2 norm.

    Args:
        vectors: Vectors of any shape (n,).
        clip: Bound on the norm of all vectors together.

    Returns:
        The scaled vectors in float64; an empty list if a value is not finite.
    """
    exact = [vector.astype(np.float64) for vector in vectors]
    norm = math.sqrt(math.fsum(float(vector @ vector) for vector in exact))
    if not math.isfinite(norm):
        return []
    # Slightly below clip, so that rounding of the norm and of the product cannot exceed it.
    scale = min(1.0, clip * (1 - 1e-9) / norm) if norm > 0 else 1.0
    for vector in exact:
        vector *= scale
    return exact


def gaussian_on_grid(total: np.ndarray, deviation: float, noise: NormalStream) -> np.ndarray:
    """Add Gaussian noise and round to a grid.

    The grid is public and coarse compared with float64, so that the low bits of a result reveal nothing about the sum.

    Args:
        total: The sum, of any shape.
        deviation: Standard deviation of the noise.
        noise: Source of the noise.

    Returns:
        total + N(0, deviation^2) in each coordinate, rounded to multiples of deviation * 2^-20, float64.

    Source: Mironov 2012 (the attack on low bits).
    """
    grid = deviation * 2.0**-GRID_BITS
    noisy = noise.standard_normal(total.size).reshape(total.shape)
    noisy *= 2.0**GRID_BITS
    noisy += np.divide(total, grid, dtype=np.float64)
    np.rint(noisy, out=noisy)
    noisy *= grid
    return noisy
