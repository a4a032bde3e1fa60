"""`dpcfl audit`: epsilon from below, out of one recorded run whose clients held canaries; and whether the run's claim stands."""

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

UNSURE = 0.05  # each bound that is shown is wrong with this chance
FALSE_ALARM = 1e-3  # a sound run is accused with at most this chance, however many tests there are
STRAY = 0.05  # how far the taps' sums may be from the release, in units of clip: float32 stays far below it


@dataclass(frozen=True)
class Bounds:
    """What one score says of epsilon, each bound at 95 %; `tail`, and noise over what is stated, of the likelihood alone."""

    view: str
    kind: str
    errors: Errors
    guesses: float
    gdp: float
    tail: float | None
    noise: float | None
    broken: tuple[str, ...]  # the tests that the claim fails


def audit_run(folder: Path, false_alarm: float = FALSE_ALARM) -> AttackResult:
    """Audit a recorded run; `facts["broken"]` names every test that its claim fails, none for a sound run.

    false_alarm: the chance that a sound run fails any. ConfigError for a run without canaries or without a round; Refused and
    LedgerError for one that is not what was signed.
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
    """Bounds at 95 % each, and tests of the claim, of which a sound run fails one with a chance of `false_alarm` at most.

    Each score is tested by guesses and against the nominal trade-off, the likelihood by its tail and its noise as well:
    Bonferroni over all. The bound by mu-GDP is no test of its own: where the nominal curve allows the point that the Gaussian
    one is drawn through, it proves nothing, and where it does not, that test has failed.
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
