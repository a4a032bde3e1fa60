"""Aggregation of updates in client order and in float64, so that equal updates give equal bits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dpcfl_net.core.types import Assignment


def mean(updates: Mapping[int, np.ndarray], weights: Mapping[int, float] | None = None) -> np.ndarray:
    """Compute the mean update.

    Args:
        updates: Client to its (p,) float32 update.
        weights: Public weight of each client; None weighs all alike.

    Returns:
        The mean, (p,) float32.

    Raises:
        ValueError: Without updates.
    """
    if not updates:
        raise ValueError("no update to average")
    total, share = np.zeros(next(iter(updates.values())).shape, dtype=np.float64), 0.0
    for client in sorted(updates):
        weight = 1.0 if weights is None else float(weights[client])
        total += updates[client] if weights is None else weight * updates[client].astype(np.float64)
        share += weight
    return (total / share).astype(np.float32)


def add_mean(models: np.ndarray, updates: Mapping[int, np.ndarray], weights: Mapping[int, float] | None = None) -> np.ndarray:
    """Add the mean update to the only model.

    Args:
        models: (1, p) float32.
        updates: Client to its (p,) float32 update; the model stays unchanged without updates (a crash lost all).
        weights: Public weight of each client; None weighs all alike.

    Returns:
        The new model, (1, p) float32.
    """
    return models + mean(updates, weights) if updates else models


def add_by_cluster(
    models: np.ndarray,
    assignment: Assignment,
    updates: Mapping[int, np.ndarray],
    weights: Mapping[int, float] | None = None,
) -> np.ndarray:
    """Add to each cluster's model the mean update of its clients; an empty cluster keeps its model.

    Args:
        models: (M, p) float32.
        assignment: Cluster of each client.
        updates: Client to its (p,) float32 update.
        weights: Public weight of each client; None weighs all alike.

    Returns:
        The new models, (M, p) float32.

    Source: Malekmohammadi et al. 2025, Algorithm 1, lines 24-28.
    """
    moved = models.copy()
    for cluster in range(len(models)):
        members = {client: update for client, update in updates.items() if assignment[client] == cluster}
        if members:
            moved[cluster] += mean(members, weights)
    return moved
