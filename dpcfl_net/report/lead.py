"""Top of a run's page: the result in one line, and three facts of its privacy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from dpcfl_net.results.number_format import at_most, counted, number, percent
from dpcfl_net.results.privacy_statement import has_single_releases, protects_validation
from dpcfl_net.results.run_files import listed, mapping, whole
from dpcfl_net.results.run_view import RunView

SPELT = {
    "global": "Global", "local": "Local", "oracle": "Oracle", "rr-cluster": "RR-Cluster", "dp-fedavg": "DP-FedAvg",
    "dp-fedprox": "DP-FedProx", "dp-fedper": "DP-FedPer", "fedcam": "FedCAM", "feddp-kmeans": "FedDP-KMeans", "robust-hdp": "Robust-HDP",
}  # fmt: skip
PROTECTED = {"sample": "one training record of a client", "client": "all data of a client"}
WITH_VALIDATION = "one training or validation record of a client"
AGAINST = {
    "untrusted-server": "the server: each client adds noise before it sends anything",
    "trusted-server": "everybody who sees only what the server publishes, not the server, which receives raw updates and adds the noise",
    "secure-aggregation": "the server, which sees only sums over clients",
}
FIXED_SAMPLES = (
    "everybody who sees only what the server publishes: not another client, which knows if it was sampled itself, and not the server, which "
    "receives raw updates and adds the noise"
)
WITH_SINGLE_RELEASES = (
    "the server, which sees sums over clients in secure sums, and noisy releases of single clients in other rounds"
)


def result_line(view: RunView) -> str:
    """Say algorithm, accuracy, epsilon and clusters found in one line."""
    final = view.run.get("final")
    last = view.observed[max(view.observed)] if view.observed else {}
    reached = number(mapping(view.run, "final").get("accuracy_mean")) if isinstance(final, Mapping) else None
    if reached is None and view.state != "finished":
        reached = number(last.get("accuracy_mean"))
    privacy = mapping(view.run, "privacy")
    epsilon = "without a privacy statement" if "epsilon" not in privacy else f"at epsilon {_epsilon(privacy)}"
    unmeasured = "no final accuracy" if view.state == "finished" else "accuracy not measured yet"
    said = unmeasured if reached is None else percent(reached)
    parts = [f"{spelt(view.algorithm)}: {said} {epsilon}", *_clusters(view)]
    if view.state != "finished":
        done = max([whole(view.run.get("rounds_done")) or 0, *view.served])
        parts.append(f"{view.state} after {counted(done, 'round')}")
    return ", ".join(parts)


def spelt(algorithm: str) -> str:
    """Return the name of an algorithm as its paper writes it."""
    return SPELT.get(algorithm, algorithm.upper() if algorithm.isascii() and ":" not in algorithm else algorithm)


def privacy_facts(privacy: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return three pairs of label and text: what is protected, against whom, how much; none without an epsilon that holds."""
    epsilon, spent, other = (number(privacy.get(key)) for key in ("epsilon", "epsilon_spent", "epsilon_replace_one"))
    if epsilon is None or privacy.get("insecure"):
        return []
    promise = f"epsilon {at_most(epsilon)} at delta {at_most(privacy.get('delta'))}"
    if targets := mapping(privacy, "epsilon_by_client"):
        promise += f", the largest of the clients' own ({at_most(targets.get('min'))} to {at_most(targets.get('max'))})"
    if spent is not None:
        promise += (
            ", all of it spent" if at_most(spent, 3) == at_most(epsilon, 3) else f", of which {at_most(spent, 3)} is spent"
        )
    if other is not None and privacy.get("unit") == "sample":
        promise += f"; {at_most(other, 3)} if a record may be exchanged for another"
    return [("Protects", _protected(privacy)), ("Against", _against(privacy)), ("Promise", promise)]


def _protected(privacy: Mapping[str, Any]) -> str:
    if protects_validation(privacy):
        return WITH_VALIDATION
    return PROTECTED.get(str(privacy.get("unit")), "unit not stated")


def _against(privacy: Mapping[str, Any]) -> str:
    if has_single_releases(privacy):
        return WITH_SINGLE_RELEASES
    trust = str(privacy.get("trust"))
    if trust == "trusted-server" and privacy.get("client_sampling") == "fixed":
        return FIXED_SAMPLES
    return AGAINST.get(trust, "trust not stated")


def found_clusters(view: RunView) -> tuple[int, int] | None:
    """Count true clusters that the server's last assignment has exactly: (found, all); None if it is unknown."""
    true, assignment = view.true_clusters, _last_assignment(view)
    if not true or len(assignment) != len(true) or len(set(true)) < 2 or len(set(assignment)) < 2:
        return None
    groups = _groups(assignment)
    return sum(members in groups for members in _groups(true)), len(set(true))


def _groups(names: Sequence[int | None]) -> set[frozenset[int]]:
    """Clients of each name; those without a name are in no group."""
    members: defaultdict[int, list[int]] = defaultdict(list)
    for client, name in enumerate(names):
        if name is not None:
            members[name].append(client)
    return {frozenset(own) for own in members.values()}


def _last_assignment(view: RunView) -> list[int | None]:
    return [whole(item) for item in listed(view.grouping[max(view.grouping)], "assignment")] if view.grouping else []


def _clusters(view: RunView) -> list[str]:
    if (counted := found_clusters(view)) is not None:
        return [f"{counted[0]} of {counted[1]} clusters found"]
    groups = set(_last_assignment(view)) - {None}
    return [] if not groups else ["one model for all clients"] if len(groups) == 1 else [f"{len(groups)} clusters"]


def _epsilon(privacy: Mapping[str, Any]) -> str:
    found = number(privacy.get("epsilon"))
    if found is None:
        return "inf"
    return f"{at_most(found, 3)} (insecure: it does not hold)" if privacy.get("insecure") else at_most(found, 3)
