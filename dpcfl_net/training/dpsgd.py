"""DP-SGD over one client's records, and evaluation: nothing that comes out depends on data but through the clipped, noised sum.

The step is that of Abadi et al. 2016 with Poisson sampling and the expected batch size as divisor. Batches have one fixed
shape, padded: neither speed nor rounding depends on which records exist. A record whose gradient, loss or norm is not
finite is removed by selection before clipping, so that weights crafted to overflow on one record read nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import nn

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.privacy import clipping
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.privacy.mechanisms import gaussian_on_grid
from dpcfl_net.privacy.randomness import stream
from dpcfl_net.privacy.slots import DPSGDSlot
from dpcfl_net.training import devices, memory
from dpcfl_net.training.fast_path import FastPath
from dpcfl_net.training.gradient_engines import Engine, Forward, choose, processor
from dpcfl_net.training.layers import plan
from dpcfl_net.training.losses import each_loss, each_right
from dpcfl_net.training.plain_path import PlainPath

EVALUATION_SLOTS = 128
LARGEST_PIECE = 42


class Records(Protocol):
    """A client's own records."""

    def __len__(self) -> int:
        """How many."""

    def batch(self, rows: np.ndarray, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x (size, ...) float32, y (size,) int64: `rows` in slots 0.., the rest zeros with label 0."""


class Trainer:
    """DP-SGD with one model, clip norm, learning rate and physical batch shape.

    module: the template, whose parameter values are never used. clip: bound on a record's gradient norm. batch_size: the
    expected batch (it decides the physical shape alone; the divisor is rate * N of the slot). path: of `engines.choose`, or an
    Engine that is taken as given. tap: is shown each step's noisy sum, (p,) float32, before it is divided. input_shape: of a
    record, as `engines.choose` has it. Attributes `path`, `parameters` and `slots` (records a physical batch) tell what was
    taken. Raises ConfigError for a task that is not classification, naming a layer without per-record gradients
    (BatchNorm, LSTM) or one that does not fit the records, or a number out of range.
    """

    def __init__(
        self, module: nn.Module, *, clip: float, learning_rate: float, batch_size: int, path: str | Engine = "auto",
        task: str = "classification", tap: Callable[[np.ndarray], None] | None = None,
        input_shape: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        if task != "classification":
            raise ConfigError(f"DP-SGD trains classification only, got the task {task!r}: protect whole clients (privacy.unit)")
        if not 1e-9 <= clip <= 1e9:
            raise ConfigError(f"clip must lie in 1e-9 .. 1e9, got {clip!r}")
        if not (math.isfinite(learning_rate) and learning_rate > 0):
            raise ConfigError(f"learning_rate must be positive and finite, got {learning_rate!r}")
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size!r}")
        self.clip, self.learning_rate = float(clip), float(learning_rate)
        self.slots = physical_slots(batch_size)
        self.path, self._engine = choose(module, path, input_shape) if isinstance(path, str) else (type(path).__name__, path)
        self._tap = tap
        self.parameters = sum(p.numel() for p in module.parameters())

    def train(
        self, theta: np.ndarray, data: Records, slot: DPSGDSlot, noise_multiplier: float, key: bytes,
        proximal: tuple[float, np.ndarray] | None = None, room: int | None = None,
    ) -> tuple[np.ndarray, SampledGaussian]:  # fmt: skip
        """`slot.steps` steps of theta -= learning_rate * (noisy clipped sum) / (rate * N), and the event that really ran.

        theta: (p,) float32, not changed. key: the task's secret; batches and noise come from streams of their own under it,
        so the same key gives the same bits and another key others. pull = (strength, centre): adds strength * (theta - centre)
        to each step's gradient after the noise, for regularisers that do not look at data. room: of `pace.room`, cuts each
        batch to so many records and computes on as many slots whatever was drawn; None: as many as are needed. Raises ValueError for a wrong
        shape, an empty expected batch or a bad noise multiplier, before data is touched.
        """
        records = len(data)
        SampledGaussian(noise_multiplier, slot.rate, slot.steps)
        if theta.shape != (self.parameters,):
            raise ValueError(f"theta has shape {theta.shape}, the model has {self.parameters} parameters")
        if records * slot.rate <= 0:
            raise ValueError(f"the expected batch is empty: {records} records at rate {slot.rate}")
        memory.keep_freed()
        batches, noise = stream(key, "batches"), stream(key, "noise")
        theta = theta.astype(np.float32, copy=True)
        steps = 0
        with np.errstate(all="ignore"):
            for _ in range(slot.steps):
                total = self.clipped_sum(theta, data, poisson_rows(records, slot.rate, batches), room)
                gradient = gaussian_on_grid(total, noise_multiplier * self.clip, noise).astype(np.float32)
                if self._tap is not None:
                    self._tap(gradient)
                gradient /= np.float32(slot.rate * records)
                if proximal is not None:
                    gradient += np.float32(proximal[0]) * (theta - proximal[1])
                theta -= np.float32(self.learning_rate) * gradient
                steps += 1
        memory.give_back_freed()
        return theta, SampledGaussian(noise_multiplier, slot.rate, steps)

    @torch.no_grad()
    def clipped_sum(self, theta: np.ndarray, data: Records, rows: np.ndarray, room: int | None = None) -> np.ndarray:
        """(p,) float64: the sum of the clipped gradients of the records `rows`, in theta's precision within a piece.

        room: as `train` has it.
        """
        processor()
        weights = _tensor(theta)
        total = torch.zeros(self.parameters, dtype=torch.float64, device=weights.device)
        size, batches = (self.slots, pieces(rows, self.slots)) if room is None else padded(rows[:room], room)
        slots = torch.arange(size, device=weights.device)
        for piece in batches:
            x, y = (values.to(weights.device) for values in data.batch(piece, size))
            logits, parts = self._engine.gradients(weights, x, y)
            usable = _finite(logits) & (slots < len(piece))
            total += clipping.clipped_sum(parts, usable, self.clip, self.parameters, weights.dtype)
        return total.cpu().numpy()


class Evaluator:
    """Accuracy and loss in evaluation mode, on padded batches of one shape, each row on its own.

    task: "classification", or "regression" of one output (`losses`). input_shape: of a record, as `layers.plan` has it. Takes
    models that DP-SGD cannot train, such as an LSTM; attribute `path`, "fast" or "plain", tells how. Raises ConfigError
    naming a layer that mixes records (BatchNorm) or does not fit them.
    """

    def __init__(self, module: nn.Module, task: str = "classification", input_shape: tuple[int, ...] | None = None) -> None:
        processor()
        layers = plan(module, input_shape)
        self._engine: Forward = PlainPath(module) if layers is None else FastPath(layers)
        self.path, self._task = "plain" if layers is None else "fast", task

    def count_correct(self, theta: np.ndarray, data: Records) -> int:
        """How many records get their label as the largest logit; the smallest index wins a tie, non-finite logits are wrong."""
        return int(self.each(theta, data)[1].sum())

    def accuracy_and_loss(self, theta: np.ndarray, data: Records, base_model: np.ndarray | None = None) -> tuple[float, float]:
        """Share of right records, and mean loss (inf if some outputs are not finite); ValueError without records."""
        if len(data) == 0:
            raise ValueError("no records to evaluate on")
        losses, correct = self.each(theta, data, base_model)
        return float(correct.mean()), float(losses.mean())

    @torch.no_grad()
    def each(self, theta: np.ndarray, data: Records, base_model: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Of each record its loss, (n,) float64, and whether it is right, (n,) bool.

        beside: a second model, (p,), whose outputs are added to those of `theta`.
        """
        processor()
        models = [_tensor(model) for model in (theta, base_model) if model is not None]
        losses, right = [np.empty(0)], [np.empty(0, bool)]
        for piece in pieces(np.arange(len(data)), EVALUATION_SLOTS):
            x, y = data.batch(piece, EVALUATION_SLOTS)
            outputs = sum(self._engine.logits(weights, x.to(weights.device)).double() for weights in models)
            assert isinstance(outputs, torch.Tensor)
            outputs = outputs.cpu()
            finite = _finite(outputs).numpy()
            loss = each_loss(self._task, outputs, y).numpy()
            losses.append(np.where(finite, loss, np.inf)[: len(piece)])
            right.append((finite & each_right(self._task, outputs, y).numpy())[: len(piece)])
        return np.concatenate(losses), np.concatenate(right)


def flatten(module: nn.Module) -> np.ndarray:
    """All parameters in `named_parameters` order, each row-major: (p,) float32."""
    return np.concatenate([p.detach().numpy().reshape(-1) for _, p in module.named_parameters()]).astype(np.float32)


def poisson_rows(records: int, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Positions of a Poisson batch: each of 0..records-1 on its own with probability `rate`; at rate 1 exactly all."""
    if rate == 1:
        return np.arange(records)
    return np.flatnonzero(rng.random(records) < rate)


def physical_slots(batch_size: int) -> int:
    """Slots of a physical batch for an expected batch.

    Equal pieces of at most `LARGEST_PIECE` that together leave 1.5 deviations of room: 13 of 14 Poisson batches need no more. A piece
    costs about as much as six records before its first, so that shorter ones, though fewer of their slots stay empty, are
    slower. (Measured on the CNN: 1.1 ms a piece and 0.18 ms a slot.)
    """
    return even(batch_size + 1.5 * math.sqrt(batch_size))


def even(records: float) -> int:
    """The size of equal pieces of at most `LARGEST_PIECE` that hold so many records."""
    return math.ceil(records / math.ceil(records / LARGEST_PIECE))


def padded(rows: np.ndarray, room: int) -> tuple[int, list[np.ndarray]]:
    """The size of equal pieces with room for `room` records, and `rows` cut into all of them, the last ones perhaps empty."""
    size = even(room)
    return size, [rows[start : start + size] for start in range(0, room, size)]


def pieces(rows: np.ndarray, slots: int) -> list[np.ndarray]:
    """`rows` cut into runs of at most `slots`."""
    return [rows[start : start + slots] for start in range(0, len(rows), slots)]


def _tensor(theta: np.ndarray) -> torch.Tensor:
    # A model as it comes off the wire is read-only, which torch has no word for: that one is copied.
    return torch.from_numpy(np.require(theta, requirements=["C", "W"])).to(devices.torch_device())


def _finite(logits: torch.Tensor) -> torch.Tensor:
    # An infinite spread is an infinite loss, though each logit may be finite; NaN spreads through, and is not below infinity.
    return logits.amax(1) - logits.amin(1) < math.inf
