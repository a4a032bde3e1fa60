"""Slices of a partition: each client's rows and the transformation of its records."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from dpcfl_net.core.lazy_sequence import LazySequence
from dpcfl_net.data import regression, shifts, skew

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True, eq=False)
class Slice:
    """One client's records and their transformation.

    Attributes:
        cluster: True cluster.
        train_rows: Rows of the training set, int64, read-only.
        validation_rows: Rows of the training set, int64, read-only.
        test_rows: Rows of the test set, int64, read-only.
        quarter_turns: Rotation of the images by multiples of 90 degrees.
        label_shift: Added to labels modulo the number of classes.
        line: Linear task of a regression client.
        features: Change of the images besides rotation; None without one.
        label_order: New label of each old one; None: as they are.
        source: Position of the data set in a mixture.
    """

    cluster: int
    train_rows: np.ndarray
    validation_rows: np.ndarray
    test_rows: np.ndarray
    quarter_turns: int = 0
    label_shift: int = 0
    line: regression.LinearTask | None = None
    features: shifts.FeatureShift | None = None
    label_order: tuple[int, ...] | None = None
    source: int = 0

    @property
    def transformation(self) -> dict[str, Any]:
        """Transformation of the records, as arguments of `ClientData`."""
        names = ("quarter_turns", "label_shift", "line", "features", "label_order")
        return {name: getattr(self, name) for name in names}

    def rows(self, part: Split) -> np.ndarray:
        """Return the rows of one part."""
        return {"train": self.train_rows, "validation": self.validation_rows, "test": self.test_rows}[part]


class Slices(LazySequence[Slice]):
    """Slices of all clients, cluster by cluster, made when they are asked for.

    Args:
        clusters: Of each cluster the rows of its clients, and the fields of their slices that are equal.
    """

    def __init__(self, clusters: Sequence[tuple[Sequence[skew.Share], dict[str, Any]]]) -> None:
        self._clusters = clusters
        self._ends = list(accumulate(len(shares) for shares, _ in clusters))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _item(self, position: int) -> Slice:
        cluster = bisect_right(self._ends, position)
        shares, own = self._clusters[cluster]
        train, validation, test = shares[position - self._ends[cluster]]  # counted from the end of the cluster
        for rows in (train, validation, test):
            rows.setflags(write=False)
        return Slice(train_rows=train, validation_rows=validation, test_rows=test, **own)
