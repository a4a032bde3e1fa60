"""Claims of a paper, their evidence over seeds, and their verdicts: holds, does not hold, undecided, not tested."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dpcfl_net.results.number_format import counted
from dpcfl_net.results.statistics import LEVEL, Test, fewest_seeds, holm, interval, p_values, seeds_needed

Verdict = Literal["holds", "does not hold", "undecided", "not tested"]
HOLDS: Literal["holds"] = "holds"
FAILS: Literal["does not hold"] = "does not hold"
UNDECIDED: Literal["undecided"] = "undecided"
UNTESTED: Literal["not tested"] = "not tested"
VERDICTS: tuple[Verdict, ...] = (HOLDS, FAILS, UNDECIDED, UNTESTED)
LEAD = 0.5  # points of accuracy: a smaller lead does not count as "above"
ALWAYS = 0.9  # "always" is tested as: in at least this share of the rounds


@dataclass(frozen=True)
class Comparison:
    """One inequality over seeds: the mean of the values is at least the margin.

    Attributes:
        values: Seed, or other independent unit, to its value: a paired difference, a score or a share.
        margin: The smallest mean that agrees with the claim.
        unit: Unit of values and margin.
        name: Where it was measured, for example "epsilon 5".
        test: Test of `results.statistics`.
    """

    values: Mapping[Any, float]
    margin: float = 0.0
    unit: str = "points"
    name: str = ""
    test: Test = "t"

    @property
    def seeds(self) -> int:
        """Number of seeds."""
        return len(self.values)

    def p_values(self) -> tuple[float, float]:
        """Return the one-sided p-values against "at most the margin" and against "at least the margin"."""
        return p_values(list(self.values.values()), self.margin, self.test)

    def seeds_needed(self, level: float) -> int | None:
        """Estimate how many seeds decide it at a level; None if they are too many, or without a test by t."""
        return seeds_needed(list(self.values.values()), self.margin, level) if self.test == "t" else None

    def document(self) -> dict[str, Any]:
        """Return the comparison as a JSON object."""
        values = {str(seed): float(value) for seed, value in self.values.items()}
        between = interval(list(self.values.values()), self.test)
        return {
            "name": self.name, "mean": float(statistics.fmean(self.values.values())), "margin": self.margin, "unit": self.unit,
            "interval": None if between is None else list(between), "test": self.test, "values": values,
        }  # fmt: skip

    def words(self) -> str:
        """Return mean, interval, margin and number of seeds as text."""
        values = list(self.values.values())
        found = interval(values, self.test)
        between = f", {LEVEL:.0%} interval {found[0]:.3g} to {found[1]:.3g}" if found else ""
        unit, where = (f" {self.unit}" if self.unit else ""), (f"{self.name}: " if self.name else "")
        seeds = counted(self.seeds, "seed")
        if self.test == "sign":
            above, below = (sum(sign * (value - self.margin) > 0 for value in values) for sign in (1, -1))
            return f"{where}{above} above and {below} below {self.margin:g}{unit}, {seeds}"
        mean = round(statistics.fmean(values), 9) + 0.0  # differences of equal means are 0, not 1e-15 or -0
        return f"{where}{mean:.3g}{unit}{between}, margin {self.margin:g}, {seeds}"


@dataclass(frozen=True)
class Exact:
    """Evidence without chance: a theorem, or an accountant's number.

    Attributes:
        holds: True if the claim holds.
    """

    holds: bool


@dataclass(frozen=True)
class NotTested:
    """No evidence, because what the claim is about did not happen in the runs.

    Attributes:
        why: The reason.
    """

    why: str


@dataclass(frozen=True)
class Cause:
    """Why a claim does not hold.

    Attributes:
        text: The cause.
        shown_by: Run or computation that isolates the cause, with its number; empty: a guess.
    """

    text: str
    shown_by: str = ""

    def line(self) -> str:
        """Return the cause as text that says whether it was measured."""
        return f"{self.text} (measured: {self.shown_by})" if self.shown_by else f"a guess: {self.text}"


@dataclass(frozen=True)
class Claim:
    """One claim of a paper and its measurement.

    Attributes:
        text: The claim.
        measured: The measured values, as a sentence.
        evidence: Exact, NotTested, or comparisons over seeds.
        cause: Shown if the claim does not hold.
        every: True: the claim needs every comparison; False: at least one.
        grows: True if runs that are missing in a part of the figure would add comparisons.
    """

    text: str
    measured: str
    evidence: Exact | NotTested | Sequence[Comparison]
    cause: Cause | None = None
    every: bool = True
    grows: bool = False

    @property
    def comparisons(self) -> Sequence[Comparison]:
        """Comparisons over seeds; empty for other evidence."""
        return () if isinstance(self.evidence, Exact | NotTested) else self.evidence

    @property
    def seeds(self) -> int | None:
        """Smallest number of seeds of a comparison; None without comparisons."""
        return min((one.seeds for one in self.comparisons), default=None)

    def p_value(self, *, incomplete: bool = False) -> tuple[float, bool]:
        """Combine the comparisons.

        Args:
            incomplete: True if comparisons are missing: nothing speaks for a side that needs them all.

        Returns:
            Two-sided p-value, and True if it speaks for the claim. Where one comparison suffices for a side, its p-value is
            multiplied by the number of comparisons (Bonferroni); where all are needed, the largest counts (intersection-union).
        """
        above, below = zip(*(one.p_values() for one in self.comparisons), strict=True)
        one, all_ = (below, above) if self.every else (above, below)
        single, together = min(1.0, len(one) * min(one)), 1.0 if incomplete else max(all_)
        holds, fails = (together, single) if self.every else (single, together)
        return min(1.0, 2 * min(holds, fails)), holds <= fails

    def seeds_needed(self) -> int | None:
        """Estimate how many seeds decide the claim, before Holm's correction, if means and spreads stay as measured.

        Returns:
            Number of seeds; None if the comparisons on which the decision rests are not by t, or need too many. Where one
            comparison on the other side of its margin suffices, it is the one of them that needs the fewest seeds, with
            Bonferroni's correction as in `p_value`; else all are needed.
        """
        suffice = [one for one in self.comparisons if (statistics.fmean(one.values.values()) < one.margin) == self.every]
        if suffice:
            level = 1 - (1 - LEVEL) / len(self.comparisons)
            return min((n for one in suffice if (n := one.seeds_needed(level)) is not None), default=None)
        found = [one.seeds_needed(LEVEL) for one in self.comparisons]
        return max((n for n in found if n is not None), default=None) if None not in found else None

    def seeds_to_hold(self) -> int | None:
        """Return the fewest seeds with which the claim can hold at best, before Holm's correction; None if it has as many."""
        level = LEVEL if self.every else 1 - (1 - LEVEL) / len(self.comparisons)
        fewest = [(fewest_seeds(one.margin, one.test, level), one.seeds) for one in self.comparisons]
        lacking = [least for least, seeds in fewest if seeds < least]
        if self.every:
            return max(lacking, default=None)
        return min(lacking) if lacking and len(lacking) == len(fewest) else None


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict.

    Attributes:
        claim: The claim.
        verdict: holds, does not hold, undecided or not tested.
        p_value: Two-sided p-value; None without comparisons.
        p_holm: The same after Holm's correction over the claims of the figure.
        earlier_look: The earlier look at the figure's data that decided it; None: this look, or no decision.
        incomplete: True if missing runs would add comparisons.
    """

    claim: Claim
    verdict: Verdict
    p_value: float | None = None
    p_holm: float | None = None
    earlier_look: int | None = None
    incomplete: bool = False

    @property
    def exact(self) -> bool:
        """True if chance plays no part in the verdict."""
        return isinstance(self.claim.evidence, Exact)

    @property
    def cause(self) -> str:
        """The cause as text; empty unless the claim does not hold."""
        return self.claim.cause.line() if self.claim.cause and self.verdict == FAILS else ""

    @property
    def basis(self) -> str:
        """Numbers behind the verdict, or the reason for its absence."""
        evidence = self.claim.evidence
        if isinstance(evidence, Exact):
            return "exact"
        if isinstance(evidence, NotTested):
            return evidence.why
        look = f" at look {self.earlier_look}" if self.earlier_look is not None else ""
        p = f"; p {self.p_holm:.2g} after Holm{look}" if self.p_holm is not None else ""
        missing = "; comparisons are missing, and nothing is concluded from all of them" if self.incomplete else ""
        return f"{'; '.join(one.words() for one in evidence)}{p}{missing}{self._needed()}"

    def line(self) -> str:
        """Return the claim as one printed line."""
        cause = f"; cause: {self.cause}" if self.cause else ""
        return f"claim: {self.claim.text}; measured: {self.claim.measured}; verdict: {self.verdict} ({self.basis}){cause}"

    def document(self) -> dict[str, Any]:
        """Return the claim as a JSON object."""
        look = {} if self.earlier_look is None else {"earlier_look": self.earlier_look}
        return {
            "text": self.claim.text, "measured": self.claim.measured, "verdict": self.verdict, "exact": self.exact,
            "seeds": self.claim.seeds, "p_value": self.p_value, "p_holm": self.p_holm, **look, "basis": self.basis,
            "cause": self.cause, "comparisons": [one.document() for one in self.claim.comparisons],
        }  # fmt: skip

    def _needed(self) -> str:
        if self.verdict != UNDECIDED or self.incomplete or self.claim.seeds is None:
            return ""
        needed, at_best = self.claim.seeds_needed(), self.claim.seeds_to_hold() if self.claim.seeds > 1 else None
        decide = needed is not None and needed > self.claim.seeds
        return (f"; about {needed} seeds would decide at this spread, before Holm" if decide else "") + (
            f"; it cannot hold with fewer than {at_best} seeds, even without Holm" if at_best is not None else ""
        )


@dataclass(frozen=True)
class Decision:
    """Decision of an earlier look at a figure's data.

    Attributes:
        look: Number of the look, from 1.
        verdict: holds or does not hold.
        p_holm: p-value after Holm's correction over the claims of that look.
        comparisons: Evidence of that look, as `Comparison.document`.
    """

    look: int
    verdict: Verdict
    p_holm: float
    comparisons: Sequence[Any]

    def of(self, claim: Claim) -> bool:
        """Return True if the claim has still the same evidence."""
        return [one.document() for one in claim.comparisons] == list(self.comparisons)


def judge(
    claims: Sequence[Claim], level: float = LEVEL, earlier: Mapping[str, Decision] | None = None, *, partial: bool = False
) -> list[Judged]:
    """Give every claim of a figure its verdict.

    A claim over seeds is decided if its two-sided p-value, after Holm's correction over the figure's claims, is at most 1 - level.
    Claims with one seed cannot be decided, so they are no part of the family, nor are those that an earlier look decided with the same
    evidence: they keep their verdict. If no earlier look was wrong, all true hypotheses are still in the family, so that this look
    is wrong with probability at most 1 - level, and all looks together with at most the sum of theirs.

    Args:
        claims: Claims of one figure.
        level: Confidence for the family.
        earlier: Text of a claim to the decision of an earlier look, with fewer seeds of other claims.
        partial: True if runs of the figure are missing.

    Returns:
        Verdicts in the order of the claims.
    """
    kept = {claim.text: past for claim in claims if (past := (earlier or {}).get(claim.text)) is not None and past.of(claim)}
    tested = [claim for claim in claims if (claim.seeds or 0) > 1 and claim.text not in kept]
    found = [claim.p_value(incomplete=partial and claim.grows) for claim in tested]
    decided = {id(claim): (p, right, adjusted) for claim, (p, right), adjusted in zip(tested, found, holm([p for p, _ in found]), strict=True)}  # fmt: skip
    judged = []
    for claim in claims:
        if isinstance(claim.evidence, Exact):
            judged.append(Judged(claim, HOLDS if claim.evidence.holds else FAILS))
        elif claim.text in kept:
            past = kept[claim.text]
            judged.append(Judged(claim, past.verdict, claim.p_value()[0], past.p_holm, past.look))
        elif id(claim) in decided:
            p, right, adjusted = decided[id(claim)]
            verdict: Verdict = (HOLDS if right else FAILS) if adjusted <= 1 - level + 1e-12 else UNDECIDED
            judged.append(Judged(claim, verdict, p, adjusted, incomplete=partial and claim.grows))
        else:
            judged.append(Judged(claim, UNTESTED if isinstance(claim.evidence, NotTested) else UNDECIDED))
    return judged


def paired(
    upper: Mapping[Any, float],
    lower: Mapping[Any, float],
    margin: float = LEAD,
    *,
    unit: str = "points",
    name: str = "",
    test: Test = "t",
) -> Comparison:
    """Compare two systems on the seeds that both have.

    Args:
        upper: Seed to the value of the system that the claim puts above.
        lower: Seed to the value of the other.
        margin: Smallest mean difference that agrees with the claim.
        unit: Unit of the values.
        name: Where it was measured.
        test: Test of `results.statistics`.

    Returns:
        The comparison of the differences.

    Raises:
        ValueError: If no seed is common to both.
    """
    common = [seed for seed in upper if seed in lower]
    if not common:
        raise ValueError(f"{name or 'comparison'}: no common seed of {sorted(map(str, upper))} and {sorted(map(str, lower))}")
    return Comparison({seed: upper[seed] - lower[seed] for seed in common}, margin, unit, name, test)


def share(rounds: Mapping[Any, Sequence[bool]], margin: float = ALWAYS, *, name: str = "") -> Comparison:
    """Compare the share of rounds with a property with a margin; a seed is one independent unit.

    Args:
        rounds: Seed to True for each of its rounds with the property.
        margin: Smallest share that agrees with the claim.
        name: Where it was measured.

    Returns:
        The comparison of the seeds' shares.
    """
    shares = {seed: math.fsum(found) / len(found) for seed, found in rounds.items()}
    return Comparison(shares, margin, "of the rounds", name, "share")
