"""The conformance kit: runs a training function on crafted records and judges its claim."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpcfl_net.attacks.conformance import accounting, adapter, canary, clipping, noise, probes, sampling
from dpcfl_net.attacks.conformance.adapter import FIELD, Adapter
from dpcfl_net.attacks.conformance.claim import Claim
from dpcfl_net.attacks.conformance.findings import FAIL, PASS, UNDECIDED, Check, unmeasured
from dpcfl_net.attacks.conformance.plan import MOST_CALLS, Plan, plan, steps_of_run
from dpcfl_net.core.errors import ConfigError

_UNREADABLE = "Batches cannot be read through noise that is shared, correlated or not normal: see the check of the noise."
_CLEAR = 6.0  # deviations from 0 that show that the release follows the records


@dataclass(frozen=True)
class Options:
    """Options of the kit.

    Attributes:
        quick: True for fewer calls.
        most_calls: Largest number of calls.
        seed: Seed of crafted records, and of a function with the option `seed`; None for fresh ones.
    """

    quick: bool = False
    most_calls: int = MOST_CALLS
    seed: int | None = None


@dataclass(frozen=True)
class Report:
    """Result of all checks.

    Attributes:
        adapter: Name of the adapter.
        claim: The claim.
        checks: The checks.
        calls: Calls of the training function.
        seconds: Time of these calls.
    """

    adapter: str
    claim: Claim
    checks: tuple[Check, ...]
    calls: int
    seconds: float

    @property
    def verdict(self) -> str:
        """ "fail" if a check failed, else "undecided" if one is undecided, else "pass"."""
        found = {check.verdict for check in self.checks}
        return FAIL if FAIL in found else UNDECIDED if UNDECIDED in found else PASS

    @property
    def exit_code(self) -> int:
        """0 for a pass, 3 for a failed check, 4 if none failed and one is undecided."""
        return {PASS: 0, FAIL: 3}.get(self.verdict, 4)

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "verdict": self.verdict, "adapter": self.adapter, "claim": self.claim.model_dump(), "calls": self.calls,
            "seconds": round(self.seconds, 3), "false_alarm": sum(check.false_alarm for check in self.checks),
            "checks": [check.as_json() for check in self.checks],
        }  # fmt: skip


def run(name: str, claim: Claim, options: Options, say: Callable[[str], None]) -> Report:
    """Check a training function against its claim.

    Args:
        name: `module:function` or `path/to/file.py:function`.
        claim: The claim.
        options: Options.
        say: Receives the cost estimate, before all calls but two.

    Returns:
        The report.

    Raises:
        ConfigError: If the function cannot be loaded or called, or returns anything but tensors of the right size.
    """
    found = adapter.load(name, claim, options.seed)
    accounted = accounting.check(claim)
    measured = _Measured(found, options, say)
    if not measured.responds:
        checks = [accounted, *_blind(measured)]
    else:
        noisy = measured.noise()
        checks = [accounted, measured.clipping(), measured.sampling(noisy), noisy, measured.audit()]
    return Report(name, claim, tuple(checks), found.calls, found.seconds)


def _blind(measured: _Measured) -> list[Check]:
    reason = (
        "The release does not follow the records. Each row must be the gradient of one record (loss: the inner product of row and "
        "parameters), and the claim must state learning_rate and divisor of the function."
    )
    others = (clipping.NAME, sampling.NAME, canary.NAME)
    checks = {name: unmeasured(name, UNDECIDED, reason) for name in others} | {noise.NAME: measured.noise()}
    return [checks[name] for name in (clipping.NAME, sampling.NAME, noise.NAME, canary.NAME)]


class _Measured:
    """Releases of all planned runs, in clip norms, and the checks of them."""

    def __init__(self, found: Adapter, options: Options, say: Callable[[str], None]) -> None:
        self.adapter, self.claim = found, found.claim
        self._rng = np.random.default_rng(options.seed)
        self.steps = steps_of_run(self.claim, "steps" in found.options)
        halves = probes.halves(self.claim)
        begun = [self._run(halves)]  # imports and compiles: its time says little about the next ones
        start = found.seconds
        begun.append(self._run(halves))
        every = len(begun[0]) == self.steps
        self._z = self.claim.noise_multiplier * (1.0 if every else math.sqrt(self.steps))
        self.plan: Plan = plan(
            self.claim, self.steps, every, quick=options.quick, exact="noise_multiplier" in found.options,
            most_calls=options.most_calls, seconds=found.seconds - start,
            excess=noise.excess(np.stack(begun)[:, :, 2:] / self._z),
        )  # fmt: skip
        say(self.plan.sentence)
        runs = np.stack([*begun, *(self._run(halves) for _ in range(self.plan.halves - 2))])
        moved = float(runs[:, :, :2].sum())
        deviation = self.claim.noise_multiplier * math.sqrt(2 * len(runs) * self.steps)
        self.responds = abs(moved) > _CLEAR * deviation
        self._way = -1.0 if self.responds and moved < 0 else 1.0  # gradients may be subtracted
        self.halves = runs * self._way
        self._fresh = noise.fresh(self.halves[:, :, 2:])
        self.single = probes.singles(self.claim)
        if self.responds:
            self._rest()

    def _rest(self) -> None:
        sized, self._directions = probes.sizes(self.claim, self._rng)
        self._sized = np.stack([self._run(sized, finite=False) for _ in range(self.plan.sizes)]) * self._way
        self._exact = self._run(self.single.records, noise=False, finite=False) if self.plan.exact else None
        self._canaries = [probes.canaries(self.claim, self._rng) for _ in range(self.plan.canaries)]
        self._audited = np.stack([self._run(probe.records) for probe in self._canaries]) * self._way

    def _run(self, records: np.ndarray, *, noise: bool = True, finite: bool = True) -> np.ndarray:
        release = self.adapter.release(records, self.steps, noise=noise)
        if finite and not np.isfinite(release).all():
            raise ConfigError(f"{FIELD} is {self.adapter.name!r}: returned values that are not finite, on records that are")
        return release

    def clipping(self) -> Check:
        """Check the clipping."""
        along = np.nan_to_num(self._sized, nan=np.inf) if not np.isfinite(self._sized).all() else self._sized
        with np.errstate(invalid="ignore"):  # infinite releases: reported as infinite movements
            return clipping.check(self.claim, along @ self._directions.T, self._exact, self.single, self.steps)

    def sampling(self, noise_check: Check) -> Check:
        """Check the sampling; runs of a fixed seed repeat their batches, so that only one counts."""
        kept = slice(None) if self._fresh else slice(1)
        sums = []
        for probe, release in list(zip(self._canaries, self._audited, strict=True))[kept]:
            sign = np.where(probe.bits, 1.0, -1.0)
            used = probe.unclipped & (probe.bits | (self.claim.pair == "replace-one"))
            sums.append((release[:, : len(sign)] * sign)[:, used].sum(0))
        seen = sampling.Seen(self.halves[kept, :, :2], np.concatenate(sums), self.steps)
        # Counts are read through the noise: a wrong amount of it must not look like wrong batches.
        real = noise.measured(self.halves[kept, :, 2:] / self._z)
        claim = self.claim.model_copy(update={"noise_multiplier": self.claim.noise_multiplier * real})
        found = sampling.check(claim, seen, self.plan.miss)
        if found.verdict == FAIL and not noise.independent(noise_check):
            return replace(found, verdict=UNDECIDED, sentence=_UNREADABLE)
        return found

    def noise(self) -> Check:
        """Check the noise."""
        quiet = self.halves[:, :, 2:] / self._z
        giant = self._sized[:, :, ~self._directions.any(axis=0)] / self._z if self.responds else quiet
        giant = np.where(np.isfinite(giant), giant, 0.0)
        return noise.check(self.claim, quiet, giant, seeded=self.adapter.seeded, miss=self.plan.miss)

    def audit(self) -> Check:
        """Audit with canaries."""
        count = len(self._canaries[0].bits)
        epsilon = self.claim.epsilon
        if self.steps < self.claim.steps:
            epsilon = accounting.provable(self.claim, self.steps, self.claim.pair)
        return canary.check(self.claim, self._canaries, self._audited[:, :, :count], self.steps, epsilon)
