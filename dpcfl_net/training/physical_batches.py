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
     used, and the slots of the largest one: products with two or three outputs round alike in every second of 4, 8 or 12 slots
     only. A kernel's order of additions depends on shapes alone, so synthetic records show it.
   - Clip factors: the reserve for rounding is that of the largest size (`slots`), whatever the size of the batch.
   - The order in which clipped gradients are added. For n records this moves the sum by at most 2 n gamma clip', with gamma of
     privacy/clipping.py, whatever the weights (for `PlaceSums`, by at most the share of clip' that covers their rounding, times
     n). Batches of one fixed size have this too, as the coin of i moves all later records by one slot. Epsilon assumes real
     arithmetic for it.

Where time must not depend on |S| (`pace.room`), and on a GPU, all batches have one size, whose slots are compared too.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.training import devices, synthetic

if TYPE_CHECKING:
    from dpcfl_net.training.engine import GradientEngine

LARGEST = 80
# Each size is compared once, and takes room in oneDNN's cache of kernels. Below 4 slots products take other kernels.
_UNIT, _LARGE_UNIT, _MANY_SLOTS = 4, 8, 48
_COMPARED = 128  # numbers of logits: two kernels round the few numbers of a narrow model alike for one record in two


class SameBits:
    """Sizes of batches in which an engine computes a record's gradient with the same bits as in the largest batch.

    Args:
        engine: The engine.
        module: The model, for synthetic parameters and records; its parameter values are not used.
        slots: Size of the largest batch.
    """

    def __init__(self, engine: GradientEngine, module: nn.Module, slots: int) -> None:
        self._engine, self._module, self._slots = engine, copy.deepcopy(module), slots
        for vector in (parameter for parameter in self._module.parameters() if parameter.dim() < 2):
            vector.data.fill_(1.0)  # the module may be a skeleton, whose memory holds anything: with NaN no size would fit
        self._theta = synthetic.parameters(self._module)
        self._known: dict[tuple[int, torch.dtype], bool] = {}
        self._alike: dict[tuple[int, torch.dtype], int] = {}
        # Numbers of each record, for the sizes that `alike` tried.
        self._by_record: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._records = torch.empty(0)

    def fitting(self, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the smallest size from `size` up at which gradients have the same bits.

        Args:
            size: A size of `sizes`.
            shape: Shape of one record.
            dtype: Precision of the gradients.

        Raises:
            ConfigError: As `alike`.
        """
        largest = self.alike(self._slots, shape, dtype)
        while size < largest and not self._same(size, largest, shape, dtype):
            size = min(largest, size + unit(self._slots))
        return size

    def alike(self, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the smallest size from `size` up in which gradients have the same bits in all slots.

        Slots beyond those of the largest batch hold no record: they add nothing, without rounding.

        Args:
            size: Slots of a batch.
            shape: Shape of one record.
            dtype: Precision of the gradients.

        Raises:
            ConfigError: If bits differ in all sizes that were tried, up to `LARGEST` slots more, or the model does not fit the shape.
        """
        if (size, dtype) not in self._alike:
            step = unit(size)
            tried = [size, *range(step * (size // step + 1), size + LARGEST + 1, step)]
            found = next((each for each in tried if self._has_equal_slots(each, shape, dtype)), None)
            if found is None:
                raise ConfigError(
                    f"a record's gradient has other bits in other slots of a batch, at all sizes from {tried[0]} to {tried[-1]} that were "
                    "tried: the sum would show where a record lies; does forward use a record's place in the batch? If not, change the "
                    "width of the model's layers"
                )
            self._alike[size, dtype] = found
        return self._alike[size, dtype]

    def _has_equal_slots(self, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        places, found = self._numbers(size, 0, shape, dtype)
        # Each record in the slot before, so that all slots are compared.
        moved, others = self._numbers(size, 1, shape, dtype)
        by_record = self._by_record[size, dtype] = [each[: len(self._records)] for each in found]
        return all(
            torch.equal(a, each[places]) and torch.equal(b, each[moved])
            for a, b, each in zip(found, others, by_record, strict=True)
        )

    def _same(self, size: int, largest: int, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        if (size, dtype) not in self._known:
            places, found = self._numbers(size, 0, shape, dtype)
            pairs = zip(found, self._by_record[largest, dtype], strict=True)
            self._known[size, dtype] = all(torch.equal(a, each[places]) for a, each in pairs)
        return self._known[size, dtype]

    def _numbers(
        self, size: int, shift: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Synthetic records in batches of `size`: the record of each slot, (n,), and its logits and squared norms, (n, ...) each.

        Without a shift the first slots hold each record once, in order.
        """
        device = devices.torch_device()
        theta = self._theta.to(device)
        if not len(self._records):
            wanted = max(synthetic.RECORDS, math.ceil(_COMPARED / self._classes(theta, shape)))
            self._records = synthetic.records(self._module, shape, wanted)
        count = len(self._records)
        places = (torch.arange(size * math.ceil(count / size)) + shift) % count
        theta, labels, batches = theta.to(dtype), torch.zeros(size, dtype=torch.int64, device=device), []
        with torch.no_grad():
            for some in places.split(size):
                logits, parts = self._engine.gradients(theta, self._records[some].to(device), labels)
                batches.append([logits.cpu(), *(part.squared_norms().cpu() for part in parts)])
        return places, [torch.cat(each) for each in zip(*batches, strict=True)]

    def _classes(self, theta: torch.Tensor, shape: tuple[int, ...]) -> int:
        """Number of logits of one synthetic record; ConfigError if the model does not fit the shape."""
        try:
            logits = self._engine.logits(theta, synthetic.records(self._module, shape, 1).to(theta.device))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(f"the model does not fit records of the shape {shape} (input_shape): {error}") from error
        if logits.dim() != 2:
            raise ConfigError(
                f"the model does not fit records of the shape {shape} (input_shape): its logits of one have the shape "
                f"{tuple(logits.shape[1:])}, must be (classes,)"
            )
        return logits.shape[1]


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
