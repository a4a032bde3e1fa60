"""Client runtime: runs client steps on private data behind the privacy gate."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dpcfl_net.core.errors import Refused
from dpcfl_net.core.plugins import is_plugin
from dpcfl_net.core.protocol import Protocol, digest
from dpcfl_net.core.tensors import describe, finite
from dpcfl_net.core.types import Answer, Release, Task
from dpcfl_net.federation.base import ClientSide
from dpcfl_net.federation.capabilities import client_steps, tensor_sides
from dpcfl_net.federation.gate import Charge, Gate, GateSpec
from dpcfl_net.federation.message_encoding import RESIDUAL, MessageEncoding
from dpcfl_net.federation.secure.client_side import Masking, SecureClient, split_state
from dpcfl_net.federation.secure.stages import MASKING, STAGES
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.ledger.durable import Disk
from dpcfl_net.privacy.ledger.ledger import Ledger
from dpcfl_net.privacy.mechanisms import exponential_mechanism, gaussian_on_grid, shortened
from dpcfl_net.privacy.normal_stream import NormalStream
from dpcfl_net.privacy.randomness import derive, stream
from dpcfl_net.privacy.slots import DPSGDSlot, GaussianSlot, RawSlot, SecureSlot, SelectionSlot, UnprotectedSlot
from dpcfl_net.training import devices
from dpcfl_net.training.pace import room
from dpcfl_net.transport.messages import match_template, resolve

if TYPE_CHECKING:  # torch is imported only where something is computed
    from dpcfl_net.training.dpsgd import Evaluator, Trainer
    from dpcfl_net.training.sgd import PlainSGD

Split = Literal["train", "validation"]
_last_engine: dict[str, Engine] = {}  # by hash of the protocol; that of the last one
ON_GPU = "computed-on-gpu"  # file in a ledger's folder: a charge without an answer may have been computed on a GPU


class Engine:
    """Trainer, evaluator and plain SGD for one model template, built on first use; the clients of a process share one.

    It keeps nothing of a task but memory to compute in, whose values are written before they are read.

    Args:
        protocol: The signed protocol.

    Raises:
        ConfigError: If the model cannot be built here.
        Refused: "model" if its parameters differ from those of the signed job.
    """

    def __init__(self, protocol: Protocol) -> None:
        from dpcfl_net.training.models import layout

        self._template, self._local = protocol.model, protocol.local
        if layout(self._module()) != [[name, sides] for name, sides in self._template.layout]:
            raise Refused("model", f"the parameters of {self._template.name} here are not those that the signed job lays down")

    @classmethod
    def of(cls, protocol: Protocol) -> Engine:
        """Build the engine of a protocol, or return the last one if it has the same; args and errors as for the class."""
        key = digest(protocol)
        if key not in _last_engine:
            built = cls(protocol)
            _last_engine.clear()
            _last_engine[key] = built
        return _last_engine[key]

    def build(self, algorithm: ClientSide) -> None:
        """Build in advance what an algorithm's tasks use; forked processes share it.

        Args:
            algorithm: The job's algorithm.

        Raises:
            ConfigError: If the model cannot be trained.
        """
        plan = [slot for entry in algorithm.protocol.roster[:1] for slot in algorithm.plan(entry)]
        secure_by_sgd = algorithm.capabilities.plain_sgd
        if any(isinstance(slot, DPSGDSlot if secure_by_sgd else DPSGDSlot | SecureSlot) for slot in plan):
            _ = self.trainer
        raw = UnprotectedSlot | RawSlot | GaussianSlot
        if any(isinstance(slot, raw | SecureSlot if secure_by_sgd else raw) for slot in plan):
            _ = self.sgd
        if algorithm.capabilities.personal or any(isinstance(slot, SelectionSlot) for slot in plan):
            _ = self.evaluator
        if algorithm.capabilities.personal:
            _ = self.initial_model

    @cached_property
    def initial_model(self) -> np.ndarray:
        """The initial parameters of the protocol, theta_init, (p,) float32; not to be changed."""
        from dpcfl_net.training.models import initial

        m = self._template
        return initial(m.name, self._input_shape, m.classes, m.initial_seed)

    @cached_property
    def trainer(self) -> Trainer:
        """DP-SGD."""
        from dpcfl_net.training.dpsgd import Trainer

        local = self._local
        # Tests cover the gradient engines of the package's models; the one of a plugin model is checked here.
        shape = self._input_shape if is_plugin(self._template.name) else None
        return Trainer(
            self._module(), clip=local.clip, learning_rate=local.lr, batch_size=local.batch_size, task=self._template.task,
            input_shape=shape, precision=local.precision,
        )  # fmt: skip

    @cached_property
    def evaluator(self) -> Evaluator:
        """Accuracy, losses and counts."""
        from dpcfl_net.training.dpsgd import Evaluator

        return Evaluator(self._module(), self._template.task, self._input_shape)

    @cached_property
    def sgd(self) -> PlainSGD:
        """Plain SGD, for releases that a trusted server protects."""
        from dpcfl_net.training.sgd import PlainSGD

        how = self._local.model_dump(include={"epochs", "batch_size", "lr", "momentum", "weight_decay"})
        return PlainSGD(self._module(), **how, task=self._template.task, input_shape=self._input_shape)

    @property
    def _input_shape(self) -> tuple[int, ...]:
        return tuple(self._template.input_shape)

    def _module(self) -> Any:
        from dpcfl_net.training.models import skeleton

        m = self._template
        return skeleton(m.name, self._input_shape, m.classes)


@dataclass
class Client:
    """Argument `me` of a client step: mechanisms on private data, and the state that is committed with the release.

    Only these methods read the records. `dpsgd`, `select`, `noisy_loss` and `noisy_update` protect their results; `sgd`, `losses`,
    `lowest_loss` and `validation_loss` do not. Each records the event of the mechanism that ran, and the privacy gate compares
    these events with the debit.

    Attributes:
        protocol: The signed protocol.
        state: The client's state by name; arrays of the types `CLIENT_DTYPES`.
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
    _trainings: int = 0
    _inside: str = ""  # secure slot whose contribution is computed now

    def dpsgd(self, slot: str, model: np.ndarray, proximal: tuple[float, np.ndarray] | None = None) -> np.ndarray:
        """Run the DP-SGD steps of a slot.

        Args:
            slot: Name of the slot.
            model: Parameters to start from, (p,) float32.
            proximal: (lambda, centre) of a proximal term, as in `Trainer.train`; None: no term.

        Returns:
            The trained parameters, (p,) float32.
        """
        spec = self._charge.slots[slot]
        assert isinstance(spec, DPSGDSlot)
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
        spec = self._charge.slots[slot]
        assert isinstance(spec, SelectionSlot)
        counts = [self._engine.evaluator.count_correct(model, self._data) for model in models]
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

    def sgd(self, slot: str, model: np.ndarray, **how: Any) -> np.ndarray:
        """Train by plain SGD; raw, so epsilon is inf.

        Args:
            slot: Name of the slot.
            model: Parameters to start from, (p,) float32.
            **how: `proximal` and `base_model`, as in `PlainSGD.train`.

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
        """
        self._without_guarantee(slot)
        return self._mean_loss(model, max_loss)

    def noisy_loss(self, slot: str, model: np.ndarray, max_loss: float) -> float:
        """Compute the mean loss on the client's validation records and add noise.

        The sensitivity is max_loss / N_val if records are protected, and max_loss if whole clients are.

        Args:
            slot: Name of the slot.
            model: (p,) float32.
            max_loss: The loss of each record is clipped to [0, max_loss].
        """
        sensitivity = max_loss if self.protocol.privacy.unit == "client" else max_loss / len(self._validation())
        return float(self._noisy(slot, np.array([self._mean_loss(model, max_loss)]), sensitivity)[0])

    def noisy_update(self, slot: str, model: np.ndarray) -> np.ndarray:
        """Train by plain SGD, clip the update to C, and add noise that protects the whole client.

        Args:
            slot: Name of the slot.
            model: Parameters to start from, (p,) float32.

        Returns:
            The noisy update, (p,) float32.
        """
        order = stream(slot_key(self._charge.key, slot), "batches")
        update = self._engine.sgd.train(model, self._data, order) - model
        clip = self.protocol.local.clip
        return self._noisy(slot, (shortened([update], clip) or [np.zeros(update.shape)])[0], clip).astype(np.float32)

    def masked_update(self, slot: str, contribute: Callable[[], np.ndarray]) -> np.ndarray:
        """Add a vector that protects the whole client to the secure sum: in by a secret coin, clipped, with a share of the noise.

        Inside `contribute` the raw methods (`sgd`, `losses`, `lowest_loss`) may use the slot: what they compute leaves the
        client only within the sum.

        Args:
            slot: Name of a secure slot; its rate is the probability that the client is in.
            contribute: Computes the vector, (d,); called only if the client is in. Otherwise a zero vector is sent.

        Returns:
            The masked vector, (d,) uint32.
        """
        spec, masking = self._secure(slot, "client")
        key = slot_key(self._charge.key, slot)
        vector = np.zeros(masking.code.d)
        if spec.rate == 1 or stream(key, "coin").random() < spec.rate:
            self._inside = slot
            vector = contribute()
            self._inside = ""
        return masking.words(vector, key)

    def masked_gradient(self, slot: str, model: np.ndarray) -> np.ndarray:
        """Add the clipped sum of the gradients of a Poisson batch to the secure sum, with a share of the noise.

        Args:
            slot: Name of a secure slot; its rate is the probability that a record is in the batch.
            model: (p,) float32.

        Returns:
            The masked vector, (p,) uint32.
        """
        from dpcfl_net.training.dpsgd import poisson_rows

        spec, masking = self._secure(slot, "sample")
        key = slot_key(self._charge.key, slot)
        rows = poisson_rows(len(self._data), spec.rate, stream(key, "batches"))
        return masking.words(self._engine.trainer.clipped_sum(model, self._data, rows), key)

    def _secure(self, slot: str, unit: str) -> tuple[SecureSlot, Masking]:
        """Return a secure slot and the masked send of this task, and record the slot's event."""
        spec, masking = self._charge.slots[slot], self._masking
        assert isinstance(spec, SecureSlot)
        assert masking is not None
        assert self.protocol.privacy.unit == unit
        self.ran.append(spec.event(self._charge.z, self._charge.adjacency))
        return spec, masking

    def _mean_loss(self, model: np.ndarray, max_loss: float) -> float:
        losses, _ = self._engine.evaluator.each(model, self._validation())
        return float(np.clip(losses, 0.0, max_loss).mean())

    def _noisy(self, slot: str, value: np.ndarray, sensitivity: float) -> np.ndarray:
        """Add noise to a value of the given zero-out sensitivity; `spec.ratio` scales the noise of the slot."""
        spec, z = self._charge.slots[slot], self._charge.z
        assert isinstance(spec, GaussianSlot)
        self.ran.append(spec.event(z, self._charge.adjacency))
        key, deviation = slot_key(self._charge.key, slot), z * spec.ratio * sensitivity
        if devices.repeatable():
            return gaussian_on_grid(value, deviation, NormalStream(key, "noise"))
        from dpcfl_net.training.device_steps import noisy

        return noisy(value, deviation, key)

    def _without_guarantee(self, slot: str) -> None:
        """Record the event of a raw slot, once in a task even if the step uses it several times."""
        spec = self._charge.slots[slot]
        if isinstance(spec, SecureSlot) and self._inside == slot:
            return
        assert isinstance(spec, UnprotectedSlot | RawSlot)
        if slot not in self._raw:
            self._raw.add(slot)
            self.ran.append(spec.event(self._charge.noise_multiplier, self.protocol.privacy.adjacency))

    def initial_model(self) -> np.ndarray:
        """Return the initial parameters of the protocol, theta_init, (p,) float32."""
        return self._engine.initial_model.copy()


class ClientHost:
    """Client runtime: one client with its privacy gate and ledger.

    Args:
        algorithm: The job's algorithm.
        client: Client id.
        ledger: The client's ledger.
        open_data: Opens the "train" or "validation" records; called only after the gate has charged a task that needs them.
        engine: Makes the engine; called at the first computation.
        noise_seed: Seed of the noise; None: noise of the operating system.
        identity: Secret key of the client's identity in the roster, for jobs with secure sums.

    Attributes:
        turn: Makes the context in which a task is computed. Clients that share cores wait there; writes of the ledger happen
            outside it.

    Raises:
        ConfigError: If plan and client steps disagree.
        LedgerError: If the ledger is damaged, or belongs to another job.
    """

    def __init__(
        self,
        algorithm: ClientSide,
        client: int,
        ledger: Ledger,
        open_data: Callable[[Split], Any],
        engine: Callable[[], Engine],
        noise_seed: bytes | None,
        identity: bytes | None = None,
    ) -> None:
        self.algorithm, self.protocol, self.client = algorithm, algorithm.protocol, client
        entry = self.protocol.client(client)
        self._steps, self._encoding = client_steps(algorithm), MessageEncoding(algorithm)
        self._plan = algorithm.plan(entry)
        self._rooms: dict[DPSGDSlot, int] = {}
        self._open_data, self._make_engine = open_data, engine
        self._data: dict[str, Any] = {}
        self._engine: Engine | None = None
        self._secure = None if identity is None else SecureClient(algorithm, client, identity)
        self._ledger = ledger
        self.turn: Callable[[], AbstractContextManager[Any]] = nullcontext
        spec = GateSpec.of(
            self.protocol, client, self._plan, self._steps, entry.noise_multiplier,
            noise_seed=noise_seed, deterministic=_repeatable(ledger.folder),
        )  # fmt: skip
        self.gate = Gate(spec, ledger)

    def answer(self, task: Task) -> Answer:
        """Answer a task behind the privacy gate.

        Args:
            task: The task.

        Returns:
            A release, or the reason why there is none.

        Raises:
            LedgerError: If the ledger is damaged.
        """
        return self.gate.answer(task, self._check, lambda charge, state: self._compute(task, charge, state))

    def data(self, part: Split) -> Any:
        """Open the client's records, once.

        Args:
            part: "train" or "validation".

        Raises:
            Refused: "records" if their number differs from the signed job's.
        """
        if part not in self._data:
            records, entry = self._open_data(part), self.protocol.client(self.client)
            expected = entry.records if part == "train" else entry.validation_records
            if len(records) != expected:
                raise Refused(
                    "records", f"client {self.client} holds {len(records)} {part} records, the signed job says {expected}"
                )
            self._data[part] = records
        return self._data[part]

    @property
    def engine(self) -> Engine:
        """The engine, built once."""
        if self._engine is None:
            self._engine = self._make_engine()
        return self._engine

    def room(self, slot: DPSGDSlot) -> int | None:
        """Compute the largest batch of a slot with constant pace; larger batches are cut, see `training.pace`.

        Args:
            slot: The DP-SGD slot.

        Returns:
            Largest batch, in records; None with free pace.
        """
        if not self.protocol.kept_delta:
            return None
        if slot not in self._rooms:
            steps = sum(other.steps for other in self._plan if isinstance(other, DPSGDSlot) and other.rate < 1)
            records = self.protocol.client(self.client).records
            self._rooms[slot] = room(records, slot.rate, steps, self.protocol.privacy.epsilon, self.protocol.kept_delta)
        return self._rooms[slot]

    def personal_model(self) -> np.ndarray | None:
        """Read the personal model after the last committed task, (p,) float32; None without one."""
        return self.gate.state().get("model") if self.algorithm.capabilities.personal else None

    def close(self) -> None:
        """Close the ledger."""
        self._ledger.close()

    def _check(self, task: Task) -> None:
        """Raise Refused if a task does not match its template; uses public facts only."""
        step = self._steps.get(task.kind)
        if step is None:
            raise Refused("task", f"no task {task.kind!r} in algorithm {self.algorithm.name}")
        match_template(describe(task.tensors), self._encoding.task_template(step))
        for name, array in task.tensors.items():
            if not finite(array):
                raise Refused("non-finite", f"tensor {name!r} holds a value that is not finite")
        if self._secure is not None:
            self._secure.check(task, split_state(self.gate.state())[0])

    def _compute(self, task: Task, charge: Charge, state: dict[str, Any]) -> tuple[Release, dict[str, Any], list[Event]]:
        step = self._steps[task.kind]
        secure, state = split_state(state)
        if self._secure is not None and task.kind in STAGES:
            stage, secure, events = self._secure.answer(task, charge.key, secure)
            return stage, state | secure, events
        residuals = {name: array for name, array in state.items() if name.startswith(RESIDUAL)}
        own = {name: array for name, array in state.items() if name not in residuals}
        masking = self._secure.masking(task, secure) if self._secure is not None and set(MASKING) <= set(task.tensors) else None
        with self.turn():
            tensors = {name: array for name, array in task.tensors.items() if masking is None or name not in MASKING}
            me = Client(
                self.protocol, own, self.engine, self.data("train"), lambda: self.data("validation"), charge, self.room,
                _masking=masking,
            )  # fmt: skip
            release = getattr(self.algorithm, task.kind)(me, **self._encoding.decode_task(step, tensors))
        if isinstance(release, Release):
            match_template(describe(release.tensors), resolve(step.gives, tensor_sides(self.algorithm)))
            release, residuals = self._encoding.encode_release(step, self.client, release, residuals)
        if masking is not None:
            secure = masking.state
        return release, {**me.state, **residuals, **secure} if residuals or secure else me.state, me.ran


def slot_key(task_key: bytes, slot: str) -> bytes:
    """Derive the key of a slot's randomness.

    Args:
        task_key: Private key of the task.
        slot: Name of the slot.
    """
    return derive(task_key, "slot", slot)


def _repeatable(ledger: Path) -> bool:
    """Return True if a task that a crash interrupted may be computed again: False if a GPU may have computed it."""
    marker = ledger / ON_GPU
    if not devices.repeatable() and not marker.exists():
        Disk().replace(marker, b"")
    return not marker.exists()


def open_ledger(folder: Path, protocol: Protocol, client: int, *, durable: bool = True) -> Ledger:
    """Open the ledger of a client for one job.

    Args:
        folder: Folder of the ledger.
        protocol: The signed protocol.
        client: Client id.
        durable: Write with fsync.

    Raises:
        LedgerError: If the ledger is damaged, or belongs to another job.
    """
    owner = {"run": protocol.run, "job": digest(protocol), "client": client}
    return Ledger(folder, owner=owner, durable=durable)
