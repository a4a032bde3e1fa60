"""Findings of a check and its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from dpcfl_net.core.canonical import finite

PASS: Final = "pass"
FAIL: Final = "fail"
NOT_APPLICABLE: Final = "not applicable"
UNDECIDED: Final = "undecided"
Verdict = Literal["pass", "fail", "not applicable", "undecided"]
LEVEL = 2e-8  # probability that one test fails a program that keeps its claim
MISS = 0.01  # largest probability with which a check that passes overlooks the violation that it names
MOST_TESTS = 40
MOST_SENTENCES = 2  # about one failed check


@dataclass(frozen=True)
class Finding:
    """One test.

    Attributes:
        what: What was measured.
        value: Measured value.
        low: Smallest value that the claim allows; None for no limit.
        high: Largest value that the claim allows; None for no limit.
        level: Probability of a false alarm; 0 for an exact test.
    """

    what: str
    value: float
    low: float | None
    high: float | None
    level: float = LEVEL

    @property
    def broken(self) -> bool:
        """True if the value is outside the limits, or is no number."""
        inside = (self.low is None or self.value >= self.low) and (self.high is None or self.value <= self.high)
        return not inside

    @property
    def limits(self) -> str:
        """The limits as text."""
        if self.low is None:
            return f"at most {self.high:.4g}"
        return f"at least {self.low:.4g}" if self.high is None else f"{self.low:.4g} to {self.high:.4g}"


@dataclass(frozen=True)
class Check:
    """Result of one check.

    Attributes:
        name: "accounting", "clipping", "sampling", "noise" or "audit".
        verdict: The verdict.
        number: The value that decides it; None if nothing was measured.
        bound: Limits of the number, as text.
        false_alarm: Probability that the check fails a program that keeps its claim.
        sentence: The result in plain words.
        findings: All tests.
    """

    name: str
    verdict: Verdict
    number: float | None
    bound: str
    false_alarm: float
    sentence: str
    findings: tuple[Finding, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The check as plain data."""
        own = {key: value for key, value in asdict(self).items() if key != "findings"}
        findings = [{**asdict(finding), "broken": finding.broken} for finding in self.findings]
        return finite({**own, "findings": findings})


def judged(name: str, findings: Sequence[Finding], passed: str, failed: Mapping[str, str], *, weak: str = "") -> Check:
    """Judge a check by its tests.

    Args:
        name: Name of the check.
        findings: Tests; the first is shown if none is broken.
        passed: Sentence for a pass.
        failed: Sentence for a broken test, by `what`, the most telling first; none for a test that others explain.
        weak: Reason why the tests prove too little for a pass; empty if they prove enough.
    """
    order = list(failed)
    broken = sorted((finding for finding in findings if finding.broken), key=lambda finding: order.index(finding.what))
    shown = broken[0] if broken else findings[0]
    verdict: Verdict = FAIL if broken else UNDECIDED if weak else PASS
    said = dict.fromkeys(failed[finding.what] for finding in broken if failed.get(finding.what))
    sentence = " ".join(list(said)[:MOST_SENTENCES]) or weak or passed
    return Check(
        name,
        verdict,
        shown.value,
        f"{shown.what}: {shown.limits}",
        sum(finding.level for finding in findings),
        sentence,
        tuple(findings),
    )


def unmeasured(name: str, verdict: Verdict, sentence: str) -> Check:
    """A check without a measurement."""
    return Check(name, verdict, None, "", 0.0, sentence)
