"""Central test set: public records of the test split that no client holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dpcfl_net.data.datasets import Images
from dpcfl_net.data.slices import Slice

_STREAM = 1  # third part of the seed: the clients' rows are drawn from [seed, cluster]


def central_rows(images: Images, count: int, seed: int, source: int = 0) -> np.ndarray:
    """Draw the test rows of the central test set at random.

    Args:
        images: The data set, or a mixture: each of its data sets has a central test set.
        count: Number of records, at most those of the test split.
        seed: Seed of the partition.
        source: Position of the data set in the mixture.

    Returns:
        Rows of the test split in ascending order, int64 (count,).
    """
    rng = np.random.Generator(np.random.PCG64([seed, source, _STREAM]))
    rows: np.ndarray = np.sort(rng.permutation(images.of(source).sizes[1])[:count])
    return rows


def withheld(images: Images, count: int | None, seed: int, source: int = 0) -> np.ndarray | None:
    """Mark the test rows that no client gets; arguments as for `central_rows`.

    Returns:
        bool (M,), True for rows of the central test set; None if `count` is None.
    """
    if count is None:
        return None
    marks = np.zeros(images.of(source).sizes[1], bool)
    marks[central_rows(images, count, seed, source)] = True
    return marks


def central_slice(images: Images, piece: Slice, count: int, seed: int) -> Slice:
    """Return the central test set as the records of a client: under the transformation of the client's true cluster.

    Args:
        images: The data set.
        piece: The client's slice.
        count: Number of records.
        seed: Seed of the partition.
    """
    return replace(piece, test_rows=central_rows(images, count, seed, piece.source))
