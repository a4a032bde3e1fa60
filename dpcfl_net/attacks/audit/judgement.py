"""Lower bounds on epsilon from the scores of an audit, and the tests of the claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpcfl_net.attacks.audit.bounds import TAIL, Errors, Noise, Tail, TradeOff, by_gdp, by_guesses
from dpcfl_net.attacks.audit.gather import Scores

ALPHA = 0.05  # each displayed bound is wrong with this probability


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

    @property
    def tests(self) -> int:
        """Number of tests of the claim by this score."""
        return 2 + (self.tail is not None) + (self.noise is not None)


def judge(
    scores: Sequence[Scores], nominal: TradeOff, epsilon: float, delta: float, false_alarm: float, alpha: float = ALPHA
) -> list[Bounds]:
    """Compute bounds and test the claim.

    Each score is tested by guesses and against the nominal trade-off; one with totals also by its tail, one with squares by its noise. All tests
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
    tests = sum(2 + (score.totals is not None) + (score.squares is not None) for score in scores)
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
