"""Argument of client steps: mechanisms on private data that record what ran."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dpcfl_net.core.protocol import Protocol
from dpcfl_net.federation.gate import Charge
from dpcfl_net.federation.secure.client_side import Masking
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.events.unprotected import Unprotected
from dpcfl_net.privacy.mechanisms import check_bound, exponential_mechanism, gaussian_on_grid, shortened
from dpcfl_net.privacy.normal_stream import NormalStream
from dpcfl_net.privacy.randomness import derive, stream
from dpcfl_net.privacy.slots import DPSGDSlot, GaussianSlot, RawSlot, SecureSlot, SelectionSlot, Slot, UnprotectedSlot
from dpcfl_net.training import devices
from dpcfl_net.training.flat_models import require_model, require_models

if TYPE_CHECKING:  # torch is imported only where something is computed
    from dpcfl_net.federation.engine import Engine

S = TypeVar("S", bound=Slot)


@dataclass
class Client:
    """Argument `me` of a client step: mechanisms on private data, and the state that is committed with the release.

    Only these methods read the records. `dpsgd`, `select`, `noisy_loss`, `noisy_update` and `noisy_sum` protect their results;
    `masked_update` and `masked_gradient` protect the secure sum; `sgd`, `losses`, `lowest_loss`, `distances` and
    `validation_loss` protect nothing. Each records the event of the mechanism that ran, and the privacy gate compares these
    events with the debit. A slot pays for one call of a mechanism that protects its result, whose randomness follows from the
    slot's name: a second call would draw the same noise, and the difference of both results would have none, so the gate
    withholds the release. A method raises ValueError for a slot that the step does not charge, or of another type than it takes, and
    for models of another shape.

    Attributes:
        protocol: The signed protocol.
        state: The client's state by name: arrays of float16, float32, int8, int32, int64, uint8, uint16 or uint32. Where secure sums protect
            whole clients, it is empty in a step without a mask: it may hold what was computed for a sum, which no noise of the step covers.
        ran: Events of the mechanisms that ran.
    """

    protocol: Protocol
    state: dict[str, Any]
    _engine: Engine
    _data: Any
    _validation: Callable[[], Any]
    _charge: Charge
    _room: Callable[[DPSGDSlot], int | None] = lambda slot: None
    ran: list[Event] = field(default_factory=list)
    _masking: Masking | None = None
    _raw: set[str] = field(default_factory=set)
    _used: set[str] = field(default_factory=set)
    _trainings: int = 0
    _inside: str = ""  # secure slot whose contribution is computed now

    def dpsgd(self, slot: str, model: np.ndarray, proximal: tuple[float, np.ndarray] | None = None) -> np.ndarray:
        """Run the DP-SGD steps of a slot.

        Args:
            slot: Name of the slot.
            model: Parameters to start from, (p,) float32.
            proximal: (lambda, centre): lambda * (theta - centre) is added to each gradient after the noise, so that it costs nothing;
                None: no term.

        Returns:
            The trained parameters, (p,) float32.
        """
        spec = self._use(slot, DPSGDSlot)
        key = slot_key(self._charge.key, slot)
        theta, event = self._engine.trainer.train(model, self._data, spec, self._charge.z, key, proximal, self._room(spec))
        self.ran.append(event)
        return theta

    def select(self, slot: str, models: np.ndarray) -> int:
        """Choose a model by the exponential mechanism: P(m) proportional to exp(eta * records that m classifies correctly).

        Args:
            slot: Name of the slot.
            models: (M, p) float32.

        Returns:
            Index of the model, 0 to M - 1.
        """
        spec = self._use(slot, SelectionSlot)
        counts = self._engine.evaluator.count_correct(models, self._data)
        choice = exponential_mechanism(counts, spec.eta, stream(slot_key(self._charge.key, slot), "selection"))
        self.ran.append(spec.event(self._charge.noise_multiplier, self.protocol.privacy.adjacency))
        return choice

    def lowest_loss(self, slot: str, models: np.ndarray) -> int:
        """Find the model with the lowest mean loss on the client's records; raw, so epsilon is inf.

        Args:
            slot: Name of the slot.
            models: (M, p) float32.

        Returns:
            Index of the model, 0 to M - 1.
        """
        return int(np.argmin(self.losses(slot, models)))

    def losses(self, slot: str, models: np.ndarray, base_model: np.ndarray | None = None) -> np.ndarray:
        """Compute the mean loss of each model on the client's records; raw, so epsilon is inf.

        Args:
            slot: Name of the slot.
            models: (M, p) float32.
            base_model: (p,) float32, whose outputs are added to those of each model; None: none.

        Returns:
            Mean losses, (M,) float64.
        """
        self._without_guarantee(slot)
        losses: np.ndarray = self._engine.sgd.mean_losses(models, self._data, base_model)
        return losses

    def distances(self, slot: str, own_model: np.ndarray, models: np.ndarray) -> np.ndarray:
        """Compute the squared distance of each model from one that the client keeps; raw, so epsilon is inf.

        Args:
            slot: Name of the slot.
            own_model: (p,) float32, as of `state`.
            models: (M, p) float32.

        Returns:
            Squared L2 distances, (M,) float64.
        """
        self._without_guarantee(slot)
        require_model("own_model", own_model, self.protocol.model.parameters)
        require_models(models, self.protocol.model.parameters)
        return np.array([np.sum((own_model - model).astype(np.float64) ** 2) for model in models])

    def sgd(self, slot: str, model: np.ndarray, **how: Any) -> np.ndarray:
        """Train by plain SGD; raw, so epsilon is inf.

        Args:
            slot: Name of the slot.
            model: Parameters to start from, (p,) float32.
            **how: `proximal`, (mu, centre): adds mu * (theta - centre) to every gradient; `base_model`, (p,) float32: its outputs are
                added to those of the model.

        Returns:
            The trained parameters, (p,) float32.
        """
        self._without_guarantee(slot)
        self._trainings += 1
        order = stream(derive(self._charge.key, "slot", slot, self._trainings), "batches")
        return self._engine.sgd.train(model, self._data, order, **how)

    def validation_loss(self, slot: str, model: np.ndarray, max_loss: float = math.inf) -> float:
        """Compute the mean loss on the client's validation records; raw, so epsilon is inf.

        Args:
            slot: Name of the slot.
            model: (p,) float32.
            max_loss: The loss of each record is clipped to [0, max_loss].

        Returns:
            The mean loss; cross-entropy in nats, or squared error.

        Raises:
            ValueError: If the client has no validation records.
        """
        self._without_guarantee(slot)
        return self._mean_loss(model, max_loss)

    def noisy_loss(self, slot: str, model: np.ndarray, max_loss: float) -> float:
        """Compute the mean loss on the client's validation records and add noise.

        The sensitivity is max_loss / N_val if records are protected, and max_loss if whole clients are.

        Args:
            slot: Name of the slot.
            model: (p,) float32.
            max_loss: The loss of each record is clipped to [0, max_loss]; finite and above 0.

        Returns:
            The noisy mean loss, in the unit of `max_loss`; it may be outside of [0, max_loss].

        Raises:
            ValueError: If the client has no validation records, or `max_loss` is out of range.
        """
        records = self._validation_records()
        sensitivity = max_loss if self.protocol.privacy.unit == "client" else max_loss / len(records)
        # Slightly below max_loss, so that rounding cannot exceed the sensitivity: of the sum as in `noisy_sum`, and of the mean.
        mean = self._mean_loss(model, max_loss / (1 + 1e-9 + 2.0**-52 * len(records) ** 2))
        return float(self._noisy(slot, np.array([mean]), sensitivity)[0])

    def noisy_update(self, slot: str, model: np.ndarray) -> np.ndarray:
        """Train by plain SGD, clip the update to C, and add noise that protects the whole client.

        Args:
            slot: Name of the slot.
            model: Parameters to start from, (p,) float32.

        Returns:
            The noisy update, (p,) float32.

        Raises:
            ValueError: If single records are protected: one of them may move a clipped update by 2 C.
        """
        self._only_for("client", "noisy_update", "me.dpsgd")
        order = stream(slot_key(self._charge.key, slot), "batches")
        update = self._engine.sgd.train(model, self._data, order) - model
        clip = self.protocol.local.clip
        vector = (shortened([update], clip) or [np.zeros(update.shape)])[0]
        return self._noisy(slot, vector, clip, vector=True).astype(np.float32)

    def noisy_sum(self, slot: str, statistics: Callable[..., np.ndarray], bound: float, *, labels: bool = False) -> np.ndarray:
        """Add up a statistic of each record, clipped to a norm, and add noise that protects one record.

        Args:
            slot: Name of the slot.
            statistics: Maps the flat model input of a record, (1, d) float64, to its row, (1, m). It gets one record at a time, so
                that a row cannot depend on other records, and first an empty record, from which m follows.
            bound: Each row is clipped to this L2 norm, the sensitivity of the sum; finite and above 0. A row that is not finite, not
                real or of another shape is left out, and so is a record on which `statistics` raises: the server would see that the
                client stops.
            labels: True: `statistics(x, y)` also gets the label of the record, (1,) int64, or float32 in a regression; that of the
                empty record is 0.

        Returns:
            The noisy sum, (m,) float32.

        Raises:
            ValueError: If whole clients are protected, the row of an empty record has another shape, or `bound` is out of range.
            TypeError: If the row of an empty record is not of real numbers.
        """
        self._only_for("sample", "noisy_sum", "me.noisy_update")

        def row_of(rows: Sequence[int]) -> np.ndarray:
            x, y = self._data.batch(np.array(rows, np.int64), 1)
            record = (x.flatten(1).double().numpy(), y.numpy())
            row = np.asarray(statistics(*record) if labels else statistics(record[0]))
            return row.astype(np.float64, casting="same_kind", copy=False)  # TypeError for complex numbers

        empty = row_of([])
        if empty.shape[:-1] != (1,):
            raise ValueError(f"statistics must map a record, (1, d), to one row, (1, m), got the shape {empty.shape}")
        total, records = np.zeros(empty.shape[1]), len(self._data)
        # A sum of N rows is rounded by at most 2^-53 N (N + 1) / 2 bounds, and two sums differ by twice that and one row.
        clip = bound / (1 + 2.0**-52 * records**2)
        for record in range(records):
            try:
                found = row_of([record])
                clipped = shortened([*found], clip)
            except Exception:
                continue
            if found.shape == empty.shape and clipped:
                total += clipped[0]
        return self._noisy(slot, total, bound, vector=True).astype(np.float32)

    def masked_update(self, slot: str, contribute: Callable[[], np.ndarray]) -> np.ndarray:
        """Add a vector that protects the whole client to the secure sum: in by a secret coin, clipped, with a share of the noise.

        Inside `contribute` the raw methods (`sgd`, `losses`, `lowest_loss`, `distances`) may use the slot: what they compute leaves the
        client only within the sum.

        Args:
            slot: Name of a secure slot; its rate is the probability that the client is in.
            contribute: Computes the vector, (d,); called only if the client is in. Otherwise a zero vector is sent.

        Returns:
            The masked vector, (d,) uint32.

        Raises:
            ValueError: If single records are protected, or the task came without the group of a sum.
        """
        self._only_for("client", "masked_update", "me.masked_gradient")
        spec, masking = self._secure(slot)
        key = slot_key(self._charge.key, slot)
        vector = np.zeros(masking.code.d)
        if spec.rate == 1 or stream(key, "coin").random() < spec.rate:
            self._inside = slot
            try:
                vector = contribute()
            finally:
                self._inside = ""
        return masking.words(vector, key)

    def masked_gradient(self, slot: str, model: np.ndarray) -> np.ndarray:
        """Add the clipped sum of the gradients of a Poisson batch to the secure sum, with a share of the noise.

        Args:
            slot: Name of a secure slot; its rate is the probability that a record is in the batch.
            model: (p,) float32.

        Returns:
            The masked vector, (p,) uint32.

        Raises:
            ValueError: If whole clients are protected, or the task came without the group of a sum.
        """
        from dpcfl_net.training.batches import poisson_rows

        self._only_for("sample", "masked_gradient", "me.masked_update")
        spec, masking = self._secure(slot)
        key = slot_key(self._charge.key, slot)
        rows = poisson_rows(len(self._data), spec.rate, stream(key, "batches"))
        return masking.words(self._engine.trainer.clipped_sum(model, self._data, rows), key)

    def _only_for(self, unit: str, mechanism: str, instead: str) -> None:
        """ValueError if the job protects another unit than the mechanism."""
        asked = self.protocol.privacy.unit
        if asked != unit:
            raise ValueError(f"me.{mechanism} protects a {unit}, and privacy.unit is {asked!r}: use {instead}")

    def _secure(self, slot: str) -> tuple[SecureSlot, Masking]:
        """Return a secure slot and the masked send of this task, and record the slot's event; ValueError without a group."""
        spec, masking = self._use(slot, SecureSlot), self._masking
        if masking is None:
            raise ValueError(f"slot {slot!r} adds to a secure sum: the task must come with the group of a sum")
        self.ran.append(spec.event(self._charge.z, self._charge.adjacency))
        return spec, masking

    def _mean_loss(self, model: np.ndarray, max_loss: float) -> float:
        losses, _ = self._engine.evaluator.each(model, self._validation_records())
        return float(np.clip(losses, 0.0, max_loss).mean())

    def _validation_records(self) -> Any:
        """Open the validation records; ValueError if the client has none, whose mean loss does not exist."""
        records = self._validation()
        if not len(records):
            raise ValueError(
                "this client has no validation records for a validation loss: set data.validation, for example to 0.1"
            )
        return records

    def _noisy(self, slot: str, value: np.ndarray, sensitivity: float, *, vector: bool = False) -> np.ndarray:
        """Add noise to a value of the given zero-out sensitivity; `spec.ratio` scales the noise of the slot.

        The replace-one sensitivity of a number between 0 and a bound is the same, that of a clipped `vector` is twice as large.
        """
        spec, z = self._use(slot, GaussianSlot), self._charge.z
        if vector and not spec.doubles:
            raise ValueError(
                f"slot {slot!r} has doubles=False: it charges for a number between 0 and a bound, and the sensitivity of a clipped "
                "vector doubles where a record is replaced; use doubles=True"
            )
        key, deviation = slot_key(self._charge.key, slot), z * spec.ratio * sensitivity
        # Infinite noise hides nothing: where it is added to a mean that is infinite because of one record, the result is NaN.
        check_bound(f"the deviation of the noise of slot {slot!r}, which follows from its bound,", deviation)
        self.ran.append(spec.event(z, self._charge.adjacency))
        if devices.repeatable():
            return gaussian_on_grid(value, deviation, NormalStream(key, "noise"))
        from dpcfl_net.training.device_steps import noisy

        return noisy(value, deviation, key)

    def _without_guarantee(self, slot: str) -> None:
        """Record the event of a raw slot, once in a task even if the step uses it several times."""
        spec = self._charge.slot(slot, UnprotectedSlot, RawSlot, *([SecureSlot] if self._inside == slot else []))
        if isinstance(spec, SecureSlot):
            return
        if slot not in self._raw:
            self._raw.add(slot)
            self.ran.append(spec.event(self._charge.noise_multiplier, self.protocol.privacy.adjacency))

    def _use(self, slot: str, kind: type[S]) -> S:
        """Return a charged slot for a mechanism that draws from its key; a second use is no charged mechanism, so nothing is sent."""
        spec = self._charge.slot(slot, kind)
        if slot in self._used:
            self.ran.append(Unprotected(f"slot {slot!r} was used before in this task: the result has the noise of the first"))
        self._used.add(slot)
        return spec

    def module(self, model: np.ndarray) -> Any:
        """Build the job's model with some parameters, such as for the statistic of `noisy_sum`; it reads no record.

        Args:
            model: (p,) float32, of which the module gets a copy.

        Returns:
            The torch module, on the CPU: it maps (n, *input_shape) float32 to logits, (n, classes).
        """
        require_model("model", model, self.protocol.model.parameters)
        return self._engine.module(model)

    def initial_model(self) -> np.ndarray:
        """Return the initial parameters of the protocol, theta_init, (p,) float32."""
        return self._engine.initial_model.copy()


def slot_key(task_key: bytes, slot: str) -> bytes:
    """Derive the key of a slot's randomness.

    Args:
        task_key: Private key of the task.
        slot: Name of the slot.
    """
    return derive(task_key, "slot", slot)
