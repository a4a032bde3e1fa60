"""Synthetic linear regression (RR-Cluster, D.3): common base points, and one line per true cluster."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dpcfl_net.data import cache

TRAIN, TEST = 20_000, 4_000
SHARE = 50  # points of a client in RR's experiment
NOISE = 0.1
_SEED = 4


class LinearTask(NamedTuple):
    """y = slope x + intercept + noise e, with e of unit variance."""

    slope: float
    intercept: float
    noise: float

    def targets(self, x: np.ndarray, e: np.ndarray) -> np.ndarray:
        """Compute the targets in float64.

        Args:
            x: Points, float32 (N,).
            e: Standard normal noise, float32 (N,).

        Returns:
            Targets, float32 (N,).
        """
        return (self.slope * x.astype(np.float64) + self.intercept + self.noise * e.astype(np.float64)).astype(np.float32)


LINES = ((-3.0, 2.0), (-1.0, 0.0), (1.0, -2.0), (3.0, 1.0))


def line(cluster: int, noise: float | None) -> LinearTask:
    """Return the line of a true cluster.

    Args:
        cluster: True cluster, 0 to 3.
        noise: Standard deviation of the noise; None: `NOISE`.
    """
    return LinearTask(*LINES[cluster], NOISE if noise is None else noise)


def load() -> dict[str, Any]:
    """Generate the fields of `Images`: x ~ U(-2, 2), float32 (N, 1), and as y standard normal noise, float32 (N,), that a line
    scales.
    """
    identity = f"regression, {TRAIN} + {TEST} points, seed {_SEED}"
    arrays = cache.arrays("regression", identity, _draw)
    return {**arrays, "task": "regression", "classes": 1, "mean": 0.0, "std": 1.0, "sha256": None, "identity": identity}


def _draw() -> dict[str, np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(_SEED))
    x = rng.uniform(-2, 2, (TRAIN + TEST, 1)).astype(np.float32)
    e = rng.standard_normal(TRAIN + TEST).astype(np.float32)
    return {"train_x": x[:TRAIN], "train_y": e[:TRAIN], "test_x": x[TRAIN:], "test_y": e[TRAIN:]}
