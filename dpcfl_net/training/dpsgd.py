"""DP-SGD on one client's records, and evaluation.

The output of training depends on data only through the clipped, noised sums. The step follows Abadi et al. 2016 with Poisson
sampling or random allocation, and the expected batch size as divisor. Physical batches are padded to sizes that depend on the
coins of sampling only, and a record's gradient has the same bits in all of them (physical_batches.py). A record with a
non-finite gradient, loss or norm is removed by selection before clipping, so that weights crafted to overflow on one record
reveal nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.privacy import clipping
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.randomness import stream
from dpcfl_net.privacy.slots import DPSGDSlot
from dpcfl_net.training import devices, memory
from dpcfl_net.training.batches import drawn_rows
from dpcfl_net.training.dpsgd_steps import Sums, stepper, tensor
from dpcfl_net.training.engine import Forward, GradientEngine
from dpcfl_net.training.fast_path import FastPath
from dpcfl_net.training.flat_models import require_model, require_models
from dpcfl_net.training.gradient_engines import choose, set_processor_flags
from dpcfl_net.training.layers import Layer, fast_layers, side_by_side
from dpcfl_net.training.losses import each_loss, each_right
from dpcfl_net.training.physical_batches import SameBits, even, padded, sizes, slots_for
from dpcfl_net.training.plain_path import PlainPath
from dpcfl_net.training.precision import in_precision
from dpcfl_net.training.sgd import pieces

# By path: many clients have few records, but a large network copies all its parameters for each batch.
EVALUATION_SLOTS = {"fast": 64, "plain": 128}
# Of a count: so many models run side by side, in the memory of one on 128 records.
MODELS_TOGETHER, COUNT_SLOTS = 4, 32
PRECISIONS = np.dtype(np.float32), np.dtype(np.float64)  # of gradients that are clipped


class Records(Protocol):
    """A client's own records."""

    def __len__(self) -> int:
        """Return the number of records."""

    def batch(self, rows: np.ndarray, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x (size, ...) float32 and y (size,) int64: `rows` first, then zeros with label 0."""


class Trainer:
    """DP-SGD of one model with a fixed clip norm, learning rate and physical batch.

    Args:
        module: Template of the model; its parameter values are not used.
        clip: Bound C on the L2 norm of a record's gradient, 1e-9 to 1e9.
        learning_rate: Step size, positive.
        batch_size: Expected batch; sets the largest physical batch only, the divisor is rate * N of the slot.
        path: Engine as for `gradient_engines.choose`, or a `GradientEngine`.
        task: Must be "classification".
        input_shape: Shape of one record, as for `gradient_engines.choose`; with None the first batch shows if the model fits.
        precision: "float32", or "bfloat16" for the forward and backward passes (`bfloat16.py`); weights, clipping and noise
            stay as they are.

    Attributes:
        path: Name of the engine.
        parameters: Number of parameters p.
        slots: Records of the largest physical batch.
        tap: Called with each step's noisy sum, (p,) float32, before the division; None: nothing is called.

    Raises:
        ConfigError: For another task, a number out of range, a precision that this processor or the model's engine does not
            have, or a layer that has no per-record gradients (BatchNorm, LSTM) or does not fit the records.
    """

    def __init__(
        self, module: nn.Module, *, clip: float, learning_rate: float, batch_size: int, path: str | GradientEngine = "auto",
        task: str = "classification", input_shape: tuple[int, ...] | None = None, precision: str = "float32",
    ) -> None:  # fmt: skip
        if task != "classification":
            raise ConfigError(f"DP-SGD trains classification only, got the task {task!r}: protect whole clients (privacy.unit)")
        if not (_is_number(clip) and 1e-9 <= clip <= 1e9):
            raise ConfigError(f"clip must lie in 1e-9 .. 1e9, got {clip!r}")
        if not (_is_number(learning_rate) and 0 < learning_rate < math.inf):
            raise ConfigError(f"learning_rate must be positive and finite, got {learning_rate!r}")
        if not _is_count(batch_size):
            raise ConfigError(f"batch_size must be a whole number of 1 or more, got {batch_size!r}")
        self.clip, self.learning_rate = float(clip), float(learning_rate)
        self.slots = slots_for(batch_size)
        self.path, self._engine = choose(module, path, input_shape) if isinstance(path, str) else (type(path).__name__, path)
        self._engine = in_precision(self._engine, module, self.path, precision)
        self._same_bits = SameBits(self._engine, module, self.slots)
        self.tap: Callable[[np.ndarray], None] | None = None
        self.parameters = sum(p.numel() for p in module.parameters())

    def train(
        self, theta: np.ndarray, data: Records, slot: DPSGDSlot, noise_multiplier: float, key: bytes,
        proximal: tuple[float, np.ndarray] | None = None, room: int | None = None,
    ) -> tuple[np.ndarray, Event]:  # fmt: skip
        """Run `slot.steps` steps of theta -= learning_rate * (noisy clipped sum) / (rate * N).

        Batches and noise come from separate streams of `key`: the same key gives the same bits.

        Args:
            theta: Initial model, (p,) float32; not changed.
            data: The client's records.
            slot: Sampling and steps.
            noise_multiplier: z; the noise has standard deviation z * clip.
            key: Secret of the task.
            proximal: (strength, centre): strength * (theta - centre) is added to each gradient after the noise.
            room: Fixed number of records computed per step (`pace.room`), at least 1; larger batches are cut. None: all sampled
                records.

        Returns:
            The model, (p,) float32, and the event that was run.

        Raises:
            ValueError: For a wrong shape, an empty expected batch, a bad noise multiplier or a bad room, before data is read.

        Source: Abadi et al. 2016, Algorithm 1.
        """
        records = len(data)
        slot.event(noise_multiplier)
        require_model("the model", theta, self.parameters)
        if proximal is not None:
            require_model("the centre of proximal", proximal[1], self.parameters)
        if records * slot.rate <= 0:
            raise ValueError(f"the expected batch is empty: {records} records at rate {slot.rate}")
        _require_room(room)
        memory.keep_freed()
        theta, batches, steps = theta.astype(np.float32, copy=True), stream(key, "batches"), 0
        sums = Sums(theta)
        take_step = stepper(
            theta, sums, key, self.tap, deviation=noise_multiplier * self.clip, expected=slot.rate * records,
            learning_rate=self.learning_rate, proximal=proximal,
        )  # fmt: skip
        with np.errstate(all="ignore"):
            for rows in drawn_rows(records, slot, batches):
                take_step(self._sum(sums, data, rows, room))
                steps += 1
        memory.give_back_freed()
        return sums.model(theta), slot.ran(noise_multiplier, steps)

    def clipped_sum(self, theta: np.ndarray, data: Records, rows: np.ndarray, room: int | None = None) -> np.ndarray:
        """Sum the clipped gradients of records.

        Args:
            theta: Model, (p,) float32 or float64, which is the precision of the gradients.
            data: The client's records.
            rows: Positions of the records.
            room: As for `train`.

        Returns:
            The sum, (p,) float64.

        Raises:
            ValueError: If `theta` has another shape or precision, or for a bad room.
        """
        require_model("the model", theta, self.parameters)
        if (kind := np.asarray(theta).dtype) not in PRECISIONS:
            raise ValueError(f"the model is of {kind}: must be of {' or '.join(map(str, PRECISIONS))}")
        _require_room(room)
        total = self._sum(Sums(theta), data, rows, room).cpu().numpy()
        return total.astype(np.float64, copy=False)

    def check_batches(self, input_shape: tuple[int, ...], room: int | None = None) -> None:
        """Check, on synthetic records and the CPU, that a record's gradient does not depend on its slot in the largest batch.

        Training checks each batch as well; this is for callers that pay before they train.

        Args:
            input_shape: Shape of one record.
            room: As for `train`.

        Raises:
            ConfigError: As `SameBits.alike`.
            ValueError: For a bad room.
        """
        _require_room(room)
        set_processor_flags()
        self._same_bits.alike(self.slots if room is None else even(room), input_shape, torch.float32)

    @torch.no_grad()
    def _sum(self, sums: Sums, data: Records, rows: np.ndarray, room: int | None) -> torch.Tensor:
        """Sum of clipped gradients, (p,): of one physical batch in the precision of the model, of several in float64."""
        set_processor_flags()
        sums.begin()
        batches = self._batches(rows, room)
        for size, piece in batches:
            x, y = self._batch(data, piece, size, sums.weights, room)
            # Tensors without version counters save 3 % of a small step. The other engines use autograd.
            with torch.inference_mode(self.path == "fast"):
                logits, parts = self._engine.gradients(sums.weights, x, y)
                usable = _finite(logits) & (torch.arange(len(logits), device=logits.device) < len(piece))
                clipping.clipped_sum(parts, usable, self.clip, sums.part, self.slots if room is None else size)
            if len(batches) == 1:
                return sums.part
            sums.add()
        return sums.total()

    def _batches(self, rows: np.ndarray, room: int | None) -> list[tuple[int, np.ndarray]]:
        """Sizes of physical batches, and the rows in them."""
        if room is not None:
            size, cut = padded(rows[:room], room)
        elif _has_one_size(room):
            size, cut = self.slots, pieces(rows, self.slots)
        else:
            wanted = sizes(len(rows), self.slots)
            return list(zip(wanted, np.split(rows, np.cumsum(wanted)[:-1]), strict=True)) if wanted else []
        return [(size, piece) for piece in cut]

    def _batch(
        self, data: Records, rows: np.ndarray, size: int, weights: torch.Tensor, room: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and y of a physical batch of at least `size` slots."""
        x, y = data.batch(rows, size)
        fitting = self._same_bits.alike if _has_one_size(room) else self._same_bits.fitting
        right = fitting(size, tuple(x.shape[1:]), weights.dtype)
        x, y = (x, y) if right == size else data.batch(rows, right)
        return x.to(weights.device), y.to(weights.device)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _require_room(room: Any) -> None:
    """ValueError for a room that holds no record, before data is read."""
    if room is not None and not _is_count(room):
        raise ValueError(f"room must be a whole number of 1 or more, or None for all sampled records, got {room!r}")


def _has_one_size(room: int | None) -> bool:
    """True if all physical batches have one size. A GPU's kernels are chosen by much more than the shape: one shape serves all."""
    return room is not None or devices.torch_device().type != "cpu"


class Evaluator:
    """Accuracy and loss in evaluation mode, on padded batches of one shape, each record independently.

    Also evaluates models that DP-SGD cannot train, such as an LSTM.

    Args:
        module: Template of the model; its parameter values are not used.
        task: "classification", or "regression" with one output (`losses`).
        input_shape: Shape of one record, as for `layers.fast_layers`.

    Attributes:
        path: "fast" or "plain".

    Raises:
        ConfigError: For a layer that mixes records (BatchNorm) or does not fit them.
    """

    def __init__(self, module: nn.Module, task: str = "classification", input_shape: tuple[int, ...] | None = None) -> None:
        set_processor_flags()
        self._layers = fast_layers(module, input_shape)
        self._engine: Forward = PlainPath(module) if self._layers is None else FastPath(self._layers)
        self.path, self._task = "plain" if self._layers is None else "fast", task
        self._parameters = sum(p.numel() for p in module.parameters())

    def count_correct(self, models: np.ndarray, data: Records) -> list[int]:
        """Count the records whose label has the largest logit; ties go to the smallest index, non-finite logits are wrong.

        Args:
            models: Models, (M, p).
            data: The records.

        Returns:
            The number of correct records of each model.

        Raises:
            ValueError: If `models` has another shape, or no row.
        """
        require_models(models, self._parameters)
        if self._layers is None:
            return [int(self.each(model, data)[1].sum()) for model in models]
        return [count for few in pieces(models, MODELS_TOGETHER) for count in self._counts(self._layers, few, data)]

    @torch.no_grad()
    def _counts(self, layers: list[Layer], models: np.ndarray, data: Records) -> list[int]:
        set_processor_flags()
        thetas, counts = tensor(models), [0] * len(models)
        for piece in pieces(np.arange(len(data)), COUNT_SLOTS):
            x, y = data.batch(piece, COUNT_SLOTS)
            outputs = side_by_side(layers, thetas, x.to(thetas)).double().cpu()
            for m, own in enumerate(outputs):
                counts[m] += int(self._right(own, y)[: len(piece)].sum())
        return counts

    def accuracy_and_loss(self, theta: np.ndarray, data: Records, base_model: np.ndarray | None = None) -> tuple[float, float]:
        """Compute accuracy and mean loss.

        Args:
            theta: Model, (p,).
            data: The records, at least one.
            base_model: As for `each`.

        Returns:
            Accuracy, 0 to 1, and mean loss, inf if an output is not finite.

        Raises:
            ValueError: Without records, or if a model has another shape.
        """
        if len(data) == 0:
            raise ValueError("no records to evaluate on")
        losses, correct = self.each(theta, data, base_model)
        return float(correct.mean()), float(losses.mean())

    @torch.no_grad()
    def each(self, theta: np.ndarray, data: Records, base_model: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Compute the loss and correctness of each record.

        Args:
            theta: Model, (p,).
            data: The records.
            base_model: A second model, (p,), whose outputs are added.

        Returns:
            Losses, (n,) float64, and True for each correct record, (n,) bool.

        Raises:
            ValueError: If a model has another shape.
        """
        require_model("the model", theta, self._parameters)
        if base_model is not None:
            require_model("base_model", base_model, self._parameters)
        set_processor_flags()
        models = [tensor(model) for model in (theta, base_model) if model is not None]
        losses, right = [np.empty(0)], [np.empty(0, bool)]
        slots = EVALUATION_SLOTS[self.path]
        for piece in pieces(np.arange(len(data)), slots):
            x, y = data.batch(piece, slots)
            outputs = sum(self._engine.logits(weights, x.to(weights.device)).double() for weights in models)
            assert isinstance(outputs, torch.Tensor)
            outputs = outputs.cpu()
            loss = each_loss(self._task, outputs, y).numpy()
            losses.append(np.where(_finite(outputs).numpy(), loss, np.inf)[: len(piece)])
            right.append(self._right(outputs, y)[: len(piece)])
        return np.concatenate(losses), np.concatenate(right)

    def _right(self, outputs: torch.Tensor, y: torch.Tensor) -> np.ndarray:
        """True for each correct record, (n,) bool."""
        right: np.ndarray = (_finite(outputs) & each_right(self._task, outputs, y)).numpy()
        return right


def _finite(logits: torch.Tensor) -> torch.Tensor:
    # An infinite spread is an infinite loss, though each logit may be finite; NaN spreads through, and is not below infinity.
    return logits.amax(1) - logits.amin(1) < math.inf
