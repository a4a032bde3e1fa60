"""Verification of a job's privacy claim on the client's host before data is read."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.frozen import once
from dpcfl_net.core.plugins import failure, is_plugin
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.signed_settings import PrivacyTarget
from dpcfl_net.core.types import SANE_EPSILON, USUAL_POLICY, Adjacency, NoEffect, Policy
from dpcfl_net.federation.capabilities import ClientSide, client_steps
from dpcfl_net.federation.plan_examples import plan_examples, plan_key
from dpcfl_net.federation.secure.stages import MASKED, MASKED_NAME, MASKING
from dpcfl_net.federation.secure_claim import secure_sum_problem
from dpcfl_net.privacy.accounting.cache import cached, cost
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.ledger.record_book import Compose
from dpcfl_net.privacy.slots import RAW, CentralSlot, DPSGDSlot, RawSlot, Slot, StageSlot, UnprotectedSlot

# With this process's module path: under `-m` a file numpy.py of the current folder, such as a folder with a job, would be executed.
_ACCOUNTANT = "import sys; sys.path[:] = {path!r}; from dpcfl_net.privacy.accounting.document import main; sys.exit(main())"
SEEDED = "noise is seeded: whoever has the seed subtracts it (INSECURE)"


def plan_events(plan: list[Slot], noise_multiplier: float | None, adjacency: Adjacency) -> list[Event]:
    """Build the events of a plan.

    Args:
        plan: Slots in any order.
        noise_multiplier: The plan's noise multiplier; None if the job names none.
        adjacency: "zero-out" or "replace-one".

    Returns:
        One event for all slots that are equal, in order of first appearance.

    Raises:
        ValueError: If a slot needs a noise multiplier and there is none.
    """
    events = [(slot.event(noise_multiplier, adjacency), count) for slot, count in Counter(plan).items()]
    return [event.with_runs(event.runs * count) for event, count in events]


def unprotected(plan: list[Slot]) -> list[str]:
    """List the reasons why a plan has no finite epsilon.

    Args:
        plan: Slots of a plan that protects a client (`noisy_plans`), in any order. A raw release is none of a trusted server's
            own, so that here it goes to a server that is not trusted.

    Returns:
        Each reason once, sorted; empty for a finite epsilon.
    """
    raw = [RAW for slot in plan if isinstance(slot, RawSlot)]
    return sorted({*raw, *(slot.reason for slot in plan if isinstance(slot, UnprotectedSlot))})


def without_guarantee(algorithm: ClientSide) -> list[str]:
    """List the reasons why a job has no finite epsilon: releases without a guarantee in its plans, and seeded noise.

    Args:
        algorithm: The job's algorithm.
    """
    protocol = algorithm.protocol

    def planned() -> list[str]:
        return sorted({reason for plan, *_ in noisy_plans(algorithm) for reason in unprotected(list(plan))})

    # Clients of one process, and of its forks, verify the same job; plans may differ by client, so that each would read all.
    reasons = once(protocol, ("reasons", type(algorithm)), planned)
    return [*reasons, *([SEEDED] if protocol.privacy.noise == "seeded" else [])]


def adjacency_problem(privacy: PrivacyTarget) -> str | None:
    """Say why no release to the server can hide what the adjacency names.

    Args:
        privacy: Privacy target of the job.

    Returns:
        A sentence; None without a problem.
    """
    if (privacy.unit, privacy.trust, privacy.adjacency) != ("client", "untrusted-server", "zero-out"):
        return None
    why = "every client of the public roster answers, so that the absence of a client cannot be hidden"
    return f"privacy.adjacency is 'zero-out': must be replace-one with privacy.unit client: {why}"


def plan_problem(algorithm: ClientSide) -> str | None:
    """Find a slot in the plans of a run whose event is not what its release costs in this job, or an adjacency that no event has.

    Args:
        algorithm: The job's algorithm.

    Returns:
        A sentence; None without a problem.

    Raises:
        ConfigError: If a plan is no list of slots, or `plan` of a plug-in raises.
    """
    protocol = algorithm.protocol
    unit, clients = protocol.privacy.unit, len(protocol.roster)

    def found() -> str | None:
        if problem := adjacency_problem(protocol.privacy):
            return problem
        for entry in plan_examples(algorithm):  # also those that a trusted server does not pay for
            _checked(algorithm, "plan", _planned(algorithm, entry))
        for slot in {slot: None for charged in noisy_plans(algorithm) for slot in charged.plan}:
            named = f"the plan of {protocol.algorithm} has slot {slot.name!r} ({type(slot).__name__})"
            if unit not in slot.units:
                return f"{named}, which protects a {slot.units[0]}: privacy.unit must be {slot.units[0]!r}, got {unit!r}"
            if isinstance(slot, CentralSlot) and slot.population != clients:
                return f"{named} over a population of {slot.population}: must be the number of clients, {clients}"
        return _beside_masks(algorithm)

    return once(protocol, ("plan problem", type(algorithm)), found)


def _planned(algorithm: ClientSide, entry: ClientEntry) -> Any:
    """Return the plan; where a plug-in's `plan` raises, a ConfigError names file and line."""
    try:
        return algorithm.plan(entry)
    except Exception as error:
        if not is_plugin(algorithm.protocol.algorithm):
            raise
        raise failure("algorithm.name", algorithm.protocol.algorithm, "plan", error) from error


def _beside_masks(algorithm: ClientSide) -> str | None:
    """Find a tensor beside the masked words of a whole client, whose raw methods compute inside the sum: only the sum protects it.

    The server adds the tensor of `MASKED_NAME` alone: whole numbers of the same type under another name leave without a mask.
    """
    if (algorithm.protocol.privacy.unit, algorithm.protocol.privacy.secure) != ("client", True):
        return None
    for step in client_steps(algorithm).values():
        beside = [name for name, spec in step.gives.items() if (name, spec.dtype) != (MASKED_NAME, MASKED.dtype)]
        if MASKING.keys() <= step.takes.keys() and beside:
            return (
                f"client step {step.kind!r} of {algorithm.protocol.algorithm} gives {beside[0]!r} beside masked words: must give masked words "
                "alone with privacy.unit 'client', whose clients are protected by the sum"
            )
    return None


def protected(plan: list[Slot]) -> list[Slot]:
    """Select the slots of a plan for which the noise is calibrated, in the plan's order.

    Args:
        plan: Slots in any order.
    """
    return [slot for slot in plan if not isinstance(slot, UnprotectedSlot | RawSlot | StageSlot)]


class NoisyPlan(NamedTuple):
    """A plan that is charged for a run.

    Attributes:
        plan: Slots in any order.
        noise_multiplier: z; None if there is no noise, or before it is calibrated.
        epsilon: Target epsilon.
    """

    plan: tuple[Slot, ...]
    noise_multiplier: float | None
    epsilon: float

    @classmethod
    def of(cls, algorithm: ClientSide, entry: ClientEntry) -> NoisyPlan:
        """Read the plan of a client; ConfigError if it is no list of slots."""
        plan = _checked(algorithm, "plan", algorithm.plan(entry))
        return cls(plan, entry.noise_multiplier, algorithm.protocol.epsilon_of(entry))


def _checked(algorithm: ClientSide, method: str, plan: Any) -> tuple[Slot, ...]:
    """Return a plan; ConfigError if it is no list of slots, as in an algorithm of a user's own."""
    if not isinstance(plan, list | tuple) or not all(isinstance(slot, Slot) for slot in plan):
        got = type(plan).__name__
        if isinstance(plan, list | tuple):
            got += f" with {next(type(slot).__name__ for slot in plan if not isinstance(slot, Slot))}"
        such = CentralSlot if method == "central_plan" else DPSGDSlot
        raise ConfigError(
            f"{algorithm.protocol.algorithm}: `{method}` returned {got}: must be a list of slots, such as {such.__name__}"
        )
    for slot in {id(slot): slot for slot in plan}.values():  # most are the same object
        for name, value in vars(slot).items():
            if wrong := _no_number(value):
                raise ConfigError(
                    f"{algorithm.protocol.algorithm}: `{method}` has slot {slot.name!r} with {name} {value!r}: {wrong}"
                )
        try:
            slot.event(1.0, algorithm.protocol.privacy.adjacency)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{algorithm.protocol.algorithm}: `{method}` has {slot!r} of noise multiplier 1: {error}"
            ) from error
    return tuple(plan)


def _no_number(value: Any) -> str:
    """Say why a number in a slot has no exact text in a signed job; empty if it has, and for other values."""
    if isinstance(value, np.number) and not isinstance(value, float):  # a float64 is a float
        return f"write {'float' if isinstance(value, np.inexact) else 'int'}(...) around it"
    return "must be finite" if isinstance(value, float) and not math.isfinite(value) else ""


def noisy_plans(algorithm: ClientSide) -> list[NoisyPlan]:
    """List the plans that are charged for a run: the trusted server's, or that of each client, equal ones once.

    Args:
        algorithm: The job's algorithm.
    """
    protocol = algorithm.protocol
    if protocol.privacy.central:
        plan = _checked(algorithm, "central_plan", algorithm.central_plan())
        return [NoisyPlan(plan, protocol.curator_noise_multiplier, protocol.privacy.epsilon)]
    return list(dict.fromkeys(NoisyPlan.of(algorithm, entry) for entry in plan_examples(algorithm)))


def hold_to_policy(protocol: Protocol, client: int, policy: Policy) -> None:
    """Refuse a job that exceeds this worker's policy.

    Args:
        protocol: The signed protocol.
        client: Client id.
        policy: Its bounds on epsilon and delta, and whether it serves jobs without protection against the server.

    Raises:
        Refused: "policy", naming the option that would change it.
    """
    privacy, by_client = protocol.privacy, protocol.privacy.unit == "client"
    if policy.protected_only and (protocol.unprotected or privacy.central):
        raw = (
            protocol.unprotected[0]
            if protocol.unprotected
            else "privacy.trust is 'trusted-server', and the server gets raw updates"
        )
        raise Refused("policy", f"this worker serves only jobs that protect it against the server (protected_only), and {raw}")
    epsilon = protocol.epsilon_of(protocol.client(client))
    count = len(protocol.roster) if by_client else protocol.client(client).records
    most = 1 / count if policy.max_delta is None else policy.max_delta
    if privacy.delta > most:
        why = f"1 / {count}, one over the {'clients' if by_client else 'records'}" if policy.max_delta is None else f"{most:g}"
        raise Refused("policy", f"the job's delta is {privacy.delta:g}, this worker serves at most {why} (max_delta)")
    if protocol.unprotected and policy.max_epsilon is not None:
        raise Refused(
            "policy",
            f"the job has no finite epsilon ({protocol.unprotected[0]}), this worker serves at most {policy.max_epsilon:g} (max_epsilon)",
        )
    largest = SANE_EPSILON if policy.max_epsilon is None else policy.max_epsilon
    if epsilon > largest and not protocol.unprotected:  # without a guarantee, epsilon is only the target of the calibration
        raise Refused("policy", f"the job's epsilon is {epsilon:g}, this worker serves at most {largest:g} (max_epsilon)")


def claimed_events(algorithm: ClientSide, client: int) -> list[Event]:
    """Build the events of a privacy budget claim: the noisy part of the plan that protects a client.

    Args:
        algorithm: The job's algorithm.
        client: Client id.

    Returns:
        Events of the client's plan, or of the trusted server's.

    Raises:
        ValueError: If the plan needs a noise multiplier and the job names none.
    """
    protocol, entry = algorithm.protocol, algorithm.protocol.client(client)
    plan, noise = algorithm.plan(entry), entry.noise_multiplier
    if protocol.privacy.central:  # the client's releases are raw, and the server's plan protects it
        plan, noise = algorithm.central_plan(), protocol.curator_noise_multiplier
    return plan_events(protected(plan), noise, protocol.privacy.adjacency)


def composer(cache: Path) -> Compose:
    """Build an accountant that runs in a separate process, once on a host for equal arguments.

    Args:
        cache: Folder of the accountant cache.

    Returns:
        A function (events, delta, adjacency, order) -> epsilon, see `record_book.Compose`.
    """

    def compose(events: Sequence[Event], delta: float, adjacency: Adjacency, order: float | None = None) -> float:
        return _epsilon(cache, cost(events, delta, adjacency, "pld" if order is None else "rdp", order))

    return compose


def verify_claim(algorithm: ClientSide, client: int, cache: Path, policy: Policy = USUAL_POLICY) -> float:
    """Verify the epsilon of one client's whole plan at its signed noise multiplier.

    The check covers the conditions on the signed protocol under which epsilon is valid, and this worker's policy. A plan with
    releases without a guarantee is served only if the signed job declares every reason; its protected part must still meet the
    target. The accountant runs in a separate process, once on a host for equal plans, since its libraries are large and most
    clients have equal plans.

    Args:
        algorithm: The job's algorithm.
        client: Client id.
        cache: Folder of the accountant cache on this host.
        policy: Bounds on epsilon and delta.

    Returns:
        Epsilon; inf for a plan with releases without a guarantee.

    Raises:
        Refused: "claim" if epsilon exceeds the job's target, or a condition or a declaration is missing; "policy" if the job
            exceeds the policy.
    """
    protocol = algorithm.protocol
    name = ("claim", type(algorithm), plan_key(algorithm, protocol.client(client)), str(cache), policy)
    return once(protocol, name, lambda: _verified(algorithm, client, cache, policy))


def unmet_condition(algorithm: ClientSide) -> str | None:
    """Find a condition under which the job's epsilon is a theorem, and that the signed protocol does not meet.

    Args:
        algorithm: The job's algorithm.

    Returns:
        A sentence; None if all are met.

    Raises:
        ConfigError: If a plan is no list of slots.
    """
    protocol, privacy = algorithm.protocol, algorithm.protocol.privacy
    if (privacy.unit, privacy.trust) not in algorithm.capabilities.protects:
        return f"{algorithm.name} does not protect a {privacy.unit} under {privacy.trust}, as the job says it does"
    problems = algorithm.problems(algorithm.options, algorithm.setting)
    if problems := [problem for problem in problems if not isinstance(problem, NoEffect)]:
        return "; ".join(problems)
    if problem := plan_problem(algorithm) or secure_sum_problem(algorithm):
        return problem
    if (reasons := without_guarantee(algorithm)) != protocol.unprotected:
        return f"without a guarantee: {reasons}; the job declares {protocol.unprotected}"
    return None


def _verified(algorithm: ClientSide, client: int, cache: Path, policy: Policy) -> float:
    privacy = algorithm.protocol.privacy
    hold_to_policy(algorithm.protocol, client, policy)
    if problem := unmet_condition(algorithm):
        raise Refused("claim", problem)
    try:
        events = claimed_events(algorithm, client)
    except ValueError as error:
        raise Refused("claim", str(error)) from None
    question = cost(events, algorithm.protocol.accounted_delta, privacy.adjacency, privacy.accountant)
    epsilon, target = _epsilon(cache, question), algorithm.protocol.epsilon_of(algorithm.protocol.client(client))
    if not epsilon <= target:
        raise Refused("claim", f"the signed plan costs client {client} epsilon {epsilon}, the job promises {target:g}")
    return math.inf if algorithm.protocol.unprotected else epsilon


def _epsilon(cache: Path, question: dict[str, Any]) -> float:
    found: float | None = cached(cache, question, lambda: _account(question))
    return math.inf if found is None else found


def _account(question: dict[str, Any]) -> float | None:
    run = subprocess.run(
        [sys.executable, "-c", _ACCOUNTANT.format(path=[entry for entry in sys.path if isinstance(entry, str)])],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        ended = f"signal {-run.returncode}" if run.returncode < 0 else f"exit code {run.returncode}"
        why = run.stderr.strip()[-400:] or f"its process ended by {ended} without a message"
        raise Refused("claim", f"the accountant could not check the plan: {why}")
    epsilon: float | None = json.loads(run.stdout)["epsilon"]
    return epsilon
