"""Label skew: clients of equal size whose label proportions come from a Dirichlet distribution (as in EM-FDRO's experiments)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Share = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Sizes:
    """Records of every client: for training, of these set aside for validation, and for testing."""

    train: int
    held: int
    test: int


def apportion(weights: np.ndarray, total: int, most: np.ndarray) -> np.ndarray:
    """int64 (K,): `total` shared out as the weights (K,) say, by largest remainders, no part above `most` (K,).

    What does not fit goes to the parts with room by their weights, and by their room once no weight is left there.
    ValueError if all the room is too little.
    """
    if total > most.sum():
        raise ValueError(f"{total} do not fit into {most.sum()}")
    given = np.zeros(len(most), np.int64)
    while (missing := total - int(given.sum())) > 0:
        room = most - given
        wanted = np.where(room > 0, weights, 0.0)
        if not wanted.any():
            wanted = room.astype(float)
        quota = missing * (wanted / wanted.sum())
        whole = np.floor(quota).astype(np.int64)
        whole[np.argsort(whole - quota, kind="stable")[: missing - whole.sum()]] += 1
        given += np.minimum(whole, room)
    return given


class _Pools:
    """All rows in random order within their label: label k's are rows[start[k] : start[k] + size[k]]."""

    def __init__(self, labels: np.ndarray, classes: int, rng: np.random.Generator) -> None:
        order = rng.permutation(len(labels))
        self.rows = order[np.argsort(labels[order], kind="stable")]
        self.size = np.bincount(labels, minlength=classes)
        self.start = np.cumsum(self.size) - self.size

    def take(self, first: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """counts[k] rows of each label k from its first[k]-th on, round and round."""
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
        return self.rows[np.repeat(self.start, counts) + within % np.repeat(self.size, counts)]


def shares(
    train_y: np.ndarray, test_y: np.ndarray, classes: int, count: int, sizes: Sizes, alpha: float, rng: np.random.Generator
) -> list[Share]:
    """Train, validation and test rows, int64, of `count` clients; training and validation rows of all are disjoint.

    Each client draws its proportions from Dirichlet(alpha) and takes records to match from what those before it left: a
    label that has run out is made up for by the others, by the client's proportions. Its validation and test rows have the
    proportions of its training rows as near as whole numbers and the test set allow; test rows of clients overlap.
    """
    pools, tests = _Pools(train_y, classes, rng), _Pools(test_y, classes, rng)
    used = np.zeros(classes, np.int64)
    found = []
    for proportions in rng.dirichlet(np.full(classes, alpha), count):
        counts = apportion(proportions, sizes.train, pools.size - used)
        held = apportion(counts, sizes.held, counts)
        own = apportion(counts, sizes.test, tests.size)
        found.append((
            pools.take(used + held, counts - held),
            pools.take(used, held),
            tests.take(rng.integers(0, np.maximum(tests.size, 1)), own),
        ))  # fmt: skip
        used += counts
    return found
