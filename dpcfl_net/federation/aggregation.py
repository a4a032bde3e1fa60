"""Means of updates that are added as they come, in client order and in float64, so that equal updates give equal bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from dpcfl_net.core import buffers

BLOCK = 1 << 16  # parameters added at a time: their sums stay in the second level of the processor's cache
LARGE = 1 << 17  # parameters of a model whose sums do not
HELD = 8  # updates of large models that are added together: each pass reads and writes the sums, twice the bytes of an update


@dataclass(frozen=True)
class PartialSums:
    """Sums of the updates of one group of clients.

    Attributes:
        counts: Updates of each model, (M,) int64.
        weights: Sum of their weights, (M,) float64.
        totals: Weighted sum of the updates, (M, p) float64; zeros for a model without one.
    """

    counts: np.ndarray
    weights: np.ndarray
    totals: np.ndarray


class RunningMean:
    """Mean of updates; it holds their sum and none of them.

    Args:
        weights: Public weight of each client; None weighs all alike.

    Attributes:
        count: Updates so far.
    """

    def __init__(self, weights: Mapping[int, float] | None = None) -> None:
        self.count = 0
        self._weights, self._total, self._share = weights, np.zeros(0), 0.0

    def add(self, updates: Sequence[tuple[int, np.ndarray]]) -> None:
        """Add updates; their order over all calls decides the last bits, and a federation streams in client order.

        Args:
            updates: Client id and update, (p,) float32, of at least one client.
        """
        if not self.count:
            self._begin(updates[0][1].shape)
        weights = [1.0 if self._weights is None else float(self._weights[client]) for client, _ in updates]
        for at in range(0, self._total.size, BLOCK):
            total = self._total[at : at + BLOCK]
            for weight, (_, update) in zip(weights, updates, strict=True):
                part = update[at : at + BLOCK]
                total += part if self._weights is None else weight * part.astype(np.float64)
        for weight in weights:
            self._share += weight
        self.count += len(updates)

    def merge(self, count: int, weight: float, total: np.ndarray) -> None:
        """Add the sum of a group's updates; the order of calls decides the last bits, and groups are added in their order.

        Args:
            count: Updates of the group, at least one.
            weight: Sum of their weights.
            total: Weighted sum of the updates, (p,) float64.
        """
        if not self.count:
            self._begin(total.shape)
        self._total += total
        self._share += weight
        self.count += count

    def _begin(self, shape: tuple[int, ...]) -> None:
        self._total = buffers.array(shape, np.float64)
        self._total.fill(0.0)

    @property
    def sums(self) -> tuple[float, np.ndarray]:
        """Sum of the weights, and the weighted sum of the updates."""
        return self._share, self._total

    def value(self) -> np.ndarray:
        """Return the mean, (p,) float32; ValueError without updates."""
        if not self.count:
            raise ValueError("no update to average")
        mean = buffers.array(self._total.shape, np.float32)
        np.divide(self._total, self._share, out=mean, casting="same_kind")  # rounds once, without a float64 copy
        return mean


class ModelMeans:
    """Models, and for each of them the running mean of its clients' updates.

    Args:
        models: (M, p) float32.
        weights: Public weight of each client; None weighs all alike.

    Attributes:
        models: As given.
        weights: As given.

    Source: Malekmohammadi et al. 2025, Algorithm 1, lines 24-28.
    """

    def __init__(self, models: np.ndarray, weights: Mapping[int, float] | None = None) -> None:
        self.models, self.weights = models, weights
        self._sums = [RunningMean(weights) for _ in models]
        self._held: list[tuple[int, int, np.ndarray]] = []

    def add(self, row: int, client: int, update: np.ndarray) -> None:
        """Add an update to the mean of one model; at most HELD updates of large models wait to be added. See `RunningMean.add`.

        Args:
            row: Row of the model.
            client: Client id.
            update: (p,) float32; it must not change until the means are read.

        Raises:
            ValueError: If there is no such row, or the update is no array of p numbers.
        """
        if not isinstance(row, Integral) or not 0 <= row < len(self._sums):
            raise ValueError(f"row is {row!r}: must be a whole number from 0 to {len(self._sums) - 1}, a row of the models")
        _require_update(client, update, self.models.shape[1:])
        self._held.append((row, client, update))
        if len(self._held) == HELD or update.size <= LARGE:
            self._add_held()

    def sums(self) -> PartialSums:
        """Return the sums of all updates so far."""
        rows = len(self._sums)
        found = PartialSums(np.zeros(rows, np.int64), np.zeros(rows), np.zeros(self.models.shape))
        for row, mean in enumerate(self._means()):
            if mean.count:
                found.counts[row] = mean.count
                found.weights[row], found.totals[row] = mean.sums
        return found

    def merge(self, part: PartialSums) -> None:
        """Add the sums of one group of clients; see `RunningMean.merge`.

        Args:
            part: The sums of the group.
        """
        means = self._means()
        for row in np.flatnonzero(part.counts):
            means[row].merge(int(part.counts[row]), float(part.weights[row]), part.totals[row])

    def moved(self) -> np.ndarray:
        """Return the models with their mean updates added, (M, p) float32; a model without an update stays."""
        moved = buffers.array(self.models.shape, self.models.dtype)
        moved[...] = self.models
        for row, mean in enumerate(self._means()):
            if mean.count:
                moved[row] += mean.value()
        return moved

    def _means(self) -> list[RunningMean]:
        self._add_held()
        return self._sums

    def _add_held(self) -> None:
        for row in sorted({row for row, _, _ in self._held}):
            self._sums[row].add([(client, update) for other, client, update in self._held if other == row])
        self._held.clear()


class GroupedMeans:
    """Adds updates as aggregators do: those of a group are summed first, and the sums of groups are added in their order.

    Args:
        means: Receives the sums.
        groups: Client ids of each group, in order; none: updates are added one by one.
    """

    def __init__(self, means: ModelMeans, groups: Sequence[range]) -> None:
        self._means, self._groups, self._next = means, groups, 0
        self._part: ModelMeans | None = None

    def add(self, row: int, client: int, update: np.ndarray) -> None:
        """Add an update; clients must come in order. See `ModelMeans.add`."""
        if not self._groups:
            self._means.add(row, client, update)
            return
        while client not in self._groups[self._next]:
            self.close_group()
            self._next += 1
        if self._part is None:
            self._part = ModelMeans(self._means.models, self._means.weights)
        self._part.add(row, client, update)

    def close_group(self) -> None:
        """Add the sums of the open group to the means."""
        if self._part is not None:
            self._means.merge(self._part.sums())
            self._part = None


def mean(updates: Mapping[int, np.ndarray]) -> np.ndarray:
    """Compute the mean of updates that are all in memory.

    Args:
        updates: Client to its (p,) float32 update.

    Returns:
        The mean, (p,) float32.

    Raises:
        ValueError: Without updates, or if one is no array, or they differ in shape.
    """
    if not isinstance(updates, Mapping):
        raise ValueError(f"updates are of type {type(updates).__name__}: must map each client to its update")
    if not updates:
        raise ValueError("no update to average")
    first = updates[min(updates)]
    shape = (first.size,) if isinstance(first, np.ndarray) else None
    for client, update in updates.items():
        _require_update(client, update, shape)
    ordered = [updates[client] for client in sorted(updates)]
    found = buffers.array(ordered[0].shape, np.float32)
    sums = np.empty(min(BLOCK, found.size))
    for at in range(0, found.size, BLOCK):
        block = found[at : at + BLOCK]
        total = sums[: block.size]
        total.fill(0.0)
        for update in ordered:
            total += update[at : at + BLOCK]
        np.divide(total, len(ordered), out=block, casting="same_kind")
    return found


def _require_update(client: int, update: Any, shape: tuple[int, ...] | None) -> None:
    """ValueError for an update that is no vector of real numbers of this shape (None: unknown): NumPy would repeat a single number."""
    if not isinstance(update, np.ndarray):
        raise ValueError(
            f"the update of client {client} is of type {type(update).__name__}: must be an array of shape {shape or '(p,)'}"
        )
    if update.shape != shape or update.dtype.kind not in "fiu":
        raise ValueError(
            f"the update of client {client} has shape {update.shape} and type {update.dtype}: must be {shape} real numbers"
        )


def chosen_row(release: Mapping[str, np.ndarray], count: int) -> int | None:
    """Read a choice; None for an index without a model, which is ignored, and so is its update.

    Args:
        release: Release with the tensor "choice".
        count: Number of models.
    """
    row = int(release["choice"])
    return row if 0 <= row < count else None
