"""Noise of the updates as the signed job states it, equal or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, eq=False)
class KnownNoise:
    """Spherical Gaussian noise of n updates.

    Attributes:
        dimension: Number of coordinates p of an update.
        deviation: Standard deviation per coordinate of an update of weight 1.
        weights: Inverse noise variances relative to that of weight 1, (n,); None if all are 1.
    """

    dimension: int
    deviation: float
    weights: np.ndarray | None = None

    @classmethod
    def of(cls, deviations: float | Sequence[float] | np.ndarray, rows: int, dimension: int) -> KnownNoise:
        """Describe the noise of n updates; the median deviation gets weight 1.

        Args:
            deviations: Standard deviation of the noise in a coordinate of every update, or of each, (n,).
            rows: Number of updates n.
            dimension: Number of coordinates p of an update.

        Returns:
            The noise.

        Raises:
            ValueError: If a deviation is not positive and finite, or their number is neither 1 nor n.
        """
        values = np.asarray(deviations, np.float64)
        if values.shape not in ((), (rows,)):
            raise ValueError(f"noise_deviation has shape {values.shape}: must be one number, or one for each of {rows} updates")
        if not ((values > 0) & (values < math.inf)).all():
            raise ValueError(f"noise_deviation must be positive and finite, got {deviations}")
        if (values == values.flat[0]).all():
            return cls(dimension, float(values.flat[0]))
        middle = float(np.median(values))
        return cls(dimension, middle, (middle / values) ** 2)

    @property
    def squared_norm(self) -> float:
        """Expected squared norm of the noise of weight 1, p s^2."""
        return self.dimension * self.deviation**2

    def weights_of(self, rows: int) -> np.ndarray:
        """Return the weights of the updates, (n,), ones if all are equal."""
        return np.ones(rows) if self.weights is None else self.weights

    def part(self, rows: np.ndarray) -> KnownNoise:
        """Return the noise of some of the updates, by their indices."""
        return self if self.weights is None else replace(self, weights=self.weights[rows])
