"""`dpcfl audit`: lower bound on epsilon from one recorded run with canaries, and a test of the run's claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dpcfl_net.attacks.audit.bounds import TAIL, Errors, Noise, Tail, TradeOff, by_gdp, by_guesses
from dpcfl_net.attacks.audit.gather import MAX_DISCREPANCY, Gatherer, Scores
from dpcfl_net.attacks.audit.page import page
from dpcfl_net.attacks.audit.record import Record
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.results.attack_results import AttackResult

ALPHA = 0.05  # each displayed bound is wrong with this probability
FALSE_ALARM = 1e-3  # maximum probability that a sound run fails any test


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on epsilon from one score, each at the confidence that `judge` was asked for.

    Attributes:
        view: Name of the view.
        kind: Name of the score.
        errors: Errors of the test "score above 0".
        guesses: Bound from guesses.
        gdp: Bound from mu-GDP.
        tail: Bound from the far tail; likelihood only.
        noise: Measured over stated deviation of the noise; likelihood only.
        broken: Tests that the claim fails.
    """

    view: str
    kind: str
    errors: Errors
    guesses: float
    gdp: float
    tail: float | None
    noise: float | None
    broken: tuple[str, ...]


def audit_run(folder: Path, false_alarm: float = FALSE_ALARM) -> AttackResult:
    """Audit a recorded run.

    Args:
        folder: Run folder.
        false_alarm: Maximum probability that a sound run fails any test.

    Returns:
        The result; `facts["broken"]` names every test that the claim fails.

    Raises:
        ConfigError: If the run has no canaries, or no audited client was trained yet.
        Refused: If the job or the canaries are not those that were signed.
        LedgerError: If a ledger is broken.
    """
    record = Record(folder)
    gatherer = Gatherer(record)
    if not gatherer.scores:
        raise ConfigError(f"{folder} holds no training of an audited client yet")
    plans = {repr(events): events for events in map(record.events, record.audit.clients)}
    nominal, delta = TradeOff.of(list(plans.values())), record.protocol.privacy.delta
    bounds = judge(gatherer.scores, nominal, record.epsilon, delta, false_alarm)
    broken = [f"{test} ({each.view}, {each.kind})" for each in bounds for test in each.broken]
    if gatherer.discrepancy > MAX_DISCREPANCY + gatherer.rounding:
        broken.append(f"releases are not the sums of the taped steps: off by {gatherer.discrepancy:.3g} clip norms")
    facts = {
        "claimed": record.epsilon, "delta": delta, "broken": broken, "false_alarm": false_alarm,
        "canaries": record.audit.canaries, "clients": record.audit.clients, "discrepancy": gatherer.discrepancy,
        "rounding": gatherer.rounding,
        "bounds": [asdict(each) for each in bounds],
    }  # fmt: skip
    return page(record, bounds, nominal, gatherer.notes, facts, ALPHA)


def judge(
    scores: Sequence[Scores], nominal: TradeOff, epsilon: float, delta: float, false_alarm: float, alpha: float = ALPHA
) -> list[Bounds]:
    """Compute bounds and test the claim.

    Each score is tested by guesses and against the nominal trade-off; the likelihood also by its tail and its noise. All tests
    share one level (Bonferroni). The mu-GDP bound is not a test: where the nominal curve allows the point of the
    Gaussian curve, it proves nothing; elsewhere the trade-off test has failed already.

    Args:
        scores: Scores of the canaries.
        nominal: Trade-off curve of the charges in the ledgers.
        epsilon: Claimed epsilon.
        delta: Claimed delta.
        false_alarm: Maximum probability that a sound run fails any test.
        alpha: 1 - confidence of each bound.

    Returns:
        Bounds and failed tests of each score.
    """
    tests = sum(2 if score.totals is None else 4 for score in scores)
    return [_judged(score, nominal, epsilon, delta, false_alarm / tests, alpha) for score in scores]


def _judged(scores: Scores, nominal: TradeOff, epsilon: float, delta: float, level: float, alpha: float) -> Bounds:
    errors, broken, tail_bound, ratio = Errors.of(scores.values, scores.bits), [], None, None
    if by_guesses(scores.values, scores.bits, delta, level) > epsilon:
        broken.append("guesses")
    if nominal.refuted(*errors.at_most(level)):
        broken.append("trade-off")
    if scores.totals is not None:
        tail = Tail.of(scores.totals, scores.bits)
        tail_bound = tail.epsilon(delta, alpha)
        if tail.at_least(level) > nominal.most_true_positives(TAIL):
            broken.append("tail")
    if scores.squares is not None and scores.sums is not None:
        noise = Noise(float(scores.squares[~scores.bits].sum()), int(scores.sums[~scores.bits].sum()))
        ratio = noise.ratio
        if noise.too_little(level):
            broken.append("noise")
    guesses = by_guesses(scores.values, scores.bits, delta, alpha)
    return Bounds(scores.view, scores.kind, errors, guesses, by_gdp(errors, delta, alpha), tail_bound, ratio, tuple(broken))
