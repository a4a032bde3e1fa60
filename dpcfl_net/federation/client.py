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
from dpcfl_net.core.tensors import describe
from dpcfl_net.core.types import Answer, Release, Task
from dpcfl_net.federation.base import ClientSide
from dpcfl_net.federation.capabilities import client_steps, tensor_sides
from dpcfl_net.federation.gate import Charge, Gate, GateSpec
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.ledger.durable import Disk
from dpcfl_net.privacy.ledger.ledger import Ledger
from dpcfl_net.privacy.mechanisms import exponential_mechanism, gaussian_on_grid, shortened
from dpcfl_net.privacy.randomness import derive, stream
from dpcfl_net.privacy.slots import DPSGDSlot, GaussianSlot, RawSlot, SelectionSlot, UnprotectedSlot
from dpcfl_net.training import devices
from dpcfl_net.training.pace import room
from dpcfl_net.transport.messages import match_rows, resolve

if TYPE_CHECKING:  # torch loads where something is computed, not wherever an algorithm is named
    from dpcfl_net.training.dpsgd import Evaluator, Trainer
    from dpcfl_net.training.sgd import PlainSGD

Split = Literal["train", "validation"]
ON_GPU = "computed-on-gpu"  # in a ledger's folder: a charge without an answer may have been computed on one


class Engine:
    """The tools of one model template, shared by the clients of one process; each is made when it is first used."""

    def __init__(self, protocol: Protocol) -> None:
        from dpcfl_net.training.models import layout

        self._template, self._local = protocol.model, protocol.local
        if layout(self._module()) != [[name, sides] for name, sides in self._template.layout]:
            raise Refused("model", f"the parameters of {self._template.name} here are not those that the signed job lays down")

    @classmethod
    def of(cls, protocol: Protocol) -> Engine:
        """ConfigError for a model that cannot be built here, Refused if its parameters are not those of the signed job."""
        return cls(protocol)

    @cached_property
    def trainer(self) -> Trainer:
        """DP-SGD."""
        from dpcfl_net.training.dpsgd import Trainer

        local = self._local
        # The engines of models by name are tried by the tests, that of a user's own model here.
        shape = self._input_shape if is_plugin(self._template.name) else None
        return Trainer(
            self._module(), clip=local.clip, learning_rate=local.lr, batch_size=local.batch_size, task=self._template.task,
            input_shape=shape,
        )  # fmt: skip

    @cached_property
    def evaluator(self) -> Evaluator:
        """Accuracy, losses and counts."""
        from dpcfl_net.training.dpsgd import Evaluator

        return Evaluator(self._module(), self._template.task, self._input_shape)

    @cached_property
    def sgd(self) -> PlainSGD:
        """The plain step, for what a trusted server protects."""
        from dpcfl_net.training.sgd import PlainSGD

        how = self._local.model_dump(include={"epochs", "batch_size", "lr", "momentum", "weight_decay"})
        return PlainSGD(self._module(), **how, task=self._template.task, input_shape=self._input_shape)

    @property
    def _input_shape(self) -> tuple[int, ...]:
        return tuple(self._template.input_shape)

    def _module(self) -> Any:
        from dpcfl_net.training.models import build

        m = self._template
        return build(m.name, self._input_shape, m.classes)


@dataclass
class Client:
    """`me` in a client step: mechanisms over private data, and the state that is committed with the release.

    There is no way to the records here but `dpsgd`, `select`, `noisy_loss` and `noisy_update`, which protect what they give,
    and `sgd`, `losses`, `lowest_loss` and `validation_loss`, which do not. All record what they really ran: the gate compares
    it with the debit.
    """

    protocol: Protocol
    state: dict[str, Any]
    _engine: Engine
    _data: Any
    _validation: Callable[[], Any]
    _charge: Charge
    _room: Callable[[DPSGDSlot], int | None] = lambda slot: None
    ran: list[Event] = field(default_factory=list)
    _raw: set[str] = field(default_factory=set)
    _trainings: int = 0

    def dpsgd(self, slot: str, model: np.ndarray, proximal: tuple[float, np.ndarray] | None = None) -> np.ndarray:
        """The slot's DP-SGD steps from `model`, (p,) float32 to (p,) float32; `pull` as `Trainer.train` has it."""
        spec = self._charge.slots[slot]
        assert isinstance(spec, DPSGDSlot)
        key = slot_key(self._charge.key, slot)
        theta, event = self._engine.trainer.train(model, self._data, spec, self._charge.z, key, proximal, self._room(spec))
        self.ran.append(event)
        return theta

    def select(self, slot: str, models: np.ndarray) -> int:
        """One of the (M, p) models, P(m) proportional to exp(eta * own records that m classifies correctly)."""
        spec = self._charge.slots[slot]
        assert isinstance(spec, SelectionSlot)
        counts = [self._engine.evaluator.count_correct(model, self._data) for model in models]
        choice = exponential_mechanism(counts, spec.eta, stream(slot_key(self._charge.key, slot), "selection"))
        self.ran.append(spec.event(self._charge.noise_multiplier, self.protocol.privacy.adjacency))
        return choice

    def lowest_loss(self, slot: str, models: np.ndarray) -> int:
        """Return the index of the (M, p) model with the lowest mean loss on the client's records: raw, so epsilon is inf."""
        return int(np.argmin(self.losses(slot, models)))

    def losses(self, slot: str, models: np.ndarray, base_model: np.ndarray | None = None) -> np.ndarray:
        """Mean loss on the own records of each of the (M, p) models, (M,) float64, raw; `beside` as `sgd` has it."""
        self._without_guarantee(slot)
        losses: np.ndarray = self._engine.sgd.mean_losses(models, self._data, base_model)
        return losses

    def sgd(self, slot: str, model: np.ndarray, **how: Any) -> np.ndarray:
        """Plain SGD from `model`, (p,) float32 to (p,) float32, raw; `how` (pull, beside) as `PlainSGD.train` has it."""
        self._without_guarantee(slot)
        self._trainings += 1
        order = stream(derive(self._charge.key, "slot", slot, self._trainings), "batches")
        return self._engine.sgd.train(model, self._data, order, **how)

    def validation_loss(self, slot: str, model: np.ndarray, top: float = math.inf) -> float:
        """Mean loss of the (p,) model on the own validation records, each loss at most `top`: raw."""
        self._without_guarantee(slot)
        return self._mean_loss(model, top)

    def noisy_loss(self, slot: str, model: np.ndarray, top: float) -> float:
        """The same with noise for its sensitivity: top / N_val if records are protected, top if the whole client is."""
        reach = top if self.protocol.privacy.unit == "client" else top / len(self._validation())
        return float(self._noisy(slot, np.array([self._mean_loss(model, top)]), reach)[0])

    def noisy_update(self, slot: str, model: np.ndarray) -> np.ndarray:
        """What plain SGD adds to `model`, shortened to C, with noise that hides the whole client: (p,) float32."""
        order = stream(slot_key(self._charge.key, slot), "batches")
        update = self._engine.sgd.train(model, self._data, order) - model
        clip = self.protocol.local.clip
        return self._noisy(slot, (shortened([update], clip) or [np.zeros(update.shape)])[0], clip).astype(np.float32)

    def _mean_loss(self, model: np.ndarray, top: float) -> float:
        losses, _ = self._engine.evaluator.each(model, self._validation())
        return float(np.clip(losses, 0.0, top).mean())

    def _noisy(self, slot: str, value: np.ndarray, reach: float) -> np.ndarray:
        """Noise on what moves by at most `reach` when whoever is protected is taken out, or when a number is exchanged."""
        spec, z = self._charge.slots[slot], self._charge.z
        assert isinstance(spec, GaussianSlot)
        self.ran.append(spec.event(z, self._charge.adjacency))
        return gaussian_on_grid(value, z * spec.ratio * reach, stream(slot_key(self._charge.key, slot), "noise"))

    def _without_guarantee(self, slot: str) -> None:
        """Record a slot that is raw, once per task, however often the step uses it."""
        spec = self._charge.slots[slot]
        assert isinstance(spec, UnprotectedSlot | RawSlot)
        if slot not in self._raw:
            self._raw.add(slot)
            self.ran.append(spec.event(self._charge.noise_multiplier, self.protocol.privacy.adjacency))

    def initial_model(self) -> np.ndarray:
        """theta_init of the protocol, (p,) float32."""
        from dpcfl_net.training.models import initial

        m = self.protocol.model
        return initial(m.name, tuple(m.input_shape), m.classes, m.initial_seed)


class ClientHost:
    """One client with its gate and ledger, wherever it runs: in a process of its own or beside others in a test.

    open_data ("train" or "validation" to records) is called for the first task that needs them and passed the gate's debit,
    never before; `engine` likewise. `turn` makes the context in which it computes: where several clients share cores, one
    waits there, but not with its ledger's disk.
    """

    def __init__(
        self,
        algorithm: ClientSide,
        client: int,
        ledger: Ledger,
        open_data: Callable[[Split], Any],
        engine: Callable[[], Engine],
        noise_seed: bytes | None,
    ) -> None:
        self.algorithm, self.protocol, self.client = algorithm, algorithm.protocol, client
        entry = self.protocol.client(client)
        self._steps = client_steps(algorithm)
        self._plan = algorithm.plan(entry)
        self._rooms: dict[DPSGDSlot, int] = {}
        self._open_data, self._make_engine = open_data, engine
        self._data: dict[str, Any] = {}
        self._engine: Engine | None = None
        self._ledger = ledger
        self.turn: Callable[[], AbstractContextManager[Any]] = nullcontext
        spec = GateSpec.of(
            self.protocol, client, self._plan, self._steps, entry.noise_multiplier,
            noise_seed=noise_seed, deterministic=_repeatable(ledger.folder),
        )  # fmt: skip
        self.gate = Gate(spec, ledger)

    def answer(self, task: Task) -> Answer:
        """What leaves the client for a task: a release, or why not."""
        return self.gate.answer(task, self._check, lambda charge, state: self._compute(task, charge, state))

    def data(self, part: Split) -> Any:
        """The client's "train" or "validation" records, opened once."""
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
        """Trainer and evaluator, built once."""
        if self._engine is None:
            self._engine = self._make_engine()
        return self._engine

    def room(self, slot: DPSGDSlot) -> int | None:
        """Records that each step of a slot has room for, with constant pace; None: as many as it draws."""
        if not self.protocol.kept_delta:
            return None
        if slot not in self._rooms:
            steps = sum(other.steps for other in self._plan if isinstance(other, DPSGDSlot) and other.rate < 1)
            records = self.protocol.client(self.client).records
            self._rooms[slot] = room(records, slot.rate, steps, self.protocol.privacy.epsilon, self.protocol.kept_delta)
        return self._rooms[slot]

    def personal_model(self) -> np.ndarray | None:
        """The client's own model after its last committed task, for the observer's evaluation at the client."""
        return self.gate.state().get("model") if self.algorithm.capabilities.personal else None

    def close(self) -> None:
        """Let go of the ledger."""
        self._ledger.close()

    def _check(self, task: Task) -> None:
        """Refuse what does not fit the pinned template, from public things alone."""
        step = self._steps.get(task.kind)
        if step is None:
            raise Refused("task", f"no task {task.kind!r} in algorithm {self.algorithm.name}")
        match_rows(describe(task.tensors), resolve(step.takes, tensor_sides(self.algorithm)))
        for name, array in task.tensors.items():
            if not np.isfinite(array).all():
                raise Refused("non-finite", f"tensor {name!r} holds a value that is not finite")

    def _compute(self, task: Task, charge: Charge, state: dict[str, Any]) -> tuple[Release, dict[str, Any], list[Event]]:
        with self.turn():
            me = Client(
                self.protocol, state, self.engine, self.data("train"), lambda: self.data("validation"), charge, self.room
            )
            release = getattr(self.algorithm, task.kind)(me, **task.tensors)
        if isinstance(release, Release):
            match_rows(describe(release.tensors), resolve(self._steps[task.kind].gives, tensor_sides(self.algorithm)))
        return release, me.state, me.ran


def slot_key(task_key: bytes, slot: str) -> bytes:
    """The key of one slot's randomness, out of the key of its task."""
    return derive(task_key, "slot", slot)


def _repeatable(ledger: Path) -> bool:
    """Whether a task that a crash cut may be computed again: not where a GPU did it, whatever device this process has."""
    marker = ledger / ON_GPU
    if not devices.repeatable() and not marker.exists():
        Disk().replace(marker, b"")
    return not marker.exists()


def open_ledger(folder: Path, protocol: Protocol, client: int, *, durable: bool = True) -> Ledger:
    """The ledger of one client for one job under `folder`."""
    owner = {"run": protocol.run, "job": digest(protocol), "client": client}
    return Ledger(folder, owner=owner, durable=durable)
