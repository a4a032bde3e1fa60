"""Random images for benchmarks, as plugin data sets: their content does not matter, and nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

CLASSES = 10
TRAIN, TEST = 4200, 1000
MANY = 1_000_000  # one for each client of the largest roster


def gray(root: Path) -> dict[str, Any]:
    """Images of 1x28x28, on which the model `cnn` has 28,938 parameters."""
    return _images((1, 28, 28))


def color(root: Path) -> dict[str, Any]:
    """Images of 3x32x32, on which the model `resnet18` has 11,181,642 parameters."""
    return _images((3, 32, 32))


def small(root: Path) -> dict[str, Any]:
    """Images of 1x8x8, as many as a roster may have clients."""
    return _images((1, 8, 8), MANY)


def _images(shape: tuple[int, int, int], train: int = TRAIN) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    found: dict[str, Any] = {"classes": CLASSES, "mean": 0.5, "std": 0.25}
    for part, count in (("train", train), ("test", TEST)):
        found[f"{part}_x"] = draw.integers(0, 256, (count, *shape), dtype=np.uint8)
        found[f"{part}_y"] = np.arange(count) % CLASSES
    return found
