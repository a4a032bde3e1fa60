"""Check of the sampling: batch sizes, epochs, and independence of records, through the noise of the releases."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dpcfl_net.attacks.conformance import chances
from dpcfl_net.attacks.conformance.chances import NoisyCount, allocated_records, constant, records_in_batch
from dpcfl_net.attacks.conformance.claim import Claim
from dpcfl_net.attacks.conformance.findings import MISS, Check, Finding, judged
from dpcfl_net.attacks.conformance.probes import UNCLIPPED

NAME = "sampling"
SIZE, VARY = "mean batch size, deviations from the claimed one", "spread of batch sizes"
SLICE, EPOCH = "spread of the first half's share of a batch", "spread of the first half's share of an epoch"
HALVES, STEPS = "correlation of both halves", "correlation of successive steps"
RUNS = "correlation of the batches of two runs"
SINGLE = "spread of the times that single records are in batches"
_ONLY_SUMS = (
    "Only sums over whole epochs are released: a shuffle into batches of one size, which the claim excludes, has the same ones."
)


@dataclass(frozen=True)
class Seen:
    """Evidence about batches in the releases, in units of a clip norm.

    Attributes:
        halves: Movement along coordinates 0 and 1 of `probes.halves`, (runs, rows, 2).
        singles: Sums over the steps of a run along canaries that were in and not clipped, (k,).
        steps: Steps of a run; one row each, or one row for all.
    """

    halves: np.ndarray
    singles: np.ndarray
    steps: int

    @property
    def every(self) -> bool:
        """True if every step is released."""
        return self.halves.shape[1] == self.steps


def total(claim: Claim, steps: int) -> NoisyCount:
    """Distribution of the records in the batches of some steps, for an allocation the first of an epoch."""
    if claim.sampling == "allocation":
        return allocated_records(claim, claim.records, steps, UNCLIPPED, 2)
    if claim.sampling == "poisson":
        return records_in_batch(claim, claim.records, UNCLIPPED, 2).times(steps)
    return constant(claim.batch * steps, claim, UNCLIPPED, 2 * steps)


def _half(claim: Claim, steps: int) -> NoisyCount:
    if claim.sampling == "shuffle":
        return allocated_records(claim, claim.records // 2, steps, UNCLIPPED)
    return _part(claim, claim.records // 2, steps)


def ratios(claim: Claim, steps: int, every: bool) -> dict[str, tuple[float, int]]:
    """Variance ratio of the violation that each test must find, and the samples of it in one run.

    The violations are all other kinds of batches that a run of this length tells from the claimed one; of several that one test
    must find, the ratio is that of the hardest. Batches of which each record is in one per epoch differ from independent ones
    after an epoch only.

    Args:
        claim: The claim.
        steps: Steps of a run.
        every: True if every step is released.
    """
    found = _sizes(claim, 1 if every else steps, whole_epoch=not every and steps >= claim.epoch)
    per_run = {VARY: steps if every else 1, SLICE: 1, EPOCH: 1}
    if every and claim.sampling == "allocation":
        per_run[VARY] = math.ceil(steps / claim.epoch)
    if every and steps >= claim.epoch:
        found |= _epochs(claim, claim.epoch, EPOCH)
        per_run[EPOCH] = steps // claim.epoch
    elif steps >= claim.epoch and claim.sampling in ("fixed", "shuffle"):
        found |= _epochs(claim, steps, EPOCH if claim.sampling == "shuffle" else SLICE)
    return {test: (ratio, per_run[test]) for test, ratio in found.items()}


def _sizes(claim: Claim, steps: int, whole_epoch: bool) -> dict[str, float]:
    """Ratio for the records in all batches of some steps: of one size, varying, or varying within an epoch only."""
    noise = 2 * claim.noise_multiplier**2 * steps
    independent, allocated = (UNCLIPPED**2 * claim.records * spread for spread in _spreads(claim, steps))
    claimed = {"poisson": independent, "allocation": allocated}.get(claim.sampling, 0.0)
    others = {0.0, independent} if whole_epoch or claim.sampling != "allocation" else {0.0}
    if whole_epoch and claim.sampling == "poisson":
        others.add(allocated)
    if claim.sampling == "full" or (claim.sampling == "allocation" and not claimed):
        return {}
    return {VARY: _hardest((other + noise) / (claimed + noise) for other in others - {claimed})}


def _epochs(claim: Claim, steps: int, test: str) -> dict[str, float]:
    """Ratio for the first half's records in the batches of at least an epoch: drawn at each step, or once per epoch."""
    if claim.sampling == "full":
        return {}
    noise = claim.noise_multiplier**2 * steps
    # One size for all batches halves the variance of half the records.
    records = claim.records / (4 if claim.sampling in ("fixed", "shuffle") else 2)
    independent, allocated = (UNCLIPPED**2 * records * spread + noise for spread in _spreads(claim, steps))
    return {test: allocated / independent if claim.sampling in ("poisson", "fixed") else independent / allocated}


def _spreads(claim: Claim, steps: int) -> tuple[float, float]:
    """Variance of the number of batches with one record: of batches drawn at each step, and once per epoch."""
    begun = steps % claim.epoch / claim.epoch
    return steps * claim.rate * (1 - claim.rate), begun * (1 - begun)


def _hardest(ratios: Iterable[float]) -> float:
    return max(ratios, key=chances.samples_for)


def repeats(claim: Claim, steps: int, every: bool) -> tuple[float, int] | None:
    """Correlation of two runs with the same batches, and the pairs of scores in two runs; None if such batches cost nothing.

    Args:
        claim: The claim. Only random batches that are secret amplify; a shuffle is charged without amplification.
        steps: Steps of a run.
        every: True if every step is released.
    """
    if claim.sampling not in ("poisson", "fixed", "allocation"):
        return None
    share = _half(claim, 1 if every else steps).share
    rows = math.ceil(steps / claim.epoch) if claim.sampling == "allocation" else steps
    return (share, rows if every else 1) if share else None


def check(claim: Claim, seen: Seen, miss: float = MISS) -> Check:
    """Check that batches are drawn as claimed.

    Args:
        claim: The claim.
        seen: What the releases show.
        miss: Largest probability that a check that passes overlooks batches of another kind.
    """
    runs, rows, _ = seen.halves.shape
    sums, per_row = seen.halves.sum(2), 1 if seen.every else seen.steps
    every_total = total(claim, per_row)
    whole = total(claim, seen.steps).times(runs) if claim.sampling == "allocation" else every_total.times(runs * rows)
    findings = [
        chances.spread(VARY, every_total.scores(_independent(claim, seen, sums))),
        chances.centre(SIZE, float(whole.scores(sums.sum()[None])[0])),
    ]
    findings += _parts(claim, seen, per_row)
    weak = [
        what
        for what, (ratio, per_run) in ratios(claim, seen.steps, seen.every).items()
        if chances.misses(runs * per_run, ratio) > miss
    ]
    if runs > 1 and (again := repeats(claim, seen.steps, seen.every)):
        correlated, pairs = again
        weak += [RUNS] * (chances.misses_correlation(runs // 2 * pairs, correlated) > miss)
    measured = math.sqrt(max(0.0, float(sums.var()) - 2 * claim.noise_multiplier**2 * per_row)) / UNCLIPPED
    claimed = math.sqrt(every_total.variance)
    size, what = sums.mean() / UNCLIPPED / per_row, "batch sizes" if per_row == 1 else "records in all batches of a run"
    passed = (
        f"Batches have {size:.4g} records on average ({claim.rate * claim.records:g} claimed); {what} vary by {measured:.3g} "
        f"({claimed:.3g} claimed: {claim.sampling})."
    )
    failed = _failures(findings, claim, float(size), measured, claimed, what)
    only_sums = claim.sampling == "allocation" and every_total.variance == 0
    return judged(NAME, findings, passed, failed, weak=_ONLY_SUMS if only_sums else _weak(weak, runs))


def _independent(claim: Claim, seen: Seen, rows: np.ndarray) -> np.ndarray:
    """Rows (runs, rows, ...) whose batches are independent: with an allocation the first of each epoch."""
    return rows[:, :: claim.epoch] if claim.sampling == "allocation" and seen.every else rows


def _parts(claim: Claim, seen: Seen, per_row: int) -> list[Finding]:
    """Tests of the halves over time, and of single records."""
    first, second = seen.halves[:, :, 0], seen.halves[:, :, 1]
    findings = []
    if claim.sampling in ("poisson", "fixed", "allocation"):
        scores = _half(claim, per_row).scores(_independent(claim, seen, first))
        findings.append(chances.spread(SLICE, scores))
        if claim.sampling != "fixed":
            other = _part(claim, claim.records - claim.records // 2, per_row)
            findings.append(chances.correlation(HALVES, scores, other.scores(_independent(claim, seen, second))))
        if len(scores) > 1:
            findings.append(chances.successive(RUNS, scores, 0))
        if seen.every and scores.shape[1] > 1:
            findings.append(chances.successive(STEPS, scores, 1))
        findings.append(chances.spread(SINGLE, _part(claim, 1, seen.steps).scores(seen.singles)))
    if claim.sampling != "full" and seen.every and (windows := seen.steps // claim.epoch):
        shares = first[:, : windows * claim.epoch].reshape(len(first), windows, claim.epoch).sum(2)
        findings.append(chances.spread(EPOCH, _half(claim, claim.epoch).scores(shares)))
    elif claim.sampling == "shuffle" and not seen.every:
        findings.append(chances.spread(EPOCH, _half(claim, per_row).scores(first)))
    return findings


def _part(claim: Claim, records: int, steps: int) -> NoisyCount:
    """Distribution of some of the records in the batches of some steps, for an allocation the first of an epoch."""
    if claim.sampling == "allocation":
        return allocated_records(claim, records, steps, UNCLIPPED)
    return records_in_batch(claim, records, UNCLIPPED).times(steps)


def _failures(findings: list[Finding], claim: Claim, size: float, measured: float, claimed: float, what: str) -> dict[str, str]:
    by = {finding.what: finding for finding in findings}
    fixed = (
        "Batches have a fixed size"
        if measured < claimed / 2
        else f"{what.capitalize()} vary by {measured:.3g}, not {claimed:.3g}"
    )
    failed = {
        SINGLE: "The times that single records are in batches have another spread than claimed: some records are drawn more often, "
        "or batches repeat.",
        SIZE: f"Batches have {size:.4g} records on average, not {claim.rate * claim.records:g} (or learning_rate or divisor of the claim is wrong).",
        VARY: f"{fixed}: they are not drawn by {claim.sampling} sampling, which the accounting assumes.",
        SLICE: "The first half of the records is in batches with another spread than claimed: batches are not drawn record by record.",
        EPOCH: "The records of an epoch have another spread than claimed"
        + (
            ": each record is in one batch of an epoch."
            if claim.sampling not in ("shuffle", "allocation") and EPOCH in by and by[EPOCH].value < 1
            else "."
        ),
        RUNS: "Two runs have the same batches: they come from a fixed seed, and batches that are known amplify nothing.",
        HALVES: "The two halves of the records are not drawn independently.",
        STEPS: "Batches of successive steps depend on each other.",
    }
    if by[SIZE].broken:  # the other limits assume the claimed size
        failed |= dict.fromkeys((VARY, SLICE, EPOCH, RUNS, HALVES), "")
    return failed


def _weak(tests: list[str], runs: int) -> str:
    if not tests:
        return ""
    return (
        f"{runs} runs of this size are too few to tell batches of another kind ({', '.join(tests)}): allow more calls, or test "
        "with a smaller noise_multiplier."
    )
