"""How updates become models: one place, in client order, in float64, so that the same updates give the same bits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def mean(updates: Mapping[int, np.ndarray], weights: Mapping[int, float] | None = None) -> np.ndarray:
    """Mean over clients, (p,) float32, plain or by public weights; ValueError when there is none."""
    if not updates:
        raise ValueError("no update to average")
    total, share = np.zeros(next(iter(updates.values())).shape, dtype=np.float64), 0.0
    for client in sorted(updates):
        weight = 1.0 if weights is None else float(weights[client])
        total += updates[client] if weights is None else weight * updates[client].astype(np.float64)
        share += weight
    return (total / share).astype(np.float32)


def add_mean(models: np.ndarray, updates: Mapping[int, np.ndarray], weights: Mapping[int, float] | None = None) -> np.ndarray:
    """One model, (1, p), moved by the mean of the updates; where there is none, because a crash cost them all, it stays."""
    return models + mean(updates, weights) if updates else models


def add_by_cluster(
    models: np.ndarray,
    assignment: Mapping[int, int],
    updates: Mapping[int, np.ndarray],
    weights: Mapping[int, float] | None = None,
) -> np.ndarray:
    """theta_m += mean of the deltas of cluster m's clients (R, Algorithm 1); an empty cluster keeps its model.

    models: (M, p) float32; assignment: client -> cluster; updates: client -> (p,) float32; weights: as in `mean`.
    Returns (M, p) float32.
    """
    moved = models.copy()
    for cluster in range(len(models)):
        members = {client: update for client, update in updates.items() if assignment[client] == cluster}
        if members:
            moved[cluster] += mean(members, weights)
    return moved
