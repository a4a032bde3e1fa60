"""Privacy statement of a run as text: the same on pages and in the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpcfl_net.results.number_format import at_most, number, plain

UNITS = {
    "sample": "sample: one training record of one client",
    "client": "client: all data of one client",
}
WITH_VALIDATION = "sample: one training or validation record of one client"
ADJACENCIES = {
    "sample": {
        "zero-out": "zero-out: a record replaced by an empty one; record counts are public",
        "replace-one": "replace-one: a record exchanged for another",
    },
    "client": {
        "zero-out": "zero-out: all that a client adds to releases left out; which clients the job has is public, since it lists them",
        "replace-one": "replace-one: all data of a client exchanged for those of another; which clients the job has is public, since it lists "
        "them",
    },
}
WITH_PARTICIPATIONS = {
    "zero-out": "zero-out: all updates of a client replaced by zeros; when it takes part is public",
    "replace-one": "replace-one: all updates of a client exchanged for others; when it takes part is public",
}
WITH_SUMS = {
    "zero-out": "zero-out: all vectors of a client replaced by zeros; which clients the job has is public, since each of them sends",
    "replace-one": "replace-one: all vectors of a client exchanged for others; which clients the job has is public, since each of them sends",
}
TRUST = {
    "untrusted-server": "untrusted server: each client adds noise before it sends anything",
    "trusted-server": "trusted server: it receives raw updates and adds the noise",
    "secure-aggregation": "secure aggregation: the server learns sums of masked vectors over clients, with noise of all of them; it may deviate "
    "from the protocol",
}
WITHOUT_NOISE = "untrusted server: it receives releases to which clients add no noise"
WITH_SINGLE_RELEASES = (
    "secure aggregation: in secure sums the server learns sums of masked vectors over clients, with noise of all of them, and in other rounds "
    "it receives releases of single clients, to which each client adds noise; it may deviate from the protocol"
)
PARTICIPATION = {
    "secret coins": "secret: each client sends in every round, and only it knows if its vector is zero",
    "visible": "visible: the server names the participants of a sum",
}
NO_PROMISE = "no promise, since releases may decide when a run ends; epsilon holds for any end"
LEDGERS = {
    "run": "this run only; other runs on the same data add to the total",
    "dataset": "all runs on this data in one record book together; runs without the book add to the total, and a record whose numbers have "
    "changed counts as another record",
}


@dataclass(frozen=True)
class Statement:
    """Privacy statement of a run.

    Attributes:
        headline: Epsilon, delta and unit in one line.
        alerts: Warnings that every page shows: insecure settings, no finite epsilon, overspending.
        facts: Pairs of label and text.
        covered: What the epsilon covers, one sentence per item.
        not_covered: What it does not cover, one sentence per item.
    """

    headline: str
    alerts: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    covered: tuple[str, ...]
    not_covered: tuple[str, ...]


def statement(privacy: Mapping[str, Any] | None) -> Statement:
    """Build the statement from the privacy section of run.json.

    Args:
        privacy: The section; None or a section without `epsilon` gives a statement without privacy.

    Returns:
        The statement; a missing value is "not stated" and never replaced by a finite one.
    """
    if not privacy or "epsilon" not in privacy:
        unsaid = "This run states no epsilon: treat everything that left the clients as unprotected."
        return Statement("no privacy statement", (unsaid,), (), (), ())
    epsilon, not_covered = number(privacy.get("epsilon")), sentences(privacy.get("not_covered"))
    bound = epsilon_bound(privacy)
    unit = str(privacy.get("unit", "unit not stated"))
    headline = f"epsilon {bound}" if epsilon is None else f"epsilon {bound}, delta {at_most(privacy.get('delta'))}, per {unit}"
    return Statement(
        headline,
        tuple(_alerts(privacy, epsilon)),
        tuple(_facts(privacy, bound)),
        sentences(privacy.get("covered")),
        not_covered,
    )


def statement_text(said: Statement) -> str:
    """Format a whole statement as plain text."""
    lines = [f"Privacy: {said.headline}", *(f"! {alert}" for alert in said.alerts), ""]
    lines += [f"{label}: {text}" for label, text in said.facts]
    for title, items in (("Covered", said.covered), ("Not covered", said.not_covered)):
        lines += ["", f"{title}:", *(f"- {item}" for item in items)] if items else []
    return "\n".join(lines) + "\n"


def has_single_releases(privacy: Mapping[str, Any]) -> bool:
    """Return True if a server without trust receives releases of single clients besides secure sums, as before the first sum.

    Args:
        privacy: As for `statement`; a run of an earlier version does not say it.
    """
    sums = privacy.get("secure_sums")
    return isinstance(sums, Mapping) and sums.get("single_releases") is True


def protects_validation(privacy: Mapping[str, Any]) -> bool:
    """Return True if clients hold validation records, each of which epsilon protects like a training record.

    Args:
        privacy: As for `statement`; a run of an earlier version does not say it.
    """
    return privacy.get("unit") == "sample" and privacy.get("validation_records") is True


def hides_participation(privacy: Mapping[str, Any]) -> bool:
    """Return True if epsilon also covers in which rounds a client took part, False if that is public.

    Args:
        privacy: As for `statement`.
    """
    if isinstance(sums := privacy.get("secure_sums"), Mapping):
        return sums.get("participation") == "secret coins"
    central = privacy.get("unit") == "client" and privacy.get("trust") == "trusted-server"
    return central and number(privacy.get("participations")) is None


def _unusual_trust(privacy: Mapping[str, Any]) -> str:
    """Say what the server receives where that of its trust is not all; empty if it is."""
    if has_single_releases(privacy):
        return WITH_SINGLE_RELEASES
    # Seeded noise alone is noise: then the epsilon that it would have if it were secret is there.
    raw = privacy.get("epsilon") is None and privacy.get("epsilon_with_secret_noise", math.inf) is None
    return WITHOUT_NOISE if raw and privacy.get("trust") == "untrusted-server" else ""


def epsilon_bound(privacy: Mapping[str, Any]) -> str:
    """Format the promised epsilon, or `inf (reason)` with the first sentence of `not_covered` as reason."""
    epsilon = number(privacy.get("epsilon"))
    if epsilon is not None:
        return at_most(epsilon)
    reasons = sentences(privacy.get("not_covered"))
    return f"inf ({reasons[0] if reasons else 'no reason stated'})"


def _alerts(privacy: Mapping[str, Any], epsilon: float | None) -> list[str]:
    alerts = []
    if insecure := privacy.get("insecure"):
        why = ", ".join(sentences(insecure)) or "its settings, such as seeded noise, allow others to remove the noise"
        alerts.append(f"INSECURE: {why}. For reproducing and debugging only; the epsilon does not hold.")
    alerts += [f"Audited: {said}." for said in sentences(privacy.get("audited"))]
    if epsilon is None:
        alerts.append("Unprotected: this run has no finite epsilon.")
    spent = number(privacy.get("epsilon_spent"))
    # A relative 1e-6 is far below what an accountant resolves and far above what rounding to JSON does.
    if epsilon is not None and spent is not None and spent > epsilon * (1 + 1e-6):
        alerts.append(f"Overspent: epsilon {at_most(spent)} was spent, {plain(epsilon)} was promised.")
    return alerts


def _facts(privacy: Mapping[str, Any], bound: str) -> list[tuple[str, str]]:
    def words(key: str, known: Mapping[str, str]) -> str:
        value = privacy.get(key)
        return known.get(value, value) if isinstance(value, str) else "not stated"

    spent, participations = number(privacy.get("epsilon_spent")), number(privacy.get("participations"))
    adjacencies = ADJACENCIES.get(str(privacy.get("unit")), ADJACENCIES["sample"])
    if adjacencies is ADJACENCIES["client"] and privacy.get("trust") == "secure-aggregation":
        adjacencies = WITH_SUMS
    facts = [
        ("Unit", WITH_VALIDATION if protects_validation(privacy) else words("unit", UNITS)),
        ("Adjacency", words("adjacency", adjacencies if participations is None else WITH_PARTICIPATIONS)),
        ("Trust", _unusual_trust(privacy) or words("trust", TRUST)),
        ("Epsilon", bound),
        ("Epsilon spent", _spent(spent, number(privacy.get("epsilon")))),
        ("Delta", at_most(privacy.get("delta"))),
        ("Accountant", str(privacy.get("accountant") or "not stated")),
        ("Noise multiplier", _noise(privacy.get("noise_multiplier"))),
        ("Epsilon under replace-one", at_most(privacy.get("epsilon_replace_one"))),
        ("Ledger", words("ledger_scope", LEDGERS)),
    ]
    if isinstance(targets := privacy.get("epsilon_by_client"), Mapping) and number(privacy.get("epsilon")) is not None:
        ends = f"{at_most(targets.get('min'))} to {at_most(targets.get('max'))}"
        facts.insert(4, ("Epsilon by client", f"{ends}: clients have different targets, in protocol.json"))
    if isinstance(sums := privacy.get("secure_sums"), Mapping):
        facts += [
            (
                "Secure sums",
                f"{_range(sums.get('participants'))} participants, of whom {_range(sums.get('answers'))} must answer",
            ),
            ("Colluders", f"at most {plain(sums.get('colluders'))} participants of a sum work with the server"),
            ("Participation", PARTICIPATION.get(str(sums.get("participation")), "not stated")),
        ]
    if (secret := number(privacy.get("epsilon_with_secret_noise"))) is not None:
        facts.append(("With secret noise", f"the same plan would promise epsilon {at_most(secret)}"))
    if participations is not None:
        facts.append(("Participations", f"at most {plain(participations)} of each client, without amplification by sampling"))
    if claim := privacy.get("claim_of_paper"):
        facts.append(("The paper's claim", ", ".join(sentences(claim))))
    return facts


def _spent(spent: float | None, promised: float | None) -> str:
    """Format epsilon of the charges; below the promised one it is no promise, since earlier releases may decide when a run ends."""
    if spent is None:
        return "not stated"
    said = f"{at_most(spent)} (largest over the clients)"
    return said if promised is None or spent >= promised * (1 - 1e-3) else f"{said}; {NO_PROMISE}"


def _noise(noise: Any) -> str:
    text = _range(noise)
    return f"{text} over the clients" if " to " in text else text


def _range(value: Any) -> str:
    if not isinstance(value, Mapping):
        return plain(value)
    low, high = plain(value.get("min")), plain(value.get("max"))
    return low if low == high else f"{low} to {high}"


def sentences(value: Any) -> tuple[str, ...]:
    """Return a string, a sequence, a mapping or a number as a tuple of strings; empty for anything else."""
    if isinstance(value, str):
        return (value,) if value.strip() else ()
    if isinstance(value, Mapping):
        return tuple(f"{key}: {item}" for key, item in value.items())
    if isinstance(value, Sequence):
        return tuple(str(item) for item in value)
    return (plain(value),) if number(value) is not None else ()
