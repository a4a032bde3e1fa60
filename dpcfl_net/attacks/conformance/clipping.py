"""Check of the clipping: how far one record can move a release."""

from __future__ import annotations

import math

import numpy as np

from dpcfl_net.attacks.conformance.claim import Claim
from dpcfl_net.attacks.conformance.findings import LEVEL, Check, Finding, judged
from dpcfl_net.attacks.conformance.probes import GIANT, SMALL, Singles

NAME = "clipping"
SINGLE, SPREAD = "giant gradients, movement per record", "giant spread-out gradients, movement per record"
EXACT, STEADY = "noise off, largest movement by one record", "noise off, variation of a record's movement"
TOLERANCE = 1e-3  # of float32 arithmetic, relative to the clip norm
_STEADY = 0.02
EXCESS = 1.5  # clip norms; the plan chooses runs that find such a movement


def check(claim: Claim, sized: np.ndarray, exact: np.ndarray | None, probe: Singles, steps: int) -> Check:
    """Check that one record moves a release by at most the clip norm.

    Args:
        claim: The claim.
        sized: Releases along the three directions of `probes.sizes`, (runs, rows, 3).
        exact: Release of `probes.singles` without noise, (rows, d); None if noise cannot be switched off.
        probe: Those records.
        steps: Steps of a run.
    """
    findings = [] if exact is None else _without_noise(claim, exact, probe, steps)
    findings += _with_noise(claim, sized, steps)
    moved = findings[0].value
    failed = {
        EXACT: f"With the noise off, one record moved a release by {_shown(moved)} clip norms: at most {findings[0].high:.4g} is allowed.",
        STEADY: "With the noise off, the movement by one record varies between steps: it depends on the rest of the batch, so that "
        "its clip norm does not bound what a record changes.",
        SINGLE: f"Records with gradients of {GIANT:,.0f} clip norms move the release further than a clip norm each.",
        SPREAD: f"Records with spread-out gradients of {GIANT:,.0f} clip norms move the release further than a clip norm each: their L2 "
        "norm is not clipped.",
    }
    every = exact is not None and len(exact) == steps
    passed = f"A gradient of {GIANT:,.0f} clip norms moves the release by {moved:.3g} clip norms; at most 1 is claimed."
    if findings[0].what == EXACT and not every:
        passed = f"With the noise off, {steps} steps with a giant gradient moved the release by {moved:.3g} clip norms; {findings[0].high:.3g} are allowed."
    elif findings[0].what != EXACT:
        passed += f" Measured through the noise; movements above {findings[0].high:.2f} are found."
    weak = "" if spread_of_excess(claim, sized.shape[0] * steps) <= EXCESS - 1 else (
        f"Movements of up to {EXCESS:g} clip norms could be overlooked with so few steps; allow more calls."
    )  # fmt: skip
    return judged(NAME, findings, passed, failed, weak="" if every and findings[0].what == EXACT else weak)


def _without_noise(claim: Claim, release: np.ndarray, probe: Singles, steps: int) -> list[Finding]:
    """Exact limits, if the noise is really off."""
    if np.abs(release[:, probe.free]).max(initial=0.0) > TOLERANCE:
        return []
    moved = np.stack([np.sqrt((release[:, columns] ** 2).sum(1)) for columns in probe.columns], axis=1)
    if len(release) < steps:
        return [Finding(EXACT, _finite(moved.max()), None, _most_steps(claim, steps, moved.size) * (1 + TOLERANCE))]
    largest = np.max(moved, axis=0)
    smallest = np.min(np.where(moved > TOLERANCE, moved, np.inf), axis=0)
    varied = np.where(np.isfinite(smallest), largest / smallest, 1.0)
    # A record that is drawn twice moves a step twice as far: that is a matter of the largest movement.
    return [
        Finding(EXACT, _finite(largest.max()), None, 1 + TOLERANCE, 0.0),
        Finding(STEADY, _finite(varied.max()) - 1, None, _STEADY, 0.0),
    ]


def _most_steps(claim: Claim, steps: int, records: int) -> float:
    """Steps that one of `records` records is in, exceeded with probability LEVEL."""
    from scipy.stats import binom

    if claim.sampling in ("shuffle", "allocation"):
        return float(math.ceil(steps / claim.epoch))
    return float(binom.isf(LEVEL / records, steps, claim.rate))


def _with_noise(claim: Claim, sized: np.ndarray, steps: int) -> list[Finding]:
    """Movement per record in clip norms, over the number of records that the small gradients show."""
    draws = sized.shape[0] * steps
    small, *giants = sized.sum((0, 1))
    counts = [len(range(kind, claim.records, 3)) for kind in range(3)]
    rate = _highest_rate(claim, counts[0], draws, float(small))
    findings = []
    for what, total, count in zip((SINGLE, SPREAD), giants, counts[1:], strict=True):
        seen = count * draws * claim.rate
        high = _quantile(_sum(count, draws, rate, 1.0, claim))
        findings.append(Finding(what, _finite(float(total)) / seen, None, high / seen))
    return findings


def _sum(records: int, draws: int, rate: float, step: float, claim: Claim) -> tuple[float, float, float]:
    """Upper bounds on mean and deviation of a sum of `records` sampled records in `draws` steps, and the largest jump."""
    mean = step * records * draws * rate
    varies = 0.0 if claim.sampling == "full" else step**2 * records * draws * rate
    return mean, math.sqrt(varies + draws * claim.noise_multiplier**2), step


def _quantile(moments: tuple[float, float, float]) -> float:
    """Value that such a sum exceeds with probability LEVEL / 2: Bernstein's inequality, for counts and noise together."""
    mean, deviation, jump = moments
    log = math.log(2 / LEVEL)
    return mean + math.sqrt(2 * log) * deviation + jump * log / 3


def _highest_rate(claim: Claim, records: int, draws: int, total: float) -> float:
    """Largest sampling rate, at least the claimed one, that the movement by small gradients allows at level LEVEL / 2.

    A wrong rate is found by the check of the sampling; here it must not look like a wrong clip norm.
    """
    low, high = claim.rate, 1.0
    if not math.isfinite(total) or _lowest(claim, records, draws, low) > total:
        return low
    while high - low > 1e-4 * claim.rate:
        middle = (low + high) / 2
        low, high = (middle, high) if _lowest(claim, records, draws, middle) <= total else (low, middle)
    return high


def _lowest(claim: Claim, records: int, draws: int, rate: float) -> float:
    mean, deviation, _ = _sum(records, draws, rate, SMALL, claim)
    return mean - math.sqrt(2 * math.log(2 / LEVEL)) * deviation


def spread_of_excess(claim: Claim, draws: int) -> float:
    """Excess of the movement over a clip norm that is found with probability 0.99 or more."""
    count = claim.records // 3
    expected = count * draws * claim.rate
    total = SMALL * expected
    limit = _quantile(_sum(count, draws, _highest_rate(claim, count, draws, total), 1.0, claim))
    return (limit + 2.33 * EXCESS * _sum(count, draws, claim.rate, 1.0, claim)[1]) / expected - 1


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _finite(value: float) -> float:
    return float(value) if math.isfinite(value) else math.inf
