"""A job's claim, recomputed where the client runs: plan and noise must not cost more than the target, or no data is read."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dpcfl_net.core.errors import Refused
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.types import SANE_EPSILON, USUAL_POLICY, Adjacency, Policy
from dpcfl_net.federation.base import ClientSide
from dpcfl_net.privacy.accounting.cache import cached, cost
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.slots import RawSlot, Slot, UnprotectedSlot

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
    """Why a plan has no finite epsilon: the reasons of its releases without a guarantee, each once; nothing if it has one."""
    return sorted({slot.reason for slot in plan if isinstance(slot, UnprotectedSlot)})


def without_guarantee(algorithm: ClientSide) -> list[str]:
    """Why a job has no finite epsilon: its plans' releases without one, and noise that whoever has the seed subtracts."""
    reasons = {reason for plan in noisy_plans(algorithm) for reason in unprotected(list(plan))}
    return sorted(reasons) + ([SEEDED] if algorithm.protocol.privacy.noise == "seeded" else [])


def protected(plan: list[Slot]) -> list[Slot]:
    """The part of a plan that noise is solved for."""
    return [slot for slot in plan if not isinstance(slot, UnprotectedSlot | RawSlot)]


def noisy_plans(algorithm: ClientSide) -> dict[tuple[Slot, ...], float | None]:
    """The plans that pay for a run and their noise multipliers: a trusted server's one, or each client's own, equal ones once."""
    protocol = algorithm.protocol
    if protocol.privacy.trust == "trusted-server":
        return {tuple(algorithm.central_plan()): protocol.curator_noise_multiplier}
    return {tuple(algorithm.plan(entry)): entry.noise_multiplier for entry in protocol.roster}


def hold_to_policy(protocol: Protocol, client: int, policy: Policy) -> None:
    """Refused "policy" for a promise that this worker does not serve, each with the option that would change it."""
    privacy, by_client = protocol.privacy, protocol.privacy.unit == "client"
    count = len(protocol.roster) if by_client else protocol.client(client).records
    most = 1 / count if policy.max_delta is None else policy.max_delta
    if privacy.delta > most:
        why = f"1 / {count}, one over the {'clients' if by_client else 'records'}" if policy.max_delta is None else f"{most:g}"
        raise Refused("policy", f"the job's delta is {privacy.delta:g}, this worker serves at most {why} (max_delta)")
    if protocol.unprotected and policy.max_epsilon is not None and policy.max_epsilon < math.inf:
        raise Refused(
            "policy",
            f"the job has no finite epsilon ({protocol.unprotected[0]}), this worker serves at most {policy.max_epsilon:g} (max_epsilon)",
        )
    largest = SANE_EPSILON if policy.max_epsilon is None else policy.max_epsilon
    if privacy.epsilon > largest and not protocol.unprotected:  # else it is no promise, only what noise was solved for
        raise Refused(
            "policy", f"the job's epsilon is {privacy.epsilon:g}, this worker serves at most {largest:g} (max_epsilon)"
        )


def promised_events(algorithm: ClientSide, client: int) -> list[Event]:
    """What the accountant sees of the noisy part of the plan that a client is promised; ValueError where it names no noise."""
    protocol, entry = algorithm.protocol, algorithm.protocol.client(client)
    plan, noise = algorithm.plan(entry), entry.noise_multiplier
    if (
        protocol.privacy.trust == "trusted-server"
    ):  # the client's own releases are raw; what it is promised is the server's plan
        plan, noise = algorithm.central_plan(), protocol.curator_noise_multiplier
    return plan_events(protected(plan), noise, protocol.privacy.adjacency)


def composer(cache: Path) -> Callable[[Sequence[Event], float, Adjacency], float]:
    """An accountant (events, delta, adjacency) -> epsilon that runs in a process of its own, once on a host for a question."""

    def compose(events: Sequence[Event], delta: float, adjacency: Adjacency) -> float:
        question = cost(events, delta, adjacency, "pld")
        found: float | None = cached(cache, question, lambda: _account(question))
        return math.inf if found is None else found

    return compose


def verify_claim(algorithm: ClientSide, client: int, cache: Path, policy: Policy = USUAL_POLICY) -> float:
    """The epsilon of one client's whole plan at its signed noise; Refused "claim" if it exceeds the job's target.

    The conditions under which that number is sound are checked on the signed protocol itself ("claim"), and the promise is
    held to this worker's own policy ("policy").

    A plan with releases that have no guarantee is served (and its epsilon is inf) only if the signed job says so itself,
    reason by reason; what is protected in it is held to the target all the same.

    The accountant runs in a process of its own, once on a host for equal plans: its libraries are large and every
    client has the same question. `cache` is this host's folder; an answer in it is keyed by all that it depends on.
    """
    privacy = algorithm.protocol.privacy
    if (privacy.unit, privacy.trust) not in algorithm.protects:  # else the plan that is checked is not the one that is run
        raise Refused(
            "claim", f"{algorithm.name} does not protect a {privacy.unit} under {privacy.trust}, as the job says it does"
        )
    if unmet := algorithm.unmet():
        raise Refused("claim", "; ".join(unmet))
    hold_to_policy(algorithm.protocol, client, policy)
    reasons = without_guarantee(algorithm)
    if reasons != algorithm.protocol.unprotected:
        raise Refused("claim", f"without a guarantee: {reasons}; the job declares {algorithm.protocol.unprotected}")
    try:
        events = promised_events(algorithm, client)
    except ValueError as error:
        raise Refused("claim", str(error)) from None
    question = cost(events, algorithm.protocol.accounted_delta, privacy.adjacency, privacy.accountant)
    epsilon = cached(cache, question, lambda: _account(question))
    if epsilon is None or epsilon > privacy.epsilon:
        raise Refused("claim", f"the signed plan costs client {client} epsilon {epsilon}, the job promises {privacy.epsilon:g}")
    return math.inf if reasons else epsilon


def _account(question: dict[str, Any]) -> float | None:
    run = subprocess.run(
        [sys.executable, "-m", "dpcfl_net.privacy.accounting.document"],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        raise Refused("claim", f"the accountant could not check the plan: {run.stderr.strip()[-400:]}")
    epsilon: float | None = json.loads(run.stdout)["epsilon"]
    return epsilon
