"""Disjoint rows of the clients of one cluster, which are cut out when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpcfl_net.core.lazy_sequence import LazySequence
from dpcfl_net.data.quantity import held_back
from dpcfl_net.data.skew import Share


class DisjointShares(LazySequence[Share]):
    """Disjoint training rows of the given numbers, and `test` test rows each, disjoint where they fit; all read-only.

    Only the permutations are kept: a worker of a large roster looks at a few clients.

    Args:
        sizes: Training records of each client, validation records included.
        test: Test records of each client.
        validation: Fraction of its training records that a client sets aside.
        whole: Records of the training and the test set.
        rng: Draws the permutations of both.
        withheld: True for test rows that no client gets, bool (M,); None: none.

    Raises:
        ConfigError: If the fraction takes nothing or all of a client.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        test: int,
        validation: float,
        whole: tuple[int, int],
        rng: np.random.Generator,
        withheld: np.ndarray | None = None,
    ) -> None:
        self._order, tests = rng.permutation(whole[0]), rng.permutation(whole[1])
        if withheld is not None:
            tests = tests[~withheld[tests]]
        self._tests = np.tile(tests, 2)
        for rows in (self._order, self._tests):
            rows.setflags(write=False)
        self._ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._held = {size: held_back(validation, size) for size in set(sizes)}
        self._test, self._whole = test, len(tests)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def _item(self, position: int) -> Share:
        begin, end, at = int(self._ends[position]), int(self._ends[position + 1]), position * self._test % self._whole
        held = end - self._held[end - begin]
        return self._order[begin:held], self._order[held:end], self._tests[at : at + self._test]
