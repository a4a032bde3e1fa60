"""The privacy statement in words, and how numbers are written: the same on the page and in the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UNITS = {
    "sample": "sample: one training record of one client",
    "client": "client: everything that one client holds",
}
ADJACENCIES = {
    "sample": {
        "zero-out": "zero-out: a record replaced by nothing; record counts are public",
        "replace-one": "replace-one: a record exchanged for another",
    },
    "client": {
        "zero-out": "zero-out: a client taken out whole (add/remove); the number of clients is public",
        "replace-one": "replace-one: a client exchanged for another",
    },
}
TRUST = {
    "untrusted-server": "untrusted server: each client adds its noise before anything leaves it",
    "trusted-server": "trusted server: it sees what clients send, raw, and adds the noise itself",
    "secure-aggregation": "secure aggregation: the server sees sums over clients only",
}
LEDGERS = {
    "run": "this run alone; other runs on the same data add to it",
    "dataset": "everything ever spent on this data",
}


@dataclass(frozen=True)
class Statement:
    """headline: one line; alerts: what must not be overlooked; facts: (label, text); covered and not: sentences."""

    headline: str
    alerts: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    covered: tuple[str, ...]
    not_covered: tuple[str, ...]


def statement(privacy: Mapping[str, Any] | None) -> Statement:
    """The statement of run.json's `privacy`. What is not stated there is never filled in with something finite."""
    if not privacy or "epsilon" not in privacy:
        unsaid = "This run states no epsilon: treat what left the clients as unprotected."
        return Statement("no privacy statement", (unsaid,), (), (), ())
    epsilon, not_covered = number(privacy.get("epsilon")), sentences(privacy.get("not_covered"))
    bound = epsilon_bound(privacy)
    unit = str(privacy.get("unit", "unit not stated"))
    headline = f"epsilon {bound}" if epsilon is None else f"epsilon {bound}, delta {plain(privacy.get('delta'))}, per {unit}"
    return Statement(
        headline,
        tuple(_alerts(privacy, epsilon)),
        tuple(_facts(privacy, bound)),
        sentences(privacy.get("covered")),
        not_covered,
    )


def epsilon_bound(privacy: Mapping[str, Any]) -> str:
    """The promised epsilon, or `inf (reason)`: the reason is the first thing that is said not to be covered."""
    epsilon = number(privacy.get("epsilon"))
    if epsilon is not None:
        return plain(epsilon)
    reasons = sentences(privacy.get("not_covered"))
    return f"inf ({reasons[0] if reasons else 'no reason stated'})"


def _alerts(privacy: Mapping[str, Any], epsilon: float | None) -> list[str]:
    alerts = []
    if insecure := privacy.get("insecure"):
        why = ", ".join(sentences(insecure)) or "its settings, such as seeded noise, let others undo the protection"
        alerts.append(f"INSECURE: {why}. For reproducing and debugging only; the epsilon does not hold.")
    alerts += [f"Audited: {said}." for said in sentences(privacy.get("audited"))]
    if epsilon is None:
        alerts.append("Unprotected: this run has no finite epsilon.")
    spent = number(privacy.get("epsilon_spent"))
    # A relative 1e-6 is far below what an accountant resolves and far above what rounding to JSON does.
    if epsilon is not None and spent is not None and spent > epsilon * (1 + 1e-6):
        alerts.append(f"Overspent: epsilon {plain(spent)} was spent, {plain(epsilon)} was promised.")
    return alerts


def _facts(privacy: Mapping[str, Any], bound: str) -> list[tuple[str, str]]:
    def words(key: str, known: Mapping[str, str]) -> str:
        value = privacy.get(key)
        return known.get(value, value) if isinstance(value, str) else "not stated"

    spent = number(privacy.get("epsilon_spent"))
    facts = [
        ("Unit", words("unit", UNITS)),
        ("Adjacency", words("adjacency", ADJACENCIES.get(str(privacy.get("unit")), ADJACENCIES["sample"]))),
        ("Trust", words("trust", TRUST)),
        ("Epsilon", bound),
        ("Epsilon spent", "not stated" if spent is None else f"{plain(spent)} by the client that spent most"),
        ("Delta", plain(privacy.get("delta"))),
        ("Accountant", str(privacy.get("accountant") or "not stated")),
        ("Noise multiplier", _noise(privacy.get("noise_multiplier"))),
        ("Epsilon under replace-one", plain(privacy.get("epsilon_replace_one"))),
        ("Ledger", words("ledger_scope", LEDGERS)),
    ]
    if (secret := number(privacy.get("epsilon_with_secret_noise"))) is not None:
        facts.append(("With secret noise", f"the same plan would promise epsilon {plain(secret)}"))
    if claim := privacy.get("claim_of_paper"):
        facts.append(("The paper's claim", ", ".join(sentences(claim))))
    return facts


def _noise(noise: Any) -> str:
    if not isinstance(noise, Mapping):
        return plain(noise)
    low, high = plain(noise.get("min")), plain(noise.get("max"))
    return low if low == high else f"{low} to {high} over the clients"


def sentences(value: Any) -> tuple[str, ...]:
    """A string, a list or a mapping of strings as a tuple of strings; anything else is nothing."""
    if isinstance(value, str):
        return (value,) if value.strip() else ()
    if isinstance(value, Mapping):
        return tuple(f"{key}: {item}" for key, item in value.items())
    if isinstance(value, Sequence):
        return tuple(str(item) for item in value)
    return (plain(value),) if number(value) is not None else ()


def number(value: Any) -> float | None:
    """A finite real number, else None: run files may hold null, NaN, or half of what was meant."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def plain(value: Any, digits: int = 4) -> str:
    """A number as a person writes it: 5, 1.269, 0.0001; a missing one is `not stated`."""
    found = number(value)
    return "not stated" if found is None else f"{found:.{digits}g}"


def percent(value: Any) -> str:
    """A share in [0, 1] as `71.2 %`; a missing one is a dash."""
    found = number(value)
    return "–" if found is None else f"{100 * found:.1f} %"


def yes(value: Any) -> str:
    """A truth value as `yes` or `no`, a count as it is, a missing one as a dash."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    found = number(value)
    return "–" if found is None else plain(found)


def size(value: Any) -> str:
    """Bytes in the largest unit that keeps the number above one."""
    found = number(value)
    if found is None:
        return "–"
    for unit in ("B", "kB", "MB"):
        if abs(found) < 1000:
            return f"{found:.0f} B" if unit == "B" else f"{found:.1f} {unit}"
        found /= 1000
    return f"{found:.2f} GB"


def duration(seconds: Any) -> str:
    """Seconds as `4.1 s`, `3:07` or `1:02:45`."""
    found = number(seconds)
    if found is None:
        return "–"
    if found < 60:
        return f"{max(found, 0):.1f} s"
    minutes, rest = divmod(round(found), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
