"""Random rebalancing of clusters up to a minimum size (RR-Cluster, Algorithm 2: large and small groups, and clients that move)."""

from __future__ import annotations

from typing import Literal

import numpy as np


def rebalance(
    labels: np.ndarray, clusters: int, min_size: int, rng: np.random.Generator, donors: Literal["surplus", "any"] = "surplus"
) -> np.ndarray:
    """Fill small clusters with random members of large ones; each slot moves at most once.

    Args:
        labels: Cluster of each slot, (m,) int; -1 for a slot that is not counted and never moves.
        clusters: Number of clusters.
        min_size: Minimum size B of a cluster.
        rng: Generator of the permutations.
        donors: "surplus" takes only members above `min_size`, so that no cluster falls below it. "any", as printed in the
            paper, takes any member of a cluster of at least `min_size` (Algorithm 2, line 12; section 3.2 says above `min_size`, which
            makes no difference to "surplus") and can drain it.

    Returns:
        Labels after rebalancing, (m,). If there are too few donors, the last small clusters stay short.
    """
    moved = labels.copy()
    pool: list[np.ndarray] = []
    for cluster in range(clusters):
        members = rng.permutation(np.flatnonzero(labels == cluster))
        spare = max(0, len(members) - min_size) if donors == "surplus" else len(members) * (len(members) >= min_size)
        pool.append(members[:spare])
    waiting = rng.permutation(np.concatenate(pool))
    for cluster in range(clusters):
        short = max(0, min_size - int((labels == cluster).sum()))
        moved[waiting[:short]] = cluster
        waiting = waiting[short:]
    return moved


def rebalanced_in_expectation(sums: np.ndarray, counts: np.ndarray, min_size: int) -> np.ndarray:
    """Compute the mean update of each cluster in expectation over random rebalancing, from noisy sums and counts alone.

    Clusters larger than `min_size` contribute to a common mean G in proportion to their surplus; a smaller cluster is filled up
    to `min_size` with G.

    Args:
        sums: Sum of the updates of each cluster, (k, p).
        counts: Noisy size of each cluster, (k,), possibly negative.
        min_size: Minimum size B of a cluster.

    Returns:
        Mean update of each cluster, (k, p).
    """
    sizes = np.maximum(counts, 0.0)
    surplus = np.where(sizes > min_size, sizes - min_size, 0.0)
    common = np.zeros(sums.shape[1])
    if surplus.sum() > 0:
        weights = surplus / np.maximum(sizes, 1e-12)
        common = (weights[:, None] * sums).sum(axis=0) / surplus.sum()
    missing = np.maximum(min_size - sizes, 0.0)
    return (sums + missing[:, None] * common) / np.maximum(np.maximum(sizes, min_size), 1.0)[:, None]
