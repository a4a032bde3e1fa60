"""Random rebalancing (RR, Algorithm 2, lines 11-12): every cluster gets at least B members, drawn from the large ones."""

from __future__ import annotations

from typing import Literal

import numpy as np


def rebalance(
    labels: np.ndarray, clusters: int, min_size: int, rng: np.random.Generator, donors: Literal["surplus", "any"] = "surplus"
) -> np.ndarray:
    """Labels after filling small clusters up to `least` members; each slot moves at most once.

    labels: (m,) int, a slot's cluster, -1 for a slot that counts nowhere (and never moves). donors: "surplus" takes from a
    cluster only what it has above `least`, so that none falls below it; "any", as printed, takes any member of a cluster
    that has `least` or more, and can drain it. Where donors run out, the last small clusters stay short.
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
    """The mean update of each cluster, (k, p), that random rebalancing gives on average, from noisy sums and counts alone.

    sums: (k, p); counts: (k,), noisy and perhaps negative. Clusters with more than `least` members give their mean in
    proportion to their surplus to G, and a cluster that is short of `least` is filled up with G.
    """
    sizes = np.maximum(counts, 0.0)
    surplus = np.where(sizes > min_size, sizes - min_size, 0.0)
    common = np.zeros(sums.shape[1])
    if surplus.sum() > 0:
        weights = surplus / np.maximum(sizes, 1e-12)
        common = (weights[:, None] * sums).sum(axis=0) / surplus.sum()
    missing = np.maximum(min_size - sizes, 0.0)
    return (sums + missing[:, None] * common) / np.maximum(np.maximum(sizes, min_size), 1.0)[:, None]
