"""Check of the noise: deviation, distribution and independence on coordinates that no record moves."""

from __future__ import annotations

import math

import numpy as np

from dpcfl_net.attacks.conformance import chances
from dpcfl_net.attacks.conformance.claim import Claim
from dpcfl_net.attacks.conformance.findings import LEVEL, MISS, Check, Finding, judged

NAME = "noise"
LARGER = 1.05  # measured over claimed deviation, from which it is said to be larger
MOST_EXCESS = 2.0  # measured over claimed deviation, up to which runs are planned that show the batches through it
SMALLER = 0.9  # measured over claimed deviation; the plan chooses runs that find it
AMOUNT, GIANTS = "measured over claimed deviation", "measured over claimed deviation, beside giant gradients"
SHAPE, SHARED = "distance from the normal distribution", "largest singular value, relative to independent noise"
COORDINATE, STEP = "smallest deviation of a coordinate", "smallest deviation of a step"
COORDINATE_OF_GIANTS = "smallest deviation of a coordinate, beside giant gradients"
TAIL = "largest value, in claimed deviations"
FRESH, STEPS = "correlation of two runs", "correlation of successive steps"
_SAME = 0.9  # correlation of runs with the same noise
_MOST_ROWS, _MOST_VALUES = 4096, 10**6


def check(claim: Claim, quiet: np.ndarray, giant: np.ndarray, *, seeded: bool, miss: float = MISS) -> Check:
    """Check the noise.

    Args:
        claim: The claim.
        quiet: Free coordinates of runs on the same records, (runs, rows, k), over the claimed deviation.
        giant: Free coordinates of runs with giant gradients, (runs, rows, k), over the claimed deviation.
        seeded: True if the kit gave the seeds, so that fresh noise says nothing.
        miss: Largest probability that a check that passes overlooks noise of SMALLER times the claimed deviation.
    """
    # Repeated runs would look like shared noise.
    distinct, beside = (quiet, giant) if fresh(quiet) else (quiet[:1], giant[:1])
    findings = [
        chances.spread(AMOUNT, quiet, lower_only=True),
        chances.spread(GIANTS, giant, lower_only=True),
        _shape(quiet),
        _shared(distinct),
        _smallest(COORDINATE, distinct, (0, 1)),
        _smallest(COORDINATE_OF_GIANTS, beside, (0, 1)),
        _largest(distinct),
    ]
    if quiet.shape[1] > 1:
        findings.append(_smallest(STEP, distinct, (0, 2)))
    if not seeded and len(quiet) > 1:
        findings.append(chances.correlation(FRESH, quiet[0], quiet[1]))
    if quiet.shape[1] > 1:
        findings.append(chances.successive(STEPS, quiet, 1))
    weak = (
        ""
        if chances.misses(quiet.size, SMALLER**2) <= miss
        else f"{quiet.size} values are too few to find noise of {SMALLER:g} of the claim."
    )
    ratio = findings[0].value
    deviation = claim.unit_of_release * claim.noise_multiplier
    passed = (
        f"The noise in the release deviates by {ratio * deviation:.4g} at each step, {ratio:.4f} of the claimed {deviation:.4g}; it is "
        f"normal{' and independent' if seeded else ', independent and fresh in each run'}."
    )
    if ratio > LARGER:
        passed += " It is larger than claimed: the guarantee is stronger than the claim."
    if seeded:
        passed += " Whether runs without a seed have fresh noise was not tested."
    return judged(NAME, findings, passed, _failures(findings, deviation), weak=weak)


def fresh(quiet: np.ndarray) -> bool:
    """True unless the first two runs have the same noise."""
    return len(quiet) < 2 or abs(chances.correlation(FRESH, quiet[0], quiet[1]).value) < _SAME


def measured(quiet: np.ndarray) -> float:
    """Deviation of the noise over the claimed one, where it differs from it; 1 where the claim may hold."""
    found = chances.spread(AMOUNT, quiet)
    return found.value if found.broken else 1.0


def excess(quiet: np.ndarray) -> float:
    """Upper limit of the deviation of the noise over the claimed one, where it is larger, in [1, MOST_EXCESS]."""
    found = chances.spread(AMOUNT, quiet)
    return min(found.value * found.high, MOST_EXCESS) if found.high is not None and found.value > found.high else 1.0


def independent(check: Check) -> bool:
    """True unless the noise is shared, correlated or not normal, so that no count can be read through it."""
    return not any(finding.broken for finding in check.findings if finding.what in (SHAPE, SHARED, STEPS))


def _shape(values: np.ndarray) -> Finding:
    """Kolmogorov-Smirnov distance after scaling to deviation 1, which shortens it; limit of Massart 1990."""
    from scipy.special import ndtr

    flat = np.sort(values.ravel()[:_MOST_VALUES])
    n = flat.size
    expected = ndtr(flat / (float(np.sqrt((flat**2).mean())) or 1.0))
    ranks = np.arange(n + 1) / n
    distance = max(float((expected - ranks[:-1]).max()), float((ranks[1:] - expected).max()))
    return Finding(SHAPE, distance, None, math.sqrt(math.log(2 / LEVEL) / (2 * n)))


def _shared(values: np.ndarray) -> Finding:
    """Largest singular value of the noise matrix; limit of Davidson and Szarek 2001 for independent entries."""
    matrix = values.reshape(-1, values.shape[2])[:_MOST_ROWS]
    # Smaller noise is left as it is: scaling by a measured deviation below the claimed one would cost the exact limit.
    matrix = matrix / max(1.0, float(np.sqrt((matrix**2).mean())))
    gram = matrix.T @ matrix if matrix.shape[0] >= matrix.shape[1] else matrix @ matrix.T
    independent = math.sqrt(matrix.shape[0]) + math.sqrt(matrix.shape[1])
    limit = independent + math.sqrt(2 * math.log(1 / LEVEL))
    return Finding(SHARED, math.sqrt(max(0.0, float(np.linalg.eigvalsh(gram)[-1]))) / independent, None, limit / independent)


def _smallest(what: str, values: np.ndarray, over: tuple[int, int]) -> Finding:
    """Smallest deviation of a part of the noise: its mean over the axes `over`; chi-square, with the level shared by all parts."""
    from scipy.stats import chi2

    squares = (values**2).mean(over)
    n = values.size // squares.size
    return Finding(what, math.sqrt(float(squares.min())), math.sqrt(chi2.ppf(LEVEL / squares.size, n) / n), None)


def _largest(values: np.ndarray) -> Finding:
    """Largest magnitude, which only noise without tails, or too little of it, keeps below the limit."""
    from scipy.stats import norm

    each = -math.expm1(math.log(LEVEL) / values.size)  # probability of a value beyond the limit
    return Finding(TAIL, float(np.abs(values).max()), float(norm.isf(each / 2)), None)


def _failures(findings: list[Finding], deviation: float) -> dict[str, str]:
    by = {finding.what: finding for finding in findings}
    amount = by[AMOUNT].value
    failed = {
        AMOUNT: f"The noise in the release deviates by {amount * deviation:.4g} at each step, {amount:.3f} of the claimed {deviation:.4g}."
    }
    if FRESH in by and abs(by[FRESH].value) > _SAME:
        failed[FRESH] = "Two runs have the same noise: it comes from a fixed seed, and can be computed and subtracted."
    failed[SHARED] = "Coordinates or steps share noise: what they share can be computed and subtracted."
    failed[STEPS] = "The noise of successive steps is correlated: it can partly be subtracted."
    dependent = by[SHARED].broken or (STEPS in by and by[STEPS].broken)
    failed.setdefault(FRESH, "" if dependent else "The noise of two runs is correlated.")
    explained = dependent or by[AMOUNT].broken
    failed[COORDINATE] = "" if explained else _left_out("coordinate", by[COORDINATE].value)
    failed[GIANTS] = "" if explained or by[COORDINATE].broken else (
        f"Beside giant gradients the noise deviates by {by[GIANTS].value:.3f} of the claim: it depends on the records."
    )  # fmt: skip
    failed[COORDINATE_OF_GIANTS] = "" if failed[GIANTS] == "" or by[GIANTS].broken else (
        _left_out("coordinate", by[COORDINATE_OF_GIANTS].value)
    )  # fmt: skip
    if STEP in by:
        failed[STEP] = "" if explained else _left_out("step", by[STEP].value)
    failed[SHAPE] = "" if dependent else "The noise is not normal."
    failed[TAIL] = "" if explained or by[SHAPE].broken else (
        f"No noise lies beyond {by[TAIL].value:.2f} deviations, where normal noise has values: it is cut off, and what it cannot reach "
        "tells records apart."
    )  # fmt: skip
    return failed


def _left_out(part: str, amount: float) -> str:
    return f"The noise of one {part} deviates by {amount:.3f} of the claim: not every {part} gets its noise."
