"""Joint epsilon of all trials of a tuned algorithm and one run with the chosen settings, for a training record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpcfl_net.algorithms.base import algorithm_of
from dpcfl_net.core.plugins import is_plugin
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.signed_settings import LocalTraining
from dpcfl_net.data import cache
from dpcfl_net.federation.claim import composer, noisy_plans, plan_events
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.ledger.record_book import repeated


@dataclass(frozen=True)
class Candidate:
    """Settings that a search may choose.

    Attributes:
        options: Options of the algorithm.
        local: Local training.
        rounds: Number of rounds.
    """

    options: dict[str, Any]
    local: LocalTraining
    rounds: int


@dataclass(frozen=True)
class JointEpsilon:
    """Joint epsilon of trials and final run.

    Attributes:
        epsilon: Bound for a record on which all of them trained; None if none is claimed.
        delta: Its delta.
        reason: Why none is claimed; empty otherwise.
    """

    epsilon: float | None
    delta: float
    reason: str = ""


def joint_epsilon(trials: Sequence[Protocol], final: Protocol, candidates: Sequence[Candidate]) -> JointEpsilon:
    """Compute epsilon of the releases of all trials and of one final run, for a record on which all of them trained.

    The validation records are held fixed, and a score depends on the record only through models, personal ones included, and
    assignments that the plan pays for. So the choice is post-processing of the trials' outputs with respect to this record, and
    adaptive composition applies: the settings of later runs depend on earlier releases, their events do not. If a candidate changes
    the plan, the noise of later runs would depend on earlier releases, and no bound is claimed. The choice is made from
    validation records without noise: nothing is claimed for those.

    Args:
        trials: Protocols of all runs of the trials.
        final: Protocol of the final run.
        candidates: Every combination of settings that the search may try or choose.

    Returns:
        The bound by PLD, or the reason why there is none.
    """
    delta = final.privacy.delta
    protocols = [*trials, final]
    if reason := next(filter(None, map(_reason, protocols)), None) or _changing(trials[0], final, candidates):
        return JointEpsilon(None, delta, reason)
    events = repeated([(tuple(_events(protocol)), 1) for protocol in protocols])
    compose = composer(cache.folder() / "claims")
    return JointEpsilon(compose(events, delta, final.privacy.adjacency), delta)


def _reason(protocol: Protocol) -> str | None:
    """Say why the releases of a run cannot be composed with those of others here; None if they can."""
    privacy = protocol.privacy
    if is_plugin(protocol.algorithm):
        return "a score may depend on training records in ways that the plan of an algorithm of your own does not charge"
    if privacy.unit != "sample":
        return "the unit is a client, and the choice is made from all clients' validation records without noise"
    if privacy.trust != "untrusted-server":
        return f"privacy.trust is {privacy.trust}: composed for untrusted-server only"
    if protocol.unprotected:
        return protocol.unprotected[0]
    if protocol.kept_delta:
        return "local.pace is constant: a part of each run's delta is kept for cut batches"
    if len({tuple(plan_events(list(plan), z, privacy.adjacency)) for plan, z, _ in noisy_plans(algorithm_of(protocol))}) > 1:
        return "clients have different plans, and the jobs do not tell which client of another job has the same records"
    return None


def _changing(trial: Protocol, final: Protocol, candidates: Sequence[Candidate]) -> str | None:
    """Say that a tuned setting changes the plan of a trial or of the final run, or the delta for it; None if none does."""
    for protocol in (trial, final):
        plans = set()
        for candidate in candidates:
            job = protocol.model_copy(
                update={"options": candidate.options, "local": candidate.local, "rounds": candidate.rounds}
            )
            plans |= {(plan, job.kept_delta) for plan, *_ in noisy_plans(algorithm_of(job))}
        if len(plans) > 1:
            return "a tuned setting changes what a run releases, so that its noise depends on earlier releases"
    return None


def _events(protocol: Protocol) -> list[Event]:
    """Events of the plan that all clients share."""
    plan, noise_multiplier, _ = noisy_plans(algorithm_of(protocol))[0]
    return plan_events(list(plan), noise_multiplier, protocol.privacy.adjacency)
