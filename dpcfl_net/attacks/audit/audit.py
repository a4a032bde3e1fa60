"""`dpcfl audit`: lower bounds on epsilon from a recorded run with canaries, and tests of its claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dpcfl_net.attacks.audit.bounds import TAIL, Errors, Noise, Tail, TradeOff, by_gdp, by_guesses
from dpcfl_net.attacks.audit.gather import Gatherer, Scores
from dpcfl_net.attacks.audit.page import page
from dpcfl_net.attacks.audit.record import Record
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.results.attack_results import AttackResult

UNSURE = 0.05  # error probability of each bound shown
FALSE_ALARM = 1e-3  # probability that a sound run fails any test
STRAY = 0.05  # largest difference of taped sums and release, in units of clip; float32 errors are far smaller


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on epsilon from one score, each at 95 % confidence.

    `tail` and the ratio of measured to stated noise are of the likelihood score only.
    """

    view: str
    kind: str
    errors: Errors
    guesses: float
    gdp: float
    tail: float | None
    noise: float | None
    broken: tuple[str, ...]  # failed tests


def audit_run(folder: Path, false_alarm: float = FALSE_ALARM) -> AttackResult:
    """Audit a recorded run.

    Args:
        folder: Run folder.
        false_alarm: Probability that a sound run fails any test.

    Returns:
        The result; `facts["broken"]` names the failed tests.

    Raises:
        ConfigError: If the run has no canaries or no round.
        Refused: If it is not what was signed.
        LedgerError: If a ledger is damaged.
    """
    record = Record(folder)
    gatherer = Gatherer(record)
    if not gatherer.scores:
        raise ConfigError(f"{folder} holds no training of an audited client yet")
    plans = {repr(events): events for events in map(record.events, record.audit.clients)}
    nominal, privacy = TradeOff.of(list(plans.values())), record.protocol.privacy
    found = judge(gatherer.scores, nominal, privacy.epsilon, privacy.delta, false_alarm)
    broken = [f"{test} ({bounds.view}, {bounds.kind})" for bounds in found for test in bounds.broken]
    if gatherer.stray > STRAY:
        broken.append(f"releases are not the sums of the taped steps: off by {gatherer.stray:.3g} clip norms")
    facts = {
        "claimed": privacy.epsilon, "delta": privacy.delta, "broken": broken, "false_alarm": false_alarm,
        "canaries": record.audit.canaries, "clients": record.audit.clients, "stray": gatherer.stray,
        "bounds": [asdict(bounds) for bounds in found],
    }  # fmt: skip
    return page(record, found, nominal, gatherer.notes, facts, UNSURE)


def judge(scores: Sequence[Scores], nominal: TradeOff, epsilon: float, delta: float, false_alarm: float) -> list[Bounds]:
    """Compute bounds and tests of the claim.

    Each score is tested by guesses and against the nominal trade-off; the likelihood also by its tail and its noise, with Bonferroni
    correction over all. The mu-GDP bound is no separate test: where the nominal curve allows its point it proves nothing, and where
    not, the trade-off test fails.

    Args:
        scores: Scores of the canaries.
        nominal: Claimed trade-off.
        epsilon: Claimed epsilon.
        delta: Claimed delta.
        false_alarm: Probability that a sound run fails any test.
    """
    tests = sum(2 if score.totals is None else 4 for score in scores)
    return [_judged(score, nominal, epsilon, delta, false_alarm / tests) for score in scores]


def _judged(scores: Scores, nominal: TradeOff, epsilon: float, delta: float, alpha: float) -> Bounds:
    errors, broken, far, ratio = Errors.of(scores.values, scores.bits), [], None, None
    if by_guesses(scores.values, scores.bits, delta, alpha) > epsilon:
        broken.append("guesses")
    if nominal.refuted(*errors.at_most(alpha)):
        broken.append("trade-off")
    if scores.totals is not None:
        tail = Tail.of(scores.totals, scores.bits)
        far = tail.epsilon(delta, UNSURE)
        if tail.at_least(alpha) > nominal.most_true_positives(TAIL):
            broken.append("tail")
    if scores.squares is not None and scores.sums is not None:
        noise = Noise(float(scores.squares[~scores.bits].sum()), int(scores.sums[~scores.bits].sum()))
        ratio = noise.ratio
        if noise.too_little(alpha):
            broken.append("noise")
    guesses = by_guesses(scores.values, scores.bits, delta, UNSURE)
    return Bounds(scores.view, scores.kind, errors, guesses, by_gdp(errors, delta, UNSURE), far, ratio, tuple(broken))
