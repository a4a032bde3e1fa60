"""Physical batches: into how many slots the records that a step has drawn are padded.

The size of a batch depends on the coins of sampling and on public numbers only (`sizes`). Why that is sound, for a record i, the
set S of all drawn records, and a data set in which i is emptied or replaced:

1. Equal coins. |S| is the same, and so are sizes, slots and kernels. Gradients of the other records have the same bits, since a
   row does not depend on its neighbours. Only the slot of i differs: it is removed by selection (zero-out), or holds another
   record (replace-one). So the sums differ by at most the clip norm, or twice that (proof: privacy/clipping.py).
2. Different coins of i. Amplification by sampling also compares the sum with i to the sum without, where the others lie in other
   slots and in a batch of another size. Three things could make the sum of the others depend on the coin of i:

   - Gradients whose bits change with the size or slot, as a library may choose another kernel. Weights can be crafted so that
     rounding decides a gradient's direction, so this would show the coin. `SameBits` therefore compares sizes before they are
     used. A kernel's order of additions depends on shapes alone, so synthetic records show it.
   - Clip factors: the reserve for rounding is that of the largest size (`slots`), whatever the size of the batch.
   - The order in which clipped gradients are added. For n records this moves the sum by at most 2 n gamma clip', with gamma of
     privacy/clipping.py, whatever the weights (for `PlaceSums`, by at most the share of clip' that covers their rounding, times
     n). Batches of one fixed size have this too, as the coin of i moves all later records by one slot. Epsilon assumes real
     arithmetic for it.

Where time must not depend on |S| (`pace.room`), sizes are fixed (`padded`).
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from dpcfl_net.training import synthetic

if TYPE_CHECKING:
    from dpcfl_net.training.engine import GradientEngine

LARGEST = 80
# Each size is compared once, and takes room in oneDNN's cache of kernels. Below 4 slots products take other kernels.
_UNIT, _LARGE_UNIT, _MANY_SLOTS = 4, 8, 48


class SameBits:
    """Sizes of batches in which an engine computes a record's gradient with the same bits as in the largest batch.

    Args:
        engine: The engine.
        module: The model, for synthetic parameters and records.
        slots: Size of the largest batch.
    """

    def __init__(self, engine: GradientEngine, module: nn.Module, slots: int) -> None:
        self._engine, self._module, self._slots = engine, copy.deepcopy(module), slots
        self._theta = synthetic.parameters(module)
        self._known: dict[tuple[int, torch.dtype], bool] = {}
        self._largest: dict[torch.dtype, list[torch.Tensor]] = {}

    def fitting(self, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the smallest size from `size` up at which gradients have the same bits.

        Args:
            size: A size of `sizes`.
            shape: Shape of one record.
            dtype: Precision of the gradients.
        """
        while size < self._slots and not self._same(size, shape, dtype):
            size = min(self._slots, size + unit(self._slots))
        return size

    def _same(self, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        if (size, dtype) not in self._known:
            if dtype not in self._largest:
                found = self._numbers(self._slots, shape, dtype)
                self._largest[dtype] = [each[: synthetic.RECORDS] for each in found]
            largest = self._largest[dtype]
            found = self._numbers(size, shape, dtype)
            # A record is in every third slot, so the comparison covers slots too.
            order = torch.arange(size) % synthetic.RECORDS
            self._known[size, dtype] = all(torch.equal(a, b[order]) for a, b in zip(found, largest, strict=True))
        return self._known[size, dtype]

    def _numbers(self, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        """Logits and squared norms of all blocks for synthetic records in `size` slots: (size, ...) each."""
        x = synthetic.records(self._module, shape, synthetic.RECORDS)[torch.arange(size) % synthetic.RECORDS]
        with torch.no_grad():
            logits, parts = self._engine.gradients(self._theta.to(dtype), x, torch.zeros(size, dtype=torch.int64))
        return [logits, *(part.squared_norms() for part in parts)]


def slots_for(batch_size: int) -> int:
    """Compute the size of the largest physical batch for an expected batch size.

    Equal pieces of at most `LARGEST` that leave 1.5 standard deviations of room, enough for 13 of 14 Poisson batches. On the CNN
    sizes from 24 to 96 cost the same per record; on ResNet-18 a record in a batch of 64 takes 0.88 of its time in one of 32.
    """
    slots = even(batch_size + 1.5 * math.sqrt(batch_size))
    return unit(slots) * math.ceil(slots / unit(slots))


def unit(slots: int) -> int:
    """Return the number of which all sizes up to `slots` are multiples."""
    return _UNIT if slots <= _MANY_SLOTS else _LARGE_UNIT


def sizes(drawn: int, slots: int) -> list[int]:
    """Compute sizes of physical batches, from the number of drawn records and the public largest size alone.

    Args:
        drawn: Number of drawn records.
        slots: Size of the largest batch.

    Returns:
        Sizes of nearly equal batches, multiples of `unit(slots)`, each at most `slots`, with less than a unit to spare in total.
    """
    units = math.ceil(drawn / unit(slots))
    count = math.ceil(units * unit(slots) / slots)
    return [unit(slots) * (units // count + (i < units % count)) for i in range(count)]


def likely_sizes(records: int, rate: float, slots: int) -> list[int]:
    """List the sizes of the physical batches of 95 % of the draws, the most likely ones first.

    Args:
        records: Number of records.
        rate: Probability that a given record is drawn.
        slots: Size of the largest batch.

    Returns:
        The sizes, each once.
    """
    mean, spread = rate * records, 2 * math.sqrt(records * rate * (1 - rate))
    counts = range(max(1, math.floor(mean - spread)), min(records, math.ceil(mean + spread)) + 1)
    by_distance = sorted(counts, key=lambda count: abs(count - mean))
    return list(dict.fromkeys(size for count in by_distance for size in sizes(count, slots)))


def even(records: float) -> int:
    """Return the size of equal pieces of at most `LARGEST` that hold `records` records."""
    return math.ceil(records / math.ceil(records / LARGEST))


def padded(rows: np.ndarray, room: int) -> tuple[int, list[np.ndarray]]:
    """Cut rows into equal pieces with room for `room` records; the last pieces may be empty.

    Args:
        rows: Positions, at most `room`.
        room: Records to make room for.

    Returns:
        Size of a piece, and the pieces.
    """
    size = even(room)
    return size, [rows[start : start + size] for start in range(0, room, size)]
