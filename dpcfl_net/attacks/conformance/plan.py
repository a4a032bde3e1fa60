"""Number of calls that the checks need, and what they cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpcfl_net.attacks.conformance import canary, chances, clipping, noise, sampling
from dpcfl_net.attacks.conformance.claim import Claim
from dpcfl_net.attacks.conformance.findings import LEVEL, MISS, MOST_TESTS
from dpcfl_net.attacks.conformance.probes import columns

QUICK_MISS = 0.2
MOST_CALLS = 500
STEPS, EPOCHS = 200, 5  # of a run of a function with the option `steps`, at most one of them exceeded
_FREE_OF_HALVES = 2


@dataclass(frozen=True)
class Plan:
    """Calls of the training function.

    Attributes:
        halves: Runs of `probes.halves`.
        sizes: Runs of `probes.sizes`.
        canaries: Runs of `probes.canaries`.
        exact: 1 if a run without noise is possible, else 0.
        steps: Steps of each run.
        every: True if every step is released.
        miss: Largest probability that a check that passes overlooks the violation that it names.
        seconds: Time of one call.
    """

    halves: int
    sizes: int
    canaries: int
    exact: int
    steps: int
    every: bool
    miss: float
    seconds: float

    @property
    def calls(self) -> int:
        """Number of calls."""
        return self.halves + self.sizes + self.canaries + self.exact

    @property
    def sentence(self) -> str:
        """Cost of the plan as text."""
        released = "every step is released" if self.every else "only the end is released"
        return (
            f"{self.calls} calls of {self.steps} steps ({released}), about {_duration(self.calls * self.seconds)}: {self.halves} for "
            f"sampling and noise, {self.sizes + self.exact} for clipping, {self.canaries} for the audit. A conforming program fails with "
            f"probability below {LEVEL * MOST_TESTS:.0e}; a check that passes, except the audit, would have found its violation with "
            f"probability {1 - self.miss:.0%}."
        )


def steps_of_run(claim: Claim, selectable: bool) -> int:
    """Steps of one run: all of the claim, or fewer if the function has the option."""
    return min(claim.steps, max(STEPS, EPOCHS * claim.epoch)) if selectable else claim.steps


def plan(
    claim: Claim, steps: int, every: bool, *, quick: bool, exact: bool, most_calls: int, seconds: float, excess: float = 1.0
) -> Plan:
    """Choose the number of calls from the level of the tests.

    Args:
        claim: The claim.
        steps: Steps of each run.
        every: True if every step is released.
        quick: True for fewer calls: larger violations are found, or found with smaller probability.
        exact: True if the function can run without noise.
        most_calls: Largest number of calls; checks that get too few are undecided.
        seconds: Time of one call.
        excess: Deviation of the noise over the claimed one, as far as it is larger: batches are read through it.
    """
    miss = QUICK_MISS if quick else MISS
    halves = max(2, _noise_runs(claim, steps, every, miss))
    read = claim.model_copy(update={"noise_multiplier": claim.noise_multiplier * excess})
    for ratio, per_run in sampling.ratios(read, steps, every).values():
        halves = max(halves, math.ceil(chances.samples_for(ratio, miss) / per_run))
    if again := sampling.repeats(read, steps, every):
        correlated, pairs = again
        halves = max(halves, 2 * math.ceil(chances.pairs_for(correlated, miss) / pairs))
    sizes = 1 if exact and every else _clipping_runs(claim, steps, most_calls)
    wanted = canary.QUICK_CANARIES if quick else canary.CANARIES
    canaries = math.ceil(wanted / min(claim.records, columns(claim)))
    others = sizes + canaries + exact
    if halves + others > most_calls:
        sizes, canaries = min(sizes, max(1, most_calls // 4)), min(canaries, max(1, most_calls // 4))
        halves = max(2, most_calls - sizes - canaries - exact)
    return Plan(halves, sizes, canaries, int(exact), steps, every, miss, seconds)


def _noise_runs(claim: Claim, steps: int, every: bool, miss: float) -> int:
    per_run = (columns(claim) - _FREE_OF_HALVES) * (steps if every else 1)
    return math.ceil(chances.samples_for(noise.SMALLER**2, miss) / per_run)


def _clipping_runs(claim: Claim, steps: int, most: int) -> int:
    """Fewest runs, up to a power of two, that find a movement of EXCESS clip norms."""
    runs = 1
    while clipping.spread_of_excess(claim, runs * steps) > clipping.EXCESS - 1 and runs < most:
        runs *= 2
    return runs


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
