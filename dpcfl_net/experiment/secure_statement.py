"""Part of the privacy statement about secure sums: their terms, and conditions under which epsilon holds."""

from __future__ import annotations

from typing import Any

from dpcfl_net.algorithms.base import Algorithm
from dpcfl_net.federation.plan_examples import plan_examples
from dpcfl_net.federation.secure_claim import has_secret_coins
from dpcfl_net.privacy.slots import SecureSlot, StageSlot

SERVER_SEES = (
    "what the server receives in a secure sum, also if it deviates from the protocol: keys, encrypted shares, masked vectors of single "
    "clients, and sums of at least {needed} of them"
)
CRYPTOGRAPHY = (
    "a break of the cryptography: masks and encrypted shares are computationally secure (X25519, AES, SHA-256, Ed25519)"
)
COLLUDERS = (
    "more than {colluders} participants of a sum together, with the server or with nothing but the models that they get: they know "
    "their masks and their shares of the noise"
)
NO_COLLUDERS = (
    "the participants of a sum: each knows its own share of the noise and gets models that show the sum, so that epsilon holds against "
    "one of them only if more answer than must (fix: privacy.secure_aggregation.colluders: 1)"
)
WRONG_SUMS = "the correctness of a sum: a malicious client can change it"
VISIBLE = "the participants of a secure sum: the server names them"
SECRET = (
    "drop-outs and delays that depend on a client's secret coin: a client sends in every round, and its coin decides if its vector is "
    "zero. Answers leave at deadlines, but a client that trains acknowledges messages milliseconds later, which a server that sends many "
    "of them can measure"
)
OBSERVED_TIMES = (
    "durations of tasks in files of the observer, which is outside the protocol: they tell which clients were in the sample of a "
    "round"
)


def secure_sums(algorithm: Algorithm) -> dict[str, Any]:
    """Describe the secure sums of a job.

    Args:
        algorithm: The job's algorithm; `privacy.trust` is secure-aggregation.

    Returns:
        `participants` and `answers` (those needed), each with `min` and `max` over the sizes of sums that may be formed;
        `colluders`; `participation`: "secret coins" or "visible"; and `single_releases`, as `has_single_releases`.
    """
    protocol = algorithm.protocol
    terms = protocol.privacy.secure_aggregation
    assert terms is not None  # a protocol with this trust has them
    sizes = {n: code.honest + terms.colluders for n in range(1, len(protocol.roster) + 1) if (code := algorithm.secure_code(n))}
    return {
        "participants": {"min": min(sizes), "max": max(sizes)},
        "answers": {"min": min(sizes.values()), "max": max(sizes.values())},
        "colluders": terms.colluders,
        "participation": "secret coins" if has_secret_coins(algorithm) else "visible",
        "single_releases": has_single_releases(algorithm),
    }


def has_single_releases(algorithm: Algorithm) -> bool:
    """Return True if the server also receives releases of single clients without masks, as in the rounds before secure sums.

    Args:
        algorithm: The job's algorithm; `privacy.trust` is secure-aggregation.
    """
    slots = (slot for entry in plan_examples(algorithm) for slot in algorithm.plan(entry))
    return any(not isinstance(slot, SecureSlot | StageSlot) for slot in slots)


def covered_by_sums(sums: dict[str, Any]) -> list[str]:
    """List what epsilon covers in secure sums; `sums` as from `secure_sums`."""
    return [SERVER_SEES.format(needed=sums["answers"]["min"])]


def not_covered_by_sums(sums: dict[str, Any]) -> list[str]:
    """List what epsilon does not cover in secure sums; `sums` as from `secure_sums`."""
    participation = [SECRET, OBSERVED_TIMES] if sums["participation"] == "secret coins" else [VISIBLE]
    insiders = COLLUDERS.format(colluders=sums["colluders"]) if sums["colluders"] else NO_COLLUDERS
    return [insiders, CRYPTOGRAPHY, *participation, WRONG_SUMS]
