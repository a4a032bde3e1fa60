"""Privacy gate: a release leaves the client only if the plan allows it and the ledger has been charged."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np

from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.errors import LedgerError, Refused
from dpcfl_net.core.frozen import digest
from dpcfl_net.core.payload_hash import payload_hash
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.tensors import CLIENT_DTYPES, DTYPES, buffers, describe, dtype_names, pack, unpack
from dpcfl_net.core.types import Adjacency, Answer, ClientStep, Release, Task
from dpcfl_net.federation.planned_slots import PlannedSlots
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.ledger.entries import Entry
from dpcfl_net.privacy.ledger.ledger import Charged, Expired, Ledger
from dpcfl_net.privacy.ledger.release_store import Stored
from dpcfl_net.privacy.randomness import derive
from dpcfl_net.privacy.slots import Slot, given

_log = logging.getLogger(__name__)

ClientState = dict[str, np.ndarray]
Check = Callable[[Task], None]
S = TypeVar("S", bound=Slot)
# Storing 1 MiB costs milliseconds, computing it again seconds; the releases of large models would cost each round, to save time
# only after a crash.
MOST_STORED = 1 << 20


@dataclass(frozen=True)
class Charge:
    """A charged task.

    Attributes:
        key: Private key of all randomness of the task.
        slots: The task's slots by name.
        noise_multiplier: z of the client; None for a plan without noise.
        adjacency: Adjacency of the privacy target.
    """

    key: bytes = field(repr=False)
    slots: Mapping[str, Slot]
    noise_multiplier: float | None
    adjacency: Adjacency

    @property
    def z(self) -> float:
        """The noise multiplier of a plan with noise."""
        return given(self.noise_multiplier)

    def slot(self, name: str, *kinds: type[S], step: str = "client step") -> S:
        """Return the slot of a name and of one of the kinds that a mechanism takes.

        Raises:
            ValueError: If the task did not charge it; the message names the slots of the step.
        """
        spec = self.slots.get(name)
        if not isinstance(spec, kinds):
            charged = ", ".join(f"{name!r} ({type(other).__name__})" for name, other in self.slots.items())
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(
                f"slot is {name!r}: this {step} must charge a slot of this name and of type {wanted}; it charges {charged or 'none'}"
            )
        return spec


Compute = Callable[[Charge, ClientState], tuple[Release, ClientState, list[Event]]]


@dataclass(frozen=True)
class GateSpec:
    """Terms of a job for one client, from its signed protocol.

    Attributes:
        job_hash: Hash of the signed protocol.
        client: Client id.
        rounds: Rounds of the run.
        plan: Every slot that the client may fill over the whole run.
        charges: Names of the slots that one task of each kind fills.
        noise_multiplier: z of the client; None for a plan without noise.
        adjacency: Adjacency of the privacy target.
        noise_seed: For runs with seeded noise only; a server that knows it can subtract the noise.
        deterministic: False if computing again would not give the same bits: a charged request without an answer is lost.
        most_stored: Largest release that is stored, in bytes; a larger one is computed again if its task is repeated. None: each
            release is stored, as it is if it is not deterministic or comes with a new client state.
        clients_in: Kind of a task to the name of its tensor of clients, each of which is charged; see `PlannedSlots`.
    """

    job_hash: str
    client: int
    rounds: int
    plan: Sequence[Slot]
    charges: Mapping[str, Sequence[str]]
    noise_multiplier: float | None
    adjacency: Adjacency
    noise_seed: bytes | None = field(default=None, repr=False)
    deterministic: bool = True
    most_stored: int | None = MOST_STORED
    clients_in: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        protocol: Protocol,
        client: int,
        plan: Sequence[Slot],
        steps: Mapping[str, ClientStep],
        noise_multiplier: float | None,
        **more: Any,
    ) -> GateSpec:
        """Read the terms from a protocol.

        Args:
            protocol: The signed protocol.
            client: Client id.
            plan: Every slot that the client may fill over the whole run.
            steps: Steps by task name; a step whose slots are not in the plan is left out.
            noise_multiplier: z of the plan; None for a plan without noise.
            **more: `noise_seed`, `deterministic` and `most_stored`.
        """
        charges, clients_in = PlannedSlots.charges_of(plan, protocol.clients, steps)
        terms = plan, charges, noise_multiplier, protocol.privacy.adjacency
        return cls(digest(protocol), client, protocol.rounds, *terms, clients_in=clients_in, **more)


class Gate:
    """Privacy gate: answers the tasks of one job for one client.

    Args:
        spec: Terms of the job for this client.
        ledger: The client's ledger.

    Raises:
        ConfigError: If plan and charges disagree.
        LedgerError: If the ledger holds what this plan cannot have charged, or charges of another job.
    """

    def __init__(self, spec: GateSpec, ledger: Ledger) -> None:
        self.job_hash, self.client, self.rounds = spec.job_hash, spec.client, spec.rounds
        self._noise_multiplier, self._adjacency = spec.noise_multiplier, spec.adjacency
        self._ledger, self._seed, self._deterministic = ledger, spec.noise_seed, spec.deterministic
        self._most_stored = spec.most_stored
        self._planned = PlannedSlots(spec.plan, spec.charges, spec.clients_in, spec.noise_multiplier, spec.adjacency)
        self._check_ledger()
        for truncated in ledger.truncated(spec.job_hash):
            names = self._planned.costliest(self.remaining())
            ledger.charge_truncated(truncated, names, [self._planned.events[name] for name in names])

    def answer(self, task: Task, check: Check, compute: Compute, before_final: Callable[[], None] | None = None) -> Answer:
        """Answer a task. An equal task gets the same bytes, is charged once, and is computed from the same randomness.

        An exception from `compute` is passed on, and the charge stays. If the task comes again, also after a restart, it is
        computed from the same key. The caller must not send the server anything that depends on the exception.

        Args:
            task: The task.
            check: Gets the task and raises Refused if it is invalid; nothing is spent then.
            compute: Runs after the debit is durable. Gets the charge and the client's state, and returns the release, the new
                state, and the events of the mechanisms that ran.
            before_final: Called before a computed result is final, as by `Ledger.store`.

        Returns:
            The answer.

        Raises:
            LedgerError: If the ledger is damaged.
        """
        try:
            request = self._request(task)
            known = self._known(request, task)
            if known is None:
                self._admit(task, check)
                known = self._debit(request, task)
        except LedgerError:
            raise
        except Refused as refusal:
            return Answer("refused", code=refusal.code, reason=refusal.reason)
        return known if isinstance(known, Answer) else self._compute(known, task, compute, before_final)

    def end(self) -> None:
        """Erase the keys of answers that are not stored if nothing is left to be asked; the same tasks are stale then.

        A key would stay in the ledger, and whoever has it subtracts the noise of its release.
        """
        charges = self._ledger.charges(self.job_hash)
        if charges and (charges[-1].round >= self.rounds or not any(self.remaining().values())):
            self._ledger.erase_answered(self.job_hash)

    def spent(self) -> list[Event]:
        """List the events charged so far, those of truncated lines included."""
        return [event for entry in self._ledger.charges(self.job_hash) for event in entry.events]

    def remaining(self, before: int | None = None) -> dict[str, int]:
        """Count the unused slots of each name.

        Args:
            before: Count the charges of the rounds before this one; None: all charges.
        """
        spent = self._ledger.spent(self.job_hash)
        for entry in [] if before is None else self._charged_from(before):
            for name in entry.slots:
                spent[name] -= 1
        return {name: quota - spent.get(name, 0) for name, quota in self._planned.quota.items()}

    def charged(self, round: int) -> tuple[str, ...] | None:
        """List the slots that a round's task has filled; None if it was not charged.

        Args:
            round: The round.
        """
        found = [entry.slots for entry in self._charged_from(round) if (entry.type, entry.round) == ("debit", round)]
        return found[0] if found else None

    def answered_round(self) -> int:
        """Return the round of the newest task with an answer, whose state `state` is; 0 before the first."""
        for entry in reversed(self._ledger.charges(self.job_hash)):
            known = self._ledger.lookup(entry.id) if entry.type == "debit" else None
            if known is not None and not (isinstance(known, Charged) and not known.answered):
                return entry.round
        return 0

    def state(self, before: int | None = None) -> ClientState:
        """Read the client's state after its last committed task; empty before the first task.

        Args:
            before: Number of a debit: the state before it.
        """
        packed = self._ledger.state(self.job_hash, before)
        return {} if packed is None else unpack(packed)

    def _request(self, task: Task) -> str:
        """Compute the request id of a task; Refused if its tensors or fields are malformed."""
        try:
            rows = describe(task.tensors, CLIENT_DTYPES)
        except ValueError as problem:
            raise Refused("tensors", str(problem)) from problem
        if isinstance(task.round, bool) or not isinstance(task.round, int) or not isinstance(task.kind, str):
            raise Refused("task", "round must be a whole number, kind a string")
        content = task.blake3
        if not content:
            content = payload_hash(*buffers(task.tensors))
        return request_id(self.job_hash, self.client, task.round, task.kind, rows, content)

    def _known(self, request: str, task: Task) -> Answer | Charged | None:
        """Look up an earlier charge: its answer, or the debit to compute from; None for a new task."""
        known = self._ledger.lookup(request)
        charges = self._ledger.charges(self.job_hash)
        if isinstance(known, Stored):
            return _answer(known, cached=True)
        if isinstance(known, Expired):
            return Answer("stale", code="stale", reason=f"round {task.round} was answered and is no longer kept")
        if isinstance(known, Charged):
            if self._deterministic and (known.answered or charges[-1].sequence == known.sequence):
                return known
            return self._lose(known, "charged, and cut by a crash")
        if any(entry.type == "closed" and entry.round == task.round for entry in self._charged_from(task.round)):
            return Answer("lost", code="lost", reason=f"round {task.round} was closed after a crash")
        return None

    def _admit(self, task: Task, check: Check) -> None:
        """Raise Refused unless the task is new, in order, within the plan and well formed; uses public facts only."""
        if task.kind not in self._planned:
            why = "there is no such step, or the plan lacks a slot that it charges"
            raise Refused("unknown-kind", f"the plan holds no task of kind {task.kind[:64]!r}: {why}")
        if not 1 <= task.round <= self.rounds:
            raise Refused("round", f"round {task.round} is outside 1..{self.rounds}")
        charges = self._ledger.charges(self.job_hash)
        own = ("debit", task.round, task.kind)
        if any((entry.type, entry.round, entry.kind) == own for entry in self._charged_from(task.round)):
            raise Refused("other-content", f"round {task.round} {task.kind} was charged with other content")
        if charges and task.round < charges[-1].round:
            raise Refused("round-order", f"round {task.round} is before round {charges[-1].round}, the last one charged")
        left = self.remaining()
        if used := [name for name in self._planned.names(task) if left.get(name, 0) <= 0]:
            raise Refused("quota", f"the plan holds no further {task.kind}: no {used[0]} is left")
        check(task)

    def _debit(self, request: str, task: Task) -> Charged:
        names = self._planned.names(task)
        key = None
        if self._seed is not None:
            key = seeded_key(self._seed, self.client, task.round, task.kind, names)
        events = [self._planned.events[name] for name in names]
        _log.debug("client %s, round %d: charges %s", self.client, task.round, ", ".join(names))
        return self._ledger.debit(
            job=self.job_hash, request=request, round=task.round, kind=task.kind, slots=names, events=events, key=key
        )

    def _compute(self, charged: Charged, task: Task, compute: Compute, before_final: Callable[[], None] | None) -> Answer:
        names = self._planned.names(task)
        slots = {name: self._planned.slots[name] for name in names}
        charge = Charge(charged.key, slots, self._noise_multiplier, self._adjacency)
        before = self.state(charged.sequence)
        result = compute(charge, before)
        try:
            final, state = _pack_result(task.kind, result, before, [self._planned.events[name] for name in names])
        except Refused as refusal:
            final, state = Stored("refused", code=refusal.code, reason=refusal.reason), None
        if charged.answered:
            same = final.digest() == charged.answered
            return _answer(final, cached=True) if same else self._lose(charged, "computed again, its bits differ")
        large = self._most_stored is not None and len(final.release) > self._most_stored
        repeatable = self._deterministic and large
        return _answer(self._ledger.store(charged.sequence, final, state, repeatable=repeatable, before_final=before_final))

    def _lose(self, charged: Charged, reason: str) -> Answer:
        return _answer(self._ledger.store(charged.sequence, Stored("lost", code="lost", reason=reason)))

    def _charged_from(self, round: int) -> list[Entry]:
        """Charges of a round and of those after it, the newest first; rounds are charged in increasing order."""
        charges = self._ledger.charges(self.job_hash)
        return list(takewhile(lambda entry: entry.round >= round, reversed(charges)))

    def _check_ledger(self) -> None:
        charges = self._ledger.charges(self.job_hash)
        for entry in charges:
            if not self._planned.fits(entry):
                raise LedgerError("ledger-broken", f"entry {entry.sequence} charges what the plan of this job does not hold")
        if any(count > self._planned.quota[name] for name, count in self._ledger.spent(self.job_hash).items()):
            raise LedgerError("ledger-broken", "more is spent than the plan of this job holds")
        if {entry.job for entry in self._ledger.entries if entry.job} - {self.job_hash}:
            raise LedgerError("ledger-foreign", "this ledger holds charges of another job")


def request_id(job_hash: str, client: int, round: int, kind: str, rows: Sequence[Sequence[Any]], content: str) -> str:
    """Compute the id under which a task is charged; the header of the task is enough for it.

    Args:
        job_hash: Hash of the signed protocol.
        client: Client id.
        round: Round of the task.
        kind: Name of the task.
        rows: (name, dtype, shape, bytes) of each tensor.
        content: `payload_hash` of the bytes of all tensors.

    Returns:
        sha256 of all arguments, in hex.
    """
    return hashlib.sha256(canonical_json([job_hash, client, round, kind, rows, content])).hexdigest()


def seeded_key(seed: bytes, client: int, round: int, kind: str, charges: Sequence[str]) -> bytes:
    """Derive the private key of a task in a run with seeded noise; the seed reveals it.

    Args:
        seed: Noise seed of the run.
        client: Client id.
        round: Round of the task.
        kind: Name of the task.
        charges: Names of the task's slots.
    """
    return derive(seed, "charge", client, round, kind, *charges)


def _answer(stored: Stored, *, cached: bool = False) -> Answer:
    return Answer(stored.status, stored.release, stored.code, stored.reason, cached, stored.blake3)


def _pack_result(
    kind: str, result: Any, before: ClientState, expected: Sequence[Event]
) -> tuple[Stored, bytes | memoryview | None]:
    """Pack release and state (None: empty, as before); Refused for another type, or if other mechanisms ran than were charged.

    The server reads the reason, so it holds public facts only. The log of the client names the arrays.
    """
    complete = isinstance(result, tuple) and len(result) == 3
    if not complete or not isinstance(result[0], Release) or not isinstance(result[1], dict):
        raise Refused("not-a-release", f"step {kind!r} must return a Release")
    release, state, ran = result
    if not _same_events(ran, expected):
        why = f"step {kind!r} must run exactly those of the slots that it charges"
        raise Refused("mechanism-mismatch", f"the mechanisms that ran are not those that were charged: {why}")
    try:
        describe(release.tensors, CLIENT_DTYPES)
        describe(state, CLIENT_DTYPES)
        packed, payload = pack(release.tensors), sum(array.nbytes for array in release.tensors.values())
        after = pack(state) if state or before else None
    except (ValueError, AttributeError) as problem:
        wrong = [*_not_arrays("the release", release.tensors), *_not_arrays("me.state", state)]
        _log.warning("step %r: %s", kind, "; ".join(wrong) or problem)
        types = dtype_names(CLIENT_DTYPES)
        reason = f"release and me.state of step {kind!r} must hold NumPy arrays of {types}; the client's log names what is not"
        raise Refused("not-a-release", reason) from problem
    blake3 = payload_hash(memoryview(packed)[len(packed) - payload :])
    return Stored("release", packed, payload=payload, blake3=blake3), after


def _not_arrays(what: str, values: Mapping[str, Any]) -> list[str]:
    """Name the values that no message or state holds, with their types."""
    types = {name: getattr(value, "dtype", type(value).__name__) for name, value in values.items()}
    known = {DTYPES[code] for code in CLIENT_DTYPES}
    return [f"{what} has {name} of type {found}" for name, found in types.items() if found not in known]


def _same_events(ran: Any, expected: Sequence[Event]) -> bool:
    valid = isinstance(ran, (list, tuple)) and all(isinstance(event, Event) for event in ran)
    return valid and Counter(ran) == Counter(expected)
