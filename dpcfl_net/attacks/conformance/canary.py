"""Canary audit of a foreign training function: a lower bound on epsilon, with the tests of `dpcfl audit`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dpcfl_net.attacks.audit import scores
from dpcfl_net.attacks.audit.bounds import TradeOff
from dpcfl_net.attacks.audit.gather import EVERY_STEP, LIKELIHOOD, Scores
from dpcfl_net.attacks.audit.judgement import ALPHA, Bounds, judge
from dpcfl_net.attacks.conformance.accounting import mechanism, provable
from dpcfl_net.attacks.conformance.claim import Claim
from dpcfl_net.attacks.conformance.findings import FAIL, LEVEL, PASS, Check, Finding
from dpcfl_net.attacks.conformance.probes import CanaryProbe

NAME = "audit"
CANARIES, QUICK_CANARIES = 2000, 400
_TESTS = 4
_BOUNDS = 3  # whose largest is shown


def check(claim: Claim, probes: Sequence[CanaryProbe], releases: np.ndarray, steps: int, epsilon: float) -> Check:
    """Audit the function.

    Args:
        claim: The claim.
        probes: Canaries of each run.
        releases: Their releases, (runs, rows, m), in clip norms.
        steps: Steps of a run.
        epsilon: Epsilon of a run of so many steps, as claimed.
    """
    bits = np.concatenate([probe.bits for probe in probes])
    nominal = _nominal(claim, steps)
    observed = [_scores(claim, bits, releases, steps)]
    (found,) = judge(observed, nominal, epsilon, claim.delta, _TESTS * LEVEL, ALPHA / _BOUNDS)
    lower, by = _largest(found)
    said = f"epsilon {epsilon:.4g} at delta {claim.delta:g}" + ("" if steps == claim.steps else f" for {steps} steps")
    ins = f"{bits.size} canaries, {int(bits.sum())} in"
    measured = f"Measured: at least {lower:.3g} at {1 - ALPHA:.0%} confidence by {by} ({ins})."
    if found.broken:
        # Only guesses refute the number; all other tests refute the curve of batches and noise, and a claim may be far above it.
        more = said if "guesses" in found.broken else (
            f"the claimed batches and noise, for which epsilon {provable(claim, steps, claim.pair):.4g} is provable"
        )  # fmt: skip
        sentence = f"The releases reveal more than {more}: broken by {', '.join(found.broken)}. {measured}"
    else:
        sentence = f"{said[0].upper()}{said[1:]} is not refuted. {measured}"
        if lower > epsilon:
            sentence += (
                f" That is above the claim, but no test refutes it at a false-alarm rate of {LEVEL:g}: use more canaries."
            )
    level = _TESTS * LEVEL
    finding = Finding("broken tests of the audit", len(found.broken), None, 0, level)
    return Check(
        NAME,
        FAIL if found.broken else PASS,
        lower,
        f"lower bound on epsilon: at most {epsilon:.4g}",
        level,
        sentence,
        (finding,),
    )


def _largest(found: Bounds) -> tuple[float, str]:
    """The largest lower bound, and its name."""
    bounds = [(found.gdp, "mu-GDP"), (found.tail or 0.0, "tail"), (found.guesses, "guesses")]
    return max(bounds, key=lambda bound: bound[0])


@lru_cache(maxsize=8)  # Several functions may be checked against one claim.
def _nominal(claim: Claim, steps: int) -> TradeOff:
    return TradeOff.of_adjacency(*mechanism(claim, steps, claim.pair))


def _scores(claim: Claim, bits: np.ndarray, releases: np.ndarray, steps: int) -> Scores:
    """Scores of all canaries; totals and squares, for tail and noise, only where a canary that is out is an empty slot."""
    per_row = steps // releases.shape[1]
    values = releases.transpose(1, 0, 2).reshape(releases.shape[1], -1)
    deviation = _deviation(claim, values, per_row)
    score = scores.likelihood(values.ravel(), per_row, claim.rate, deviation).reshape(values.shape).sum(0)
    z = claim.noise_multiplier
    if claim.pair == "replace-one":
        opposite = scores.likelihood(-values.ravel(), per_row, claim.rate, deviation).reshape(values.shape).sum(0)
        return Scores(EVERY_STEP, LIKELIHOOD, score - opposite, bits)
    totals, squares = values.sum(0) / (z * math.sqrt(steps)), (values**2).sum(0) / (per_row * z**2)
    return Scores(EVERY_STEP, LIKELIHOOD, score, bits, totals, squares, np.full(bits.size, len(values)))


def _deviation(claim: Claim, values: np.ndarray, per_row: int) -> float:
    """Deviation of the noise of one step for the scores, measured where records are empty, else as claimed."""
    if claim.pair == "replace-one":
        return claim.noise_multiplier
    return scores.noise_deviation(values, per_row, claim.rate)
