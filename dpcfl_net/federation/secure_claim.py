"""Conditions under which secure sums give the epsilon of Gaussian mechanisms; part of the check of a job's privacy claim."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from dpcfl_net.core.frozen import once
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.federation.capabilities import ClientSide
from dpcfl_net.federation.plan_examples import plan_examples
from dpcfl_net.privacy.secure_sum import SumCode
from dpcfl_net.privacy.slots import SecureSlot, given


def secure_divergence(algorithm: ClientSide) -> float:
    """Bound the total variation between the secure sums that a client takes part in and Gaussian mechanisms.

    Args:
        algorithm: The job's algorithm.

    Returns:
        The largest bound over the sizes of sums that the algorithm may form, see `SumCode.divergence`; 0 without secure sums.

    Raises:
        ValueError: If a sum does not fit into 32 bits, or has less noise than epsilon counts.
    """
    protocol = algorithm.protocol

    def bound() -> float:
        plans = (algorithm.plan(entry) for entry in plan_examples(algorithm))
        releases = max(sum(isinstance(slot, SecureSlot) for slot in plan) for plan in plans)
        codes = {n: code for n in range(1, len(protocol.roster) + 1) if (code := algorithm.secure_code(n)) is not None}
        if releases and (problem := _without_sums(protocol, codes) or _code_problem(protocol, codes)):
            raise ValueError(problem)
        return max((code.divergence(releases) for code in codes.values()), default=0.0)

    return once(protocol, ("secure divergence", type(algorithm)), bound) if protocol.privacy.secure else 0.0


def _without_sums(protocol: Protocol, sizes: Collection[int]) -> str:
    """Why no group of these sizes can form a secure sum; empty if one can."""
    from dpcfl_net.federation.secure import terms  # loads cryptography, which other jobs do not need here

    n, settings = len(protocol.roster), terms.settings_of(protocol.privacy)
    if any(not terms.problems(size, settings) for size in sorted(sizes)):
        return ""
    found = terms.problems(max(sizes, default=n), settings)
    return found[0] if found else f"a group of {n} clients or fewer cannot form a secure sum"


def _code_problem(protocol: Protocol, codes: Mapping[int, SumCode]) -> str:
    """Why the code of a sum of n clients does not have the noise that epsilon counts; empty without a problem."""
    from dpcfl_net.federation.secure.job_terms import honest_shares  # loads cryptography, which other jobs do not need here

    z, by_record = given(protocol.roster[0].noise_multiplier), protocol.privacy.unit == "sample"
    for n, code in codes.items():
        least, named = honest_shares(n, protocol.privacy), f"the code of a secure sum of {n} clients"
        if code.participants != n or code.honest > least:
            return (
                f"{named} has participants {code.participants} and honest {code.honest}: must be {n}, and at most {least}, the answers that "
                "a sum needs less the colluders"
            )
        if code.noise_multiplier < z:
            return f"{named} has noise_multiplier {code.noise_multiplier:g}: must be at least {z:g}, that of the roster"
        if code.rounded != by_record:
            return f"{named} has rounded {code.rounded}: must be {by_record} with privacy.unit {protocol.privacy.unit!r}"
        # A whole client's vector is clipped to the code's norm when it is encoded, a record's gradient to local.clip before.
        if by_record and code.clip < protocol.local.clip:
            return f"{named} has clip {code.clip:g}: must be at least {protocol.local.clip:g}, local.clip, to which gradients are clipped"
    return ""


def has_secret_coins(algorithm: ClientSide) -> bool:
    """Return True if epsilon counts on coins of whole clients that the server must not know.

    Args:
        algorithm: The job's algorithm.
    """
    slots = (slot for entry in plan_examples(algorithm) for slot in algorithm.plan(entry))
    return algorithm.protocol.privacy.unit == "client" and any(isinstance(slot, SecureSlot) and slot.rate < 1 for slot in slots)


def epsilon_of_reserve(algorithm: ClientSide) -> float:
    """Compute the largest epsilon for which the reserved part of delta pays (1 + e^epsilon) times `secure_divergence`.

    Args:
        algorithm: The job's algorithm.

    Returns:
        Epsilon; inf if there is nothing to pay, -inf if the reserve is too small for any.

    Raises:
        ValueError: As `secure_divergence`.
    """
    if not (eta := secure_divergence(algorithm)):
        return math.inf
    left = algorithm.protocol.secure_delta / eta - 1
    return math.log(left) if left > 0 else -math.inf


def secure_sum_problem(algorithm: ClientSide) -> str | None:
    """Find why a job's secure sums do not give the epsilon of Gaussian mechanisms with the noise multiplier of the roster.

    Args:
        algorithm: The job's algorithm.

    Returns:
        A sentence; None without a problem, and without secure sums.
    """
    protocol = algorithm.protocol
    if not protocol.privacy.secure:
        return None
    from dpcfl_net.federation.secure import terms  # loads cryptography, which other jobs do not need here

    noise = {entry.noise_multiplier for entry in protocol.roster}
    if len(noise) != 1 or None in noise:
        return f"the clients of a secure sum need one noise multiplier, the job has {sorted(map(str, noise))}"
    if found := terms.problems(len(protocol.roster), terms.settings_of(protocol.privacy)):
        return "; ".join(found)
    if protocol.local.deadline_s is None and has_secret_coins(algorithm):
        return "local.deadline_s is null: must be set for secret coins of clients, since the time of an answer would tell which clients trained"
    try:
        covered = epsilon_of_reserve(algorithm)
    except ValueError as error:
        return str(error)
    if covered >= protocol.privacy.epsilon:
        return None
    return (
        f"the noise of a secure sum is within {secure_divergence(algorithm):.3g} of a Gaussian's in total variation, which needs more "
        f"than the reserved {protocol.secure_delta:.3g} of delta at epsilon {protocol.privacy.epsilon:g}: fewer participants, smaller "
        "batches or a larger delta are needed"
    )
