"""Noise multipliers of a job: the smallest with which each plan meets its target epsilon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import asdict

from dpcfl_net.algorithms.base import Algorithm, algorithm_of, find
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.plugins import failure, is_plugin
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.roster import Roster
from dpcfl_net.data import cache
from dpcfl_net.experiment.step_checks import step_problems
from dpcfl_net.federation.claim import NoisyPlan, noisy_plans, plan_events, plan_problem, protected, without_guarantee
from dpcfl_net.federation.plan_examples import plan_examples, plan_key
from dpcfl_net.federation.secure_claim import secure_sum_problem
from dpcfl_net.privacy.accounting.cache import cached, cost
from dpcfl_net.privacy.slots import Slot


def calibrated(protocol: Protocol, on_step: Callable[[str], None] = lambda step: None) -> Protocol:
    """Calibrate the noise multipliers of a protocol; equal plans are solved once.

    With secure sums all clients get the largest one.

    Args:
        protocol: The protocol before calibration.
        on_step: Called before the search, with its name and the number of plans; hundreds take minutes.

    Returns:
        The protocol with the noise multipliers of its clients, or of the trusted server.

    Raises:
        ConfigError: If the algorithm cannot train the model, no noise meets the target, a dataset ledger is requested without a finite
            epsilon, or the noise of secure sums is too coarse, or a plan changes between two calls, or holds a slot whose event is not
            its cost in this job or that no client step fills, or a tensor has a side without a size, or a plug-in's class raises.
    """
    algorithm = _built(protocol)
    if problem := plan_problem(algorithm):
        raise ConfigError(problem)
    if problems := step_problems(algorithm):
        raise ConfigError(problems)
    solved: dict[NoisyPlan, float | None] = {}
    reasons = without_guarantee(algorithm)
    if reasons and protocol.ledger_scope == "dataset":
        raise ConfigError(f"ledger.scope is 'dataset': {protocol.algorithm} has no finite epsilon to compose ({reasons[0]})")
    plans = list(noisy_plans(algorithm))
    target = (
        f"epsilon {protocol.privacy.epsilon:g}" if len({one.epsilon for one in plans}) < 2 else "the epsilon of each client"
    )
    on_step(f"noise multiplier for {target}" if len(plans) < 2 else f"noise multipliers of {len(plans)} plans for {target}")
    for charged in plans:
        noisy = protected(list(charged.plan))
        solved[charged] = _noise_multiplier(noisy, charged.epsilon, protocol) if noisy else None
    if protocol.privacy.central:
        (z,) = solved.values()
        return protocol.model_copy(update={"curator_noise_multiplier": z, "unprotected": reasons})
    if protocol.privacy.secure:  # the shares of a sum's noise must fit together; a larger multiplier costs less
        solved = dict.fromkeys(solved, max((z for z in solved.values() if z is not None), default=None))
    noise: dict[Hashable, float | None] = {}
    for entry in plan_examples(algorithm):
        if (charged := NoisyPlan.of(algorithm, entry)) not in solved:  # of a plugin
            raise ConfigError(
                f"{protocol.algorithm}: `plan` returned different slots for client {entry.id} when it was called again; it must depend on the "
                "signed job alone"
            )
        noise[plan_key(algorithm, entry)] = solved[charged]
    roster = [e.model_copy(update={"noise_multiplier": noise[plan_key(algorithm, e)]}) for e in protocol.roster]
    result = protocol.model_copy(update={"roster": Roster.of(roster), "unprotected": reasons})
    if problem := secure_sum_problem(algorithm_of(result)):
        raise ConfigError(problem)
    return result


def _built(protocol: Protocol) -> Algorithm:
    """Build the algorithm; ConfigError for a model that does not fit it, and for a plug-in that raises."""
    kind = find(protocol.algorithm)
    try:
        return kind(protocol)
    except ConfigError:
        raise
    except Exception as error:
        if not is_plugin(protocol.algorithm):
            raise
        raise failure("algorithm.name", protocol.algorithm, "the class", error) from error


def _noise_multiplier(plan: list[Slot], epsilon: float, protocol: Protocol) -> float:
    """Noise multiplier of a plan, cached per host; every worker's host verifies its epsilon before it reads data."""
    from dpcfl_net.privacy.accounting import accountant

    privacy, delta, folder = protocol.privacy, protocol.accounted_delta, cache.folder() / "claims"
    how = privacy.adjacency, privacy.accountant

    def solve() -> float:
        found = accountant.calibrate(lambda z: plan_events(plan, z, privacy.adjacency), epsilon, delta, *how)
        # The search ended with this epsilon: workers of this host verify the claim without computing it again.
        events = plan_events(plan, found, privacy.adjacency)
        cached(folder, cost(events, delta, *how), lambda: accountant.epsilon(events, delta, *how))
        return found

    slots = [[type(slot).__name__, *asdict(slot).values(), count] for slot, count in Counter(plan).items()]
    asked = {"noise": slots, "epsilon": epsilon, "delta": delta, "adjacency": privacy.adjacency,
             "accountant": privacy.accountant}  # fmt: skip
    try:
        z: float = cached(folder, asked, solve)
    except ValueError as error:
        raise ConfigError(f"privacy.epsilon is {epsilon}: {error}") from None
    return z
