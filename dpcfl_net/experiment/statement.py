"""The privacy statement: what a run promises, to whom, and what it does not; all of it from the protocol alone."""

from __future__ import annotations

import math
from typing import Any

from dpcfl_net.algorithms.base import algorithm_of
from dpcfl_net.core.plugins import is_plugin
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.data import cache
from dpcfl_net.federation.claim import SEEDED, noisy_plans, plan_events
from dpcfl_net.privacy.accounting.cache import cached, cost
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.training.pace import covered_epsilon

FREE_PACE = (
    "how long tasks take: the time of a step follows how many records were drawn, and a server that saw every count exactly would "
    "have more than epsilon (local.pace: constant)"
)
NO_DEADLINE = "how long tasks take beside the number of records drawn, which steps hide: answers leave when they are ready (local.deadline_s)"
COUNTS = "how many records each client has, training and validation: they stand in the job, and the promise is between clients of equal counts"
SERVER_SEES = "anything against the server itself: it is trusted, and sees every sampled client's update and cluster identifier as they are"
CLUSTERS_SHOW = (
    "which cluster a client belongs to: epsilon is of one record, and all of a client's records together speak for its cluster"
)
NOT_COVERED = [
    "floating-point effects beyond the stated noise grid (epsilon assumes real arithmetic; Mironov 2012)",
    "the search for hyper-parameters",
    "evaluation on test data by the observer, which is outside the protocol",
    "the same source image in several clients: the guarantee is for a client's own slice",
]


def privacy_statement(protocol: Protocol, replace_one: float | None) -> dict[str, Any]:
    """The statement that every run prints: unit, adjacency, trust, numbers, what is covered and what is not."""
    algorithm, by_client = algorithm_of(protocol), protocol.privacy.unit == "client"
    z = [noise for noise in noisy_plans(algorithm).values() if noise is not None]
    least = len(protocol.roster) if by_client else min(entry.records for entry in protocol.roster)
    covered, not_covered = list(algorithm.covers), [*algorithm.caveats, *NOT_COVERED]
    if by_client:
        not_covered.append(COUNTS)
    elif not algorithm.plain_sgd(algorithm.options, protocol.privacy) and protocol.local.deadline_s is None:
        not_covered.append(FREE_PACE if protocol.local.pace == "free" else NO_DEADLINE)
    if protocol.privacy.delta >= 1 / least:
        what, count = ("clients", "n") if by_client else ("records", "N")
        warning = f"it allows a few {what} to be given away whole"
        not_covered.append(f"delta is {protocol.privacy.delta:g}, not below 1/{count} = {1 / least:g}: {warning}")
    if protocol.privacy.trust == "trusted-server":
        covered = ["what the server publishes each round: noisy sums of clipped updates, and labels where they are released"]
        not_covered.insert(0, SERVER_SEES)
    if protocol.unprotected:
        covered, given = [], []
        if z and protocol.privacy.noise == "os":
            given = [f"the rest of the releases: their noise is that of epsilon {protocol.privacy.epsilon:g} by themselves"]
        not_covered = [*protocol.unprotected, *given, *not_covered]
    for own in filter(is_plugin, (protocol.algorithm, protocol.model.name)):
        not_covered.append(f"what the code of {own} does with the records besides, in the client's process")
    if protocol.security == "none":
        not_covered.append("the network: messages travel in clear on loopback")
    if protocol.oracle is not None:
        not_covered.append("cluster membership: the oracle's true clusters stand in the job in plain sight")
    elif not by_client and algorithm.max_models > 1:
        not_covered.append(CLUSTERS_SHOW)
    privacy = protocol.privacy
    return {
        "unit": privacy.unit,
        "adjacency": privacy.adjacency,
        "trust": privacy.trust,
        "epsilon": None if protocol.unprotected else privacy.epsilon,
        # What the same plan promises with noise from the operating system; never a claim of this run.
        "epsilon_with_secret_noise": privacy.epsilon if protocol.unprotected == [SEEDED] else None,
        "delta": privacy.delta,
        "accountant": privacy.accountant,
        "noise_multiplier": {"min": min(z), "max": max(z)} if z else None,
        "epsilon_spent": 0.0,
        "epsilon_replace_one": replace_one,
        "claim_of_paper": algorithm.claim_of_paper,
        "ledger_scope": protocol.ledger_scope,
        "covered": covered,
        "not_covered": not_covered,
        "insecure": privacy.noise == "seeded",
    }


def replace_one_epsilon(protocol: Protocol) -> float | None:
    """The largest client's epsilon of the same run under replacement of a record (or client), by PLD; None if it is infinite."""
    from dpcfl_net.privacy.accounting import accountant

    algorithm = algorithm_of(protocol)
    plans = [plan_events(list(plan), z, "replace-one") for plan, z in noisy_plans(algorithm).items() if z is not None]
    if protocol.unprotected:
        sound = algorithm.sound_events()
        plans = [] if sound is None else [sound]
    delta = protocol.accounted_delta

    def spent(events: list[Event]) -> float:
        """Solved once on a host, as noise is."""
        question = cost(events, delta, "replace-one", "pld")
        found: float | None = cached(
            cache.folder() / "claims", question, lambda: accountant.epsilon(events, delta, adjacency="replace-one")
        )
        return math.inf if found is None else found  # a worker that asks the same keeps infinity as null

    found = max(map(spent, plans), default=math.inf)
    covered = covered_epsilon(protocol.privacy.epsilon) if protocol.kept_delta else math.inf
    return found if math.isfinite(found) and found <= covered else None
