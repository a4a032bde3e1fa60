"""Privacy statement of a run from the protocol alone: unit, adjacency, trust, epsilon, covered and uncovered items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dpcfl_net.algorithms.base import Algorithm, algorithm_of
from dpcfl_net.core.plugins import is_plugin
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.tuning import Tuning
from dpcfl_net.data import cache
from dpcfl_net.experiment.central_statement import published, server_sees
from dpcfl_net.experiment.secure_statement import covered_by_sums, has_single_releases, not_covered_by_sums, secure_sums
from dpcfl_net.federation.capabilities import Capabilities
from dpcfl_net.federation.claim import SEEDED, NoisyPlan, noisy_plans, plan_events
from dpcfl_net.federation.secure_claim import epsilon_of_reserve
from dpcfl_net.privacy.accounting.cache import cached, cost
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.slots import CentralSlot, DPSGDSlot, GaussianSlot, SecureSlot, SelectionSlot
from dpcfl_net.training.pace import covered_epsilon

FREE_PACE = (
    "duration of tasks: the time of a step depends on the number of sampled records, and a server that knows these numbers "
    "learns more than epsilon allows"
)
CONSTANT_PACE = " (fix: local.pace: constant)"
NO_DEADLINE = (
    "duration of tasks: steps hide the number of sampled records, but answers are sent as soon as they are ready "
    "(fix: local.deadline_s)"
)
LATE = "tasks that take longer than local.deadline_s, {:g} s: their answers leave at a later multiple of it, which shows some of the time"
ROUND_TIMES = {
    "poisson": "duration of rounds, and whether a round reaches its quorum: both depend on how many clients a round samples and on which, and "
    "anyone who knows the numbers of all rounds learns more than epsilon allows",
    "fixed": "duration of rounds, and whether a round reaches its quorum: both depend on which clients a round samples",
}
SAMPLES_SHOW = {
    "poisson": "who is in the sample of a round, for those who see the traffic of the network: messages are encrypted, but only sampled "
    "clients get tasks, and epsilon counts on a secret sample",
    "fixed": "who is in the sample of a round, for those who see the traffic of the network, and for each other client: it knows if it was "
    "sampled itself, which tells about the others in a sample of fixed size, above all if they are few or it acts together with some of "
    "them, and epsilon counts on a secret sample",
}
FILES_SHOW = (
    "the run folder and its report, and what is exported or tracked of a run, which belong to the trusted server: messages and the "
    "observer's lines name the clients in the sample of each round, times and bytes tell their number, and epsilon counts on a secret sample"
)
TRANSCRIPT_HOLDS = (
    "the transcript in the run folder, which belongs to the trusted server: with output.transcript full it holds what clients sent, "
    "without noise"
)
COUNTS = (
    "number of training and validation records of each client: the job lists them, and the guarantee compares clients with "
    "equal numbers"
)
OWN_VALUES = "other noisy values that clients send: {}"
AGGREGATORS_SEE = "the same releases as aggregators receive them: aggregators belong to the untrusted server"
OTHER_RELEASES = "the other releases: their noise meets epsilon {:g} only for given outcomes of the releases without a guarantee, on which they depend"
CLUSTERS_SHOW = "the cluster of a client: epsilon covers one record, and all records of a client together determine its cluster"
NOT_DURABLE = (
    "a crash of the machine, not of a process: charges are not flushed to the disk, so that a run that continues after such a crash "
    "may release more than its ledgers say (fix: runtime.durable with runtime.federation network)"
)
BOOK_KNOWS = (
    "which records runs have in common: by them, without noise, the record book refuses a run or starts it, and computes the epsilon of all "
    "runs together"
)
OBSERVED_CLUSTERS = (
    "clusters of clients in figures and files of the observer, which is outside the protocol: they come from the loss on the clients' "
    "training records{}, without noise"
)
OBSERVED_UNNAMED = (
    "clusters of clients in figures and files of the observer, which is outside the protocol, in rounds in which the server names none: they "
    "come from the loss on the clients' training records, without noise"
)
OBSERVED_PERSONAL = (
    "figures of personal models in files of the observer, which is outside the protocol: clients compute them from models without "
    "noise, and they change after the rounds in whose sample a client was"
)
TESTED = "evaluation on test data by the observer, which is outside the protocol"
VALIDATED = (
    "evaluation on validation records by the observer, which is outside the protocol: they are records of clients, and its figures "
    "have no noise (data.evaluate)"
)
FAIRNESS = "F_acc and F_loss: they compare with models that `dpcfl compare --fairness` trained on the clients' training records without noise"
ATTACKED = (
    "results of attacks in the run folder and on its report page, which are outside the protocol: they are scored by the clients' records and "
    "true clusters, without noise, and those of `dpcfl attack invert` show records"
)
EXPORTED = (
    "personal models of clients in the folder models of the run (output.personal_models): clients trained them without noise"
)
SELECTIONS = "cluster selections"
SEARCH = "hyper-parameter search"
NOT_COVERED = [
    "floating-point effects beyond the stated noise grid (epsilon assumes real arithmetic; Mironov 2012)",
    SEARCH,
    TESTED,
    "copies of a record in one client or several, or in overlapping windows of a text: the guarantee covers one client's slice, or one record of it",
]


def privacy_statement(protocol: Protocol, replace_one: float | None) -> dict[str, Any]:
    """Create the statement that every run prints.

    Args:
        protocol: The job's protocol.
        replace_one: Epsilon under replacement (`replace_one_epsilon`).

    Returns:
        Fields of the statement; `epsilon` is the largest of a client, None without a guarantee. `secure_sums` is there with secure
        sums only, `epsilon_by_client` if clients have different targets, `validation_records` if validation records are protected,
        and `client_sampling` if a trusted server samples clients.
    """
    algorithm, privacy = algorithm_of(protocol), protocol.privacy
    able, charged = algorithm.capabilities, noisy_plans(algorithm)
    z = [plan.noise_multiplier for plan in charged if plan.noise_multiplier is not None]
    targets = {plan.epsilon for plan in charged}
    sums = secure_sums(algorithm) if privacy.secure else None
    covered, not_covered = _covered(algorithm), _not_covered(algorithm)
    validation = any(entry.validation_records for entry in protocol.roster)
    if sums is not None:
        covered, not_covered = [*covered_by_sums(sums), *covered], [*not_covered_by_sums(sums), *not_covered]
    if protocol.unprotected:
        covered, given = [], []
        # A trusted server's z is that of the published claim, which does not hold.
        if z and privacy.noise == "os" and not privacy.central:
            given = [OTHER_RELEASES.format(protocol.epsilon)]
        not_covered = [*protocol.unprotected, *given, *not_covered]
    not_covered += _not_covered_elsewhere(algorithm)
    return {
        "unit": privacy.unit,
        "adjacency": privacy.adjacency,
        "trust": privacy.trust,
        "epsilon": None if protocol.unprotected else protocol.epsilon,
        # Epsilon of the same plan with noise from the operating system; not a claim of this run.
        "epsilon_with_secret_noise": protocol.epsilon if protocol.unprotected == [SEEDED] else None,
        "delta": privacy.delta,
        "accountant": privacy.accountant,
        "noise_multiplier": {"min": min(z), "max": max(z)} if z else None,
        "epsilon_spent": 0.0,
        "epsilon_replace_one": replace_one,
        "claim_of_paper": able.claim_of_paper,
        "ledger_scope": protocol.ledger_scope,
        "covered": covered,
        "not_covered": not_covered,
        "insecure": privacy.noise == "seeded",
        **({} if len(targets) == 1 else {"epsilon_by_client": {"min": min(targets), "max": max(targets)}}),
        **({} if sums is None else {"secure_sums": sums}),
        **({"participations": able.participations} if able.participations else {}),
        **({"client_sampling": sampled[0]} if (sampled := client_sampling(charged)) else {}),
        **({"validation_records": True} if validation and privacy.unit == "sample" else {}),
    }


def _covered(algorithm: Algorithm) -> list[str]:
    """List the releases that epsilon covers; secure sums are listed elsewhere."""
    protocol, able = algorithm.protocol, algorithm.capabilities
    if protocol.privacy.central:
        return [published(algorithm)]
    covered = [] if protocol.privacy.secure and not has_single_releases(algorithm) else list(able.covers)
    if any(isinstance(slot, SelectionSlot) for each in noisy_plans(algorithm) for slot in each.plan):
        covered.append(SELECTIONS)
    if is_plugin(protocol.algorithm) and able.covers == Capabilities.covers and protocol.privacy.unit == "sample":
        # Noise on whole updates (unit client) has the same type of slot.
        slots = (slot for each in noisy_plans(algorithm) for slot in each.plan if isinstance(slot, GaussianSlot))
        if named := ", ".join(dict.fromkeys(slot.name for slot in slots)):
            covered.append(OWN_VALUES.format(named))
    if protocol.aggregators:
        covered.append(AGGREGATORS_SEE)
    return covered


def _not_covered(algorithm: Algorithm) -> list[str]:
    """List what releases and their times reveal beyond epsilon; secure sums and releases without a guarantee are listed elsewhere."""
    protocol, able, charged = algorithm.protocol, algorithm.capabilities, noisy_plans(algorithm)
    by_client, not_covered = protocol.privacy.unit == "client", [*able.caveats, *NOT_COVERED]
    if protocol.tuning is not None:
        not_covered[not_covered.index(SEARCH)] = tuning_sentence(protocol.tuning, protocol.algorithm)
    if observer_assigns(algorithm):
        sent = "" if protocol.privacy.secure else " and from the labels or losses that clients send"
        not_covered.append(OBSERVED_CLUSTERS.format(sent) if by_client else OBSERVED_UNNAMED)
    if able.personal and able.plain_sgd:
        not_covered.append(OBSERVED_PERSONAL)
    if by_client:
        not_covered.append(COUNTS)
    elif protocol.local.pace == "free" and (not able.plain_sgd or _samples_records(charged)):
        # Secure sums take no padded batches.
        not_covered.append(FREE_PACE + ("" if protocol.privacy.secure else CONSTANT_PACE))
    elif not able.plain_sgd:
        deadline_s = protocol.local.deadline_s
        not_covered.append(NO_DEADLINE if deadline_s is None else LATE.format(deadline_s))
    smallest = len(protocol.roster) if by_client else min(entry.records for entry in protocol.roster)
    if protocol.privacy.delta >= 1 / smallest:
        what, count = ("clients", "n") if by_client else ("records", "N")
        warning = f"it allows a few {what} to be revealed completely"
        not_covered.append(f"delta is {protocol.privacy.delta:g}, not below 1/{count} = {1 / smallest:g}: {warning}")
    if protocol.privacy.central:
        not_covered.insert(0, server_sees(algorithm))
        sampled = client_sampling(charged)
        not_covered += [said[sampling] for sampling in sampled for said in (SAMPLES_SHOW, ROUND_TIMES)]
        not_covered += [*([FILES_SHOW] if sampled else []), TRANSCRIPT_HOLDS]
    return not_covered


def observer_assigns(algorithm: Algorithm) -> bool:
    """Return True if the observer assigns clients by the loss on their training records where the server names no cluster.

    Algorithms of this package that protect records name the clusters; one of a user's own may leave that to the observer.

    Args:
        algorithm: The job's algorithm.
    """
    protocol, able = algorithm.protocol, algorithm.capabilities
    left_open = protocol.privacy.unit == "client" or is_plugin(protocol.algorithm)
    return able.published_models - able.shared_models > 1 and protocol.oracle is None and left_open


def client_sampling(charged: Sequence[NoisyPlan]) -> list[str]:
    """List the ways in which a trusted server draws clients for its rounds, "fixed" first; empty if all clients are in each.

    Args:
        charged: Plans that are charged for the run.
    """
    central = (slot for each in charged for slot in each.plan if isinstance(slot, CentralSlot))
    return sorted({slot.sampling for slot in central if slot.sample_size < slot.population})


def _samples_records(charged: Sequence[NoisyPlan]) -> bool:
    """Return True if a step of a plan draws a secret batch of records, also under an algorithm that says it runs plain SGD."""
    return any(isinstance(slot, DPSGDSlot | SecureSlot) and slot.rate < 1 for each in charged for slot in each.plan)


def _not_covered_elsewhere(algorithm: Algorithm) -> list[str]:
    """List what epsilon does not cover apart from releases: code of plugins, the record book, the network, and clusters."""
    protocol, found = algorithm.protocol, list[str]()
    for own in filter(is_plugin, (protocol.algorithm, protocol.model.name)):
        found.append(f"any other use of the records by the code of {own} in the client's process")
    if protocol.privacy.central and is_plugin(protocol.algorithm):
        found.append(
            f"any other use of raw releases by the code of {protocol.algorithm} in the server's process: epsilon covers what its central "
            "steps add noise to"
        )
    if protocol.ledger_scope == "dataset":
        found.append(BOOK_KNOWS)
    if protocol.security == "none":
        found.append("the network: messages on loopback are not encrypted")
    if protocol.oracle is not None:
        found.append("cluster membership: the job lists the oracle's true clusters")
    elif protocol.privacy.unit != "client" and algorithm.capabilities.published_models > 1:
        found.append(CLUSTERS_SHOW)
    return found


def tuning_sentence(tuning: Tuning, algorithm: str) -> str:
    """Describe the search for a job's settings, and what no epsilon covers in it.

    Args:
        tuning: Tuning of the job.
        algorithm: The job's algorithm.
    """
    settings = "; ".join(f"{key} of {', '.join(map(str, values))}" for key, values in tuning.settings.items())
    seeds = "" if len(tuning.seeds) == 1 else f" with {len(tuning.seeds)} seeds each"
    aside = f"{100 * tuning.validation:g} % of the training records" + (
        "" if len(tuning.seeds) == 1 else ", others with each seed"
    )
    others = len(tuning.algorithms) - 1
    each = "one other algorithm" if others == 1 else f"each of {others} other algorithms"
    beside = f", and as many of {each}" if others else ""
    return (
        f"{SEARCH}: {tuning.trials} trials of {algorithm}{seeds} on the same records{beside} ({tuning.search} search over {settings}); "
        "epsilon is that of this run alone, and the releases of every trial add to it. The best trial was chosen by "
        f"{tuning.score} on validation records ({aside}), without noise: no epsilon covers "
        "what the choice tells about them"
    )


def replace_one_epsilon(protocol: Protocol) -> float | None:
    """Compute the largest client's epsilon of the run under replacement of a record (or client), by PLD.

    Args:
        protocol: The job's protocol.

    Returns:
        Epsilon; None if it is infinite, or if delta is smaller than PLD resolves.
    """
    from dpcfl_net.privacy.accounting import accountant

    algorithm = algorithm_of(protocol)
    charged = noisy_plans(algorithm)
    plans = [plan_events(list(plan), z, "replace-one") for plan, z, _ in charged if z is not None]
    if protocol.unprotected:
        sound, noise = algorithm.capabilities.sound_events, protocol.curator_noise_multiplier
        # Seeded noise hides nothing, whatever is released.
        plans = [] if sound is None or noise is None or SEEDED in protocol.unprotected else [sound(noise)]
    delta = protocol.accounted_delta

    def spent(events: list[Event]) -> float:
        """Epsilon of a client's events, cached per host."""
        question = cost(events, delta, "replace-one", "pld")
        try:
            value: float | None = cached(
                cache.folder() / "claims", question, lambda: accountant.epsilon(events, delta, adjacency="replace-one")
            )
        except ValueError:  # a delta that PLD does not resolve, in a run whose accountant is "rdp"
            return math.inf
        return math.inf if value is None else value  # JSON holds infinity as null

    largest = max(map(spent, plans), default=math.inf)
    covered = min(covered_epsilon(plan.epsilon) for plan in charged) if protocol.kept_delta else math.inf
    covered = min(covered, epsilon_of_reserve(algorithm))
    return largest if math.isfinite(largest) and largest <= covered else None
