"""Records in memory and a small trainer, for tests of the DP-SGD engine."""

from __future__ import annotations

import numpy as np
import torch

from dpcfl_net.training import models
from dpcfl_net.training.dpsgd import Trainer

KEY = b"sixteen bytes ok"


class Images:
    """Records in memory, padded on request; stores the requested shapes and rows."""

    def __init__(self, n: int, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.x = torch.from_numpy(rng.random((n, *shape), dtype=np.float32))
        self.y = torch.from_numpy(rng.integers(0, classes, n))
        self.sizes: list[int] = []
        self.rows: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, rows: np.ndarray, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.sizes.append(size)
        self.rows.append(rows.tolist())
        x, y = torch.zeros(size, *self.x.shape[1:]), torch.zeros(size, dtype=torch.int64)
        x[: len(rows)], y[: len(rows)] = self.x[rows], self.y[rows]
        return x, y


def small(**changes: object) -> Trainer:
    settings = {"clip": 1.0, "learning_rate": 0.1, "batch_size": 8, "path": "auto"} | changes
    return Trainer(models.build("digits-cnn", (1, 8, 8), 10), **settings)


def start(name: str = "digits-cnn", shape: tuple[int, ...] = (1, 8, 8)) -> np.ndarray:
    return models.initial(name, shape, 10, 0)
