"""Mixture of many updates: fitted to a random sample, then all updates are assigned by passes over the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from dpcfl_net.clustering import mixture
from dpcfl_net.clustering.known_noise import KnownNoise
from dpcfl_net.clustering.mixture import MixtureFit, Space

PASSES = 2
_ROWS = 128


def fit(
    updates: np.ndarray | Sequence[np.ndarray],
    *,
    sample: int,
    clusters: int | None,
    max_clusters: int = 8,
    space: Space = "spectral",
    seed: int = 0,
    noise_deviation: float | np.ndarray | None = None,
    lone: bool = True,
) -> MixtureFit:
    """Fit a mixture to the updates; above `sample` updates, to a random sample of so many.

    The Gram matrix of n updates takes n^2 p / 2 multiplications, and its eigenvectors n^3: a sample bounds both. The other
    updates get the component of highest responsibility. The centres of a sample are noisier than those of all updates, so
    every pass computes the centres of all updates and assigns all updates again, which takes M n p. Updates of unequal known noise
    have the inverse of their noise's variance as weight.

    Args:
        updates: n rows of p float32.
        sample: Updates in the sample, at least 2.
        clusters: As `mixture.fit`.
        max_clusters: As `mixture.fit`.
        space: As `mixture.fit`.
        seed: Seed of the sample and of the starts; equal arguments give the same fit.
        noise_deviation: As `mixture.fit`.
        lone: As `mixture.fit`.

    Returns:
        The fit of all updates; its scores, overlap and outliers are those of the sample.

    Raises:
        ValueError: As `mixture.fit`.
    """
    n = len(updates)
    given = {"clusters": clusters, "max_clusters": max_clusters, "space": space, "seed": seed, "lone": lone}
    if sample < 2:
        raise ValueError(f"sample must be at least 2, got {sample}")
    if n <= sample or (clusters is not None and clusters > sample):
        return mixture.fit(updates, **given, noise_deviation=noise_deviation)  # type: ignore[arg-type]
    weights = np.ones(n) if noise_deviation is None else KnownNoise.of(noise_deviation, n, len(updates[0])).weights_of(n)
    rows = np.sort(np.random.Generator(np.random.PCG64([seed, n])).permutation(n)[:sample])
    each = noise_deviation if noise_deviation is None or np.ndim(noise_deviation) == 0 else np.asarray(noise_deviation)[rows]
    part = mixture.fit([updates[k] for k in rows], **given, noise_deviation=each)  # type: ignore[arg-type]
    posteriors = np.zeros((n, part.clusters))
    posteriors[rows] = part.posteriors
    labels = np.full(n, -1)
    labels[rows] = part.labels
    for _ in range(1 + PASSES if part.clusters > 1 else 0):
        posteriors = _responsibilities(updates, labels, part.clusters, weights)
        labels = posteriors.argmax(axis=1)
    if part.clusters == 1:
        posteriors, labels = np.ones((n, 1)), np.zeros(n, np.int64)
    flat = _projected(updates, rows, part.coordinates)
    outliers, unverified = np.zeros(n, bool), np.zeros(n, bool)
    outliers[rows], unverified[rows] = part.outliers, part.unverified
    # A client that is alone in the sample may have company among the other updates.
    company = np.bincount(labels, minlength=part.clusters) > 1
    outliers &= ~(company & (np.bincount(part.labels, minlength=part.clusters) == 1))[labels]
    return replace(part, labels=labels.astype(np.int64), posteriors=posteriors, coordinates=flat, outliers=outliers,
                   unverified=unverified)  # fmt: skip


def _blocks(updates: np.ndarray | Sequence[np.ndarray]) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield rows as float64 blocks, so that nothing of size n x p is allocated."""
    for start in range(0, len(updates), _ROWS):
        where = slice(start, min(start + _ROWS, len(updates)))
        block = np.stack([*updates[where]]).astype(np.float64)
        if not np.isfinite(block).all():
            raise ValueError("an update holds a value that is not finite")
        yield where, block


def _responsibilities(
    updates: np.ndarray | Sequence[np.ndarray], labels: np.ndarray, clusters: int, weights: np.ndarray
) -> np.ndarray:
    """Assign all updates to the centres of the labelled ones (label -1: none); posteriors, (n, M).

    Weights, (n,), are inverse noise variances relative to s^2. A squared distance from an estimated centre of updates with the
    total weight W exceeds that from the true one by p s^2 / W: that is subtracted, or updates would go to the largest cluster. The
    centre of an update's own cluster is taken without the update.
    """
    p, counts = len(updates[0]), np.bincount(labels[labels >= 0], minlength=clusters).astype(np.float64)
    own = labels[:, None] == np.arange(clusters)
    pull = own * weights[:, None]
    masses = pull.sum(axis=0)
    centres = np.zeros((clusters, p))
    for where, block in _blocks(updates):
        centres += pull[where].T @ block
    centres /= np.where(counts > 0, masses, 1)[:, None]
    squared = np.empty((len(updates), clusters))
    for where, block in _blocks(updates):
        squared[where] = ((block**2).sum(axis=1)[:, None] - 2 * block @ centres.T) + (centres**2).sum(axis=1)
    # Weight of each centre without the row itself; of an only member its own.
    others = np.where(counts - own < 1, weights[:, None], masses - pull)
    squared[own] *= (masses / others)[own] ** 2
    inside = squared[own] / (1 / pull[own] + 1 / others[own])
    variance = float(inside.mean()) / p
    squared -= p * variance / others
    squared[:, counts == 0] = np.inf
    exponent = -(squared - squared.min(axis=1, keepdims=True)) / (
        2 * max(variance, np.finfo(float).tiny) * _blur(centres, masses, variance)
    )
    shares = counts / counts.sum() * np.exp(exponent * weights[:, None])
    return shares / shares.sum(axis=1, keepdims=True)


def _blur(centres: np.ndarray, masses: np.ndarray, variance: float) -> float:
    """Factor by which errors of the centres widen the log-odds of the closest pair, 1 for exact centres; at most 100."""
    worst, p = 1.0, centres.shape[1]
    for a, b in combinations(np.flatnonzero(masses), 2):
        error = p * variance * (1 / masses[a] + 1 / masses[b])
        found = float(((centres[a] - centres[b]) ** 2).sum())
        worst = max(worst, found / max(found - error, found / 100) if found else 100.0)
    return worst


def _projected(updates: np.ndarray | Sequence[np.ndarray], rows: np.ndarray, flat: np.ndarray) -> np.ndarray:
    """Project all updates to the plane of the sample's two principal components, (n, 2)."""
    mean, axes = np.zeros(len(updates[0])), np.zeros((flat.shape[1], len(updates[0])))
    for k, row in enumerate(rows):
        exact = updates[row].astype(np.float64)
        mean += exact / len(rows)
        axes += flat[k][:, None] * exact  # the columns of `flat` sum to zero, so the mean need not be subtracted
    axes /= np.maximum((flat**2).sum(axis=0), np.finfo(float).tiny)[:, None]
    found = np.empty((len(updates), flat.shape[1]))
    for where, block in _blocks(updates):
        found[where] = (block - mean) @ axes.T
    return found
