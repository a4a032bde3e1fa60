"""Label skew: clients of equal size with label proportions from a Dirichlet distribution (as in EM-FDRO's experiments)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Share = tuple[np.ndarray, np.ndarray, np.ndarray]  # a client's training, validation and test rows


@dataclass(frozen=True)
class Sizes:
    """Records of each client.

    Attributes:
        train: Training records, validation included.
        held: Training records set aside for validation.
        test: Test records.
    """

    train: int
    held: int
    test: int


def apportion(weights: np.ndarray, total: int, most: np.ndarray) -> np.ndarray:
    """Apportion `total` in every row by the row's weights with largest remainders, within upper limits.

    The excess over a limit goes to entries below their limit, by weight, or by free capacity if their weights are zero.

    Args:
        weights: Non-negative weights, (n, K).
        total: Sum of each row of the result.
        most: Upper limits, (n, K).

    Returns:
        int64 (n, K).

    Raises:
        ValueError: If the limits of a row add up to less than `total`.
    """
    if (total > most.sum(1)).any():
        raise ValueError(f"{total} do not fit into {most.sum(1).min()}")
    given = np.zeros(most.shape, np.int64)
    while (missing := total - given.sum(1, keepdims=True)).any():
        room = most - given
        wanted = np.where(room > 0, weights, 0.0)
        wanted = np.where(wanted.any(1, keepdims=True), wanted, room)
        largest = wanted.max(1, keepdims=True)
        wanted = wanted / np.where(largest > 0, largest, 1.0)  # weights too small to add up otherwise; full rows stay zero
        quota = missing * (wanted / wanted.sum(1, keepdims=True).clip(1.0))
        whole = np.floor(quota).astype(np.int64)
        rank = np.argsort(np.argsort(whole - quota, axis=1, kind="stable"), axis=1)
        given += np.minimum(whole + (rank < missing - whole.sum(1, keepdims=True)), room)
    return given


class _Pools:
    """All rows in random order within their label: label k has rows[start[k] : start[k] + size[k]]."""

    def __init__(self, labels: np.ndarray, classes: int, rng: np.random.Generator, withheld: np.ndarray | None = None) -> None:
        order = rng.permutation(len(labels))
        if withheld is not None:
            order = order[~withheld[order]]
        self.rows = order[np.argsort(labels[order], kind="stable")]
        self.size = np.bincount(labels[order], minlength=classes)
        self.start = np.cumsum(self.size) - self.size

    def take(self, first: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return (n, total) rows: counts[i, k] rows of label k for client i, from its first[i, k]-th on, cyclically."""
        each = counts.reshape(-1)
        within = np.arange(each.sum()) - np.repeat(np.cumsum(each) - each - first.reshape(-1), each)
        start, size = (np.repeat(np.tile(values, len(counts)), each) for values in (self.start, self.size))
        return self.rows[start + within % size].reshape(len(counts), -1)


def shares(
    train_y: np.ndarray,
    test_y: np.ndarray,
    classes: int,
    count: int,
    sizes: Sizes,
    alpha: float,
    rng: np.random.Generator,
    withheld: np.ndarray | None = None,
) -> list[Share]:
    """Split the data set by label proportions drawn from Dirichlet(alpha) for each client.

    Clients draw in order; where a label has run out, the client's other labels replace it by its proportions. Validation and
    test rows follow the proportions of the training rows as closely as whole numbers and the test set allow.

    Args:
        train_y: Labels of the training set, (N,).
        test_y: Labels of the test set, (N,).
        classes: Number of classes K.
        count: Number of clients.
        sizes: Records of each client.
        alpha: Concentration of the Dirichlet distribution.
        rng: Source of all draws.
        withheld: True for test rows that no client gets, bool (M,); None: none.

    Returns:
        Rows of each client ordered by label, int64: (training, validation, test). Training and validation rows of all clients
        are disjoint; test rows may overlap.
    """
    pools, tests = _Pools(train_y, classes, rng), _Pools(test_y, classes, rng, withheld)
    proportions = rng.dirichlet(np.full(classes, alpha), count)
    counts = apportion(proportions, sizes.train, np.tile(pools.size, (count, 1)))
    used = np.zeros((count + 1, classes), np.int64)
    for i in range(count):
        left = pools.size - used[i]
        if (counts[i] > left).any():
            counts[i] = apportion(proportions[i : i + 1], sizes.train, left[None])[0]
        used[i + 1] = used[i] + counts[i]
    held = apportion(counts, sizes.held, counts)
    tested = apportion(counts, sizes.test, np.tile(tests.size, (count, 1)))
    first = rng.integers(0, np.maximum(tests.size, 1), (count, classes))
    train, validation = pools.take(used[:-1] + held, counts - held), pools.take(used[:-1], held)
    return list(zip(train, validation, tests.take(first, tested), strict=True))
