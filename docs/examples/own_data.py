"""An example of a user's data set: the Wisconsin breast cancer records that come with scikit-learn, 30 measurements each."""

from pathlib import Path
from typing import Any

import numpy as np

TEST = 113


def load(root: Path) -> dict[str, Any]:
    """456 training and 113 test records, features scaled to 0..1. These records need no folder, so `root` goes unused."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    # The scale is public: the set's description lists the smallest and largest value of each measurement.
    x = ((x - x.min(0)) / (x.max(0) - x.min(0))).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:-TEST], order[-TEST:]
    return {
        "train_x": x[train], "train_y": y[train], "test_x": x[test], "test_y": y[test],
        "classes": 2, "mean": 0.25, "std": 0.15,
    }  # fmt: skip
