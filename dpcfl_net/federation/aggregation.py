"""Means of updates that are added as they come, in client order and in float64, so that equal updates give equal bits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


class RunningMean:
    """Mean of updates that are added one by one; it holds their sum and none of them.

    Args:
        weights: Public weight of each client; None weighs all alike.

    Attributes:
        count: Updates so far.
    """

    def __init__(self, weights: Mapping[int, float] | None = None) -> None:
        self.count = 0
        self._weights, self._total, self._share = weights, np.zeros(0), 0.0

    def add(self, client: int, update: np.ndarray) -> None:
        """Add an update; the order of calls decides the last bits, and a federation streams in client order.

        Args:
            client: Client id.
            update: (p,) float32.
        """
        if not self.count:
            self._total = np.zeros(update.shape, dtype=np.float64)
        weight = 1.0 if self._weights is None else float(self._weights[client])
        self._total += update if self._weights is None else weight * update.astype(np.float64)
        self._share += weight
        self.count += 1

    def value(self) -> np.ndarray:
        """Return the mean, (p,) float32; ValueError without updates."""
        if not self.count:
            raise ValueError("no update to average")
        mean = np.empty(self._total.shape, dtype=np.float32)
        np.divide(self._total, self._share, out=mean, casting="same_kind")  # rounds once, without a float64 copy
        return mean


class ModelMeans:
    """Models, and for each of them the running mean of its clients' updates.

    Args:
        models: (M, p) float32.
        weights: Public weight of each client; None weighs all alike.

    Attributes:
        models: As given.

    Source: Malekmohammadi et al. 2025, Algorithm 1, lines 24-28.
    """

    def __init__(self, models: np.ndarray, weights: Mapping[int, float] | None = None) -> None:
        self.models = models
        self._means = [RunningMean(weights) for _ in models]

    def add(self, row: int, client: int, update: np.ndarray) -> None:
        """Add an update to the mean of one model; see `RunningMean.add`.

        Args:
            row: Row of the model.
            client: Client id.
            update: (p,) float32.
        """
        self._means[row].add(client, update)

    def moved(self) -> np.ndarray:
        """Return the models with their mean updates added, (M, p) float32; a model without an update stays."""
        moved = self.models.copy()
        for row, mean in enumerate(self._means):
            if mean.count:
                moved[row] += mean.value()
        return moved


def mean(updates: Mapping[int, np.ndarray]) -> np.ndarray:
    """Compute the mean of updates that are all in memory.

    Args:
        updates: Client to its (p,) float32 update.

    Returns:
        The mean, (p,) float32.

    Raises:
        ValueError: Without updates.
    """
    running = RunningMean()
    for client in sorted(updates):
        running.add(client, updates[client])
    return running.value()
