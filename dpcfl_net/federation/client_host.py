"""Client runtime: runs client steps on private data behind the privacy gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpcfl_net.core.errors import Refused
from dpcfl_net.core.frozen import digest
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.tensors import describe, finite, read_only
from dpcfl_net.core.types import Answer, ClientStep, Release, Task
from dpcfl_net.federation.capabilities import ClientSide, client_steps
from dpcfl_net.federation.claim import unprotected
from dpcfl_net.federation.client import Client
from dpcfl_net.federation.engine import Engine
from dpcfl_net.federation.gate import Charge, Gate, GateSpec
from dpcfl_net.federation.message_encoding import RESIDUAL, MessageEncoding
from dpcfl_net.federation.secure.client_side import Masking, SecureClient, split_state
from dpcfl_net.federation.secure.stages import MASKED_NAME, MASKING, STAGES, answer_interval_s
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.ledger.durable import Disk
from dpcfl_net.privacy.ledger.ledger import Ledger
from dpcfl_net.privacy.slots import CentralSlot, DPSGDSlot, SecureSlot, Slot
from dpcfl_net.training import devices
from dpcfl_net.training.pace import room
from dpcfl_net.transport.messages import WireError, match_template

Split = Literal["train", "validation"]
ON_GPU = "computed-on-gpu"  # file in a ledger's folder: a charge without an answer may have been computed on a GPU


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
        before_storing: Called with the new state between the computation of a task and the writes of its result.
        before_final: Called when the result is written, but would still be computed again after a crash; None: it is final at once.

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
        self._plan, central = algorithm.plan(entry), algorithm.central_plan()
        self._samples = set() if unprotected(central) else {slot.sampling for slot in central if isinstance(slot, CentralSlot)}
        self._rooms: dict[DPSGDSlot, int | None] = {}
        self._trained: set[str] = set()  # client steps for which the model was checked
        self._open_data, self._make_engine = open_data, engine
        self._data: dict[str, Any] = {}
        self._engine: Engine | None = None
        self._secure = None if identity is None else SecureClient(algorithm, client, identity)
        self._ledger = ledger
        self.turn: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.before_storing: Callable[[Mapping[str, Any]], None] = lambda state: None
        self.before_final: Callable[[], None] | None = None
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

        def compute(charge: Charge, state: dict[str, Any]) -> tuple[Release, dict[str, Any], list[Event]]:
            result = self._compute(task, charge, state)
            self.before_storing(result[1])
            return result

        return self.gate.answer(task, self._check, compute, self.before_final)

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
        if slot not in self._rooms:
            self._rooms[slot] = room_of(self.protocol, self.client, self._plan, slot)
        return self._rooms[slot]

    def personal_model(self, state: Mapping[str, Any] | None = None) -> np.ndarray | None:
        """Read the personal model.

        Args:
            state: A state of the client; None: the state after the last committed task.

        Returns:
            (p,) float32; None without one.
        """
        if not self.algorithm.capabilities.personal:
            return None
        return (self.gate.state() if state is None else state).get("model")

    @property
    def folder(self) -> Path:
        """Folder of the client's ledger."""
        return self._ledger.folder

    def close(self) -> None:
        """Close the ledger."""
        self._ledger.close()

    def _check(self, task: Task) -> None:
        """Raise Refused if a task does not match its template, ConfigError if the model cannot be trained; uses public facts only."""
        step = self._steps.get(task.kind)
        if step is None:
            raise Refused("task", f"no task {task.kind!r} in algorithm {self.algorithm.name}")
        match_template(describe(task.tensors), self._encoding.task_template(step))
        for name, array in task.tensors.items():
            if not finite(array):
                raise Refused("non-finite", f"tensor {name!r} holds a value that is not finite")
        if self._secure is not None:
            self._secure.check(task, split_state(self.gate.state())[0])
        self._check_model(step)

    def _check_model(self, step: ClientStep) -> None:
        """ConfigError, before the charge, if the model's gradients in this process show the place of a record in its batch."""
        # A GPU is lent once for each task, after its charge: there, the first step checks the model. So it does if answers have a
        # deadline: the wait for a core would show, by the time of the charge, how long the client before computes.
        has_deadline = answer_interval_s(self.protocol, step.kind) is not None
        if step.kind in self._trained or has_deadline or devices.torch_device().type != "cpu":
            return
        by_record = DPSGDSlot if self.algorithm.capabilities.plain_sgd else DPSGDSlot | SecureSlot
        slots = {slot for slot in self._plan if slot.name in step.charges and isinstance(slot, by_record)}
        for records in {self.room(slot) if isinstance(slot, DPSGDSlot) else None for slot in slots}:
            with self.turn():
                self.engine.trainer.check_batches(tuple(self.protocol.model.input_shape), records)
        self._trained.add(step.kind)

    def _check_release(self, step: ClientStep, release: Release) -> None:
        """WireError, with the name of the step, if a release is not as the step's `gives`."""
        try:
            match_template(describe(release.tensors), self._encoding.plain_template(step))
        except WireError as error:
            raise WireError(error.code, f"release of client step {step.kind!r}: {error.reason}") from None

    def _check_masked(self, step: ClientStep, release: Any, masking: Masking) -> None:
        """Raise Refused if the server would add words without the noise and the masks of this task."""
        words = release.tensors.get(MASKED_NAME) if isinstance(release, Release) else None
        if words is not None and (masking.sent is None or not np.array_equal(words, masking.sent)):
            mechanism = "masked_update" if self.protocol.privacy.unit == "client" else "masked_gradient"
            raise Refused("mask", f"client step {step.kind!r} must release the words that me.{mechanism} returned")

    def _check_personal(self, model: Any) -> None:
        """Raise Refused for a personal model that is none of the job: it would be evaluated by its first p numbers."""
        p = self.protocol.model.parameters
        if not self.algorithm.capabilities.personal or not isinstance(model, np.ndarray):
            return  # the gate refuses a state that holds anything but arrays
        if model.dtype != np.float32 or model.shape != (p,):
            raise Refused("template", f'me.state["model"] is {model.dtype} {model.shape}: must be float32 ({p},)')

    def _check_stateless(self, state: dict[str, Any]) -> None:
        """Raise Refused for a state that samples of fixed size do not hide: what a client sends would depend on earlier samples.

        An algorithm with `Capabilities.holds_state` cannot have such samples, so only one that does not declare its state gets here.
        """
        if state and self.protocol.privacy.central and "fixed" in self._samples:
            raise Refused(
                "state",
                "me.state is kept, and what the client sends may depend on the samples in which it was before, which samples of fixed size "
                "do not hide: capabilities_for must set holds_state=True, which needs Poisson samples",
            )

    def _compute(self, task: Task, charge: Charge, state: dict[str, Any]) -> tuple[Release, dict[str, Any], list[Event]]:
        step = self._steps[task.kind]
        secure, state = split_state(state)
        if self._secure is not None and task.kind in STAGES:
            stage, secure, events = self._secure.answer(task, charge.key, secure)
            return stage, state | secure, events
        residuals = {name: array for name, array in state.items() if name.startswith(RESIDUAL)}
        own = {name: array for name, array in state.items() if name not in residuals}
        masking = self._secure.masking(task, secure) if self._secure is not None and set(MASKING) <= set(task.tensors) else None
        hidden: dict[str, Any] = {}
        if self._secure is not None and masking is None and self.protocol.privacy.unit == "client":
            own, hidden = {}, own  # what the client computed for its part in a sum may leave in a sum only
        # A warning of NumPy would be a line of the worker's log that only some records cause.
        with self.turn(), np.errstate(all="ignore"):
            # In one process they are the server's own arrays: what a step writes into them would pass the gate.
            tensors = {name: read_only(array) for name, array in task.tensors.items() if masking is None or name not in MASKING}
            me = Client(
                self.protocol, own, self.engine, self.data("train"), lambda: self.data("validation"), charge, self.room,
                _masking=masking,
            )  # fmt: skip
            release = getattr(self.algorithm, task.kind)(me, **self._encoding.decode_task(step, tensors))
        if isinstance(release, Release):
            self._check_release(step, release)
            if self.protocol.privacy.central:
                release = _finite(release)
            with np.errstate(all="ignore"):
                release, residuals = self._encoding.encode_release(step, self.client, release, residuals)
        self._check_personal(me.state.get("model"))
        self._check_stateless(me.state)
        if masking is not None:
            self._check_masked(step, release, masking)
            secure = masking.state
        kept = {**hidden, **residuals, **secure}
        return release, {**hidden, **me.state, **residuals, **secure} if kept else me.state, me.ran


def _finite(release: Release) -> Release:
    """Replace each tensor of a raw release that holds a NaN or an infinity by zeros.

    Such an answer would be refused and missing in its round, which may end below the quorum: the records of one client would
    decide whether the run continues, and no noise of the trusted server hides that.
    """
    return Release(**{name: array if finite(array) else np.zeros_like(array) for name, array in release.tensors.items()})


def _repeatable(ledger: Path) -> bool:
    """Return True if a task that a crash interrupted may be computed again: False if a GPU may have computed it."""
    marker = ledger / ON_GPU
    if not devices.repeatable() and not marker.exists():
        Disk().replace(marker, b"")
    return not marker.exists()


def room_of(protocol: Protocol, client: int, plan: Sequence[Slot], slot: DPSGDSlot) -> int | None:
    """Compute the largest batch of a slot of a client's plan with constant pace, in records; None with free pace."""
    if not protocol.kept_delta:
        return None
    entry = protocol.client(client)
    steps = sum(other.steps for other in plan if isinstance(other, DPSGDSlot) and other.rate < 1)
    return room(entry.records, slot.rate, steps, protocol.epsilon_of(entry), protocol.kept_delta)


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
