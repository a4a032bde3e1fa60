"""Verdicts: p-values against scipy, rates of false decisions by simulation, Holm, and what is never decided."""

from __future__ import annotations

import re

import numpy as np
import pytest
from scipy import stats

from dpcfl_net.reproduce import claims
from dpcfl_net.reproduce.claims import Cause, Claim, Comparison, Decision, Exact, NotTested, judge, paired, share
from dpcfl_net.results import statistics

# Accuracy in points of two systems on five seeds (Student's sleep data, first five pairs of each drug).
ONE, TWO = {0: 0.7, 1: -1.6, 2: -0.2, 3: -1.2, 4: -0.1}, {0: 1.9, 1: 0.8, 2: 1.1, 3: 0.1, 4: -0.1}


def claim(*compared, **more):
    return Claim("a", "1", list(compared), **more)


def test_a_paired_comparison_is_scipys_paired_t():
    one = paired(TWO, ONE, 0.0)
    above, below = one.p_values()
    assert above == pytest.approx(stats.ttest_rel(list(TWO.values()), list(ONE.values()), alternative="greater").pvalue)
    assert below == pytest.approx(stats.ttest_rel(list(TWO.values()), list(ONE.values()), alternative="less").pvalue)
    found = stats.ttest_rel(list(TWO.values()), list(ONE.values())).confidence_interval(0.95)
    assert statistics.interval(list(one.values.values())) == pytest.approx((found.low, found.high))
    assert claim(one).p_value() == (pytest.approx(2 * above), True)


def test_known_values_of_the_paired_t():
    differences = [1.0, 2.0, 3.0]  # t = 2 / (1 / sqrt 3) = 3.4641 on 2 degrees of freedom
    assert statistics.p_values(differences, 0.0)[0] == pytest.approx(0.0370899, abs=1e-6)
    assert statistics.interval(differences) == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), abs=1e-5)
    assert [statistics.seeds_needed(values, 0.0) for values in ([1.0], [1.0, 3.0], [10.0, 10.1])] == [None, 5, 2]


def test_only_seeds_of_both_systems_are_compared():
    assert paired({0: 3.0, 1: 4.0}, {1: 1.0, 2: 9.0}).values == {1: 3.0}
    with pytest.raises(ValueError, match="no common seed"):
        paired({0: 1.0}, {1: 1.0})


@pytest.mark.parametrize("values", [[50.0], []])
def test_one_seed_never_decides(values):
    one = Comparison(dict(enumerate(values)))
    assert one.p_values() == (1.0, 1.0)
    if values:
        (judged,) = judge([claim(one)])
        assert (judged.verdict, judged.p_holm) == ("undecided", None)


def test_a_claim_is_decided_at_its_margin():
    leads = {seed: 2.0 + 0.1 * (seed % 3) for seed in range(9)}
    verdicts = [judge([claim(Comparison(leads, margin))])[0].verdict for margin in (0.5, 2.1, 5.0)]
    assert verdicts == ["holds", "undecided", "does not hold"]


@pytest.mark.parametrize("test", ["t", "sign", "share"])
@pytest.mark.parametrize("diverged", [np.nan, np.inf, -np.inf])
def test_a_run_that_diverged_leaves_its_claim_undecided(diverged, test):
    """Neither dropped, which would favour the system that diverged, nor hidden behind a comparison that holds."""
    good = Comparison({seed: 3 + 0.01 * seed for seed in range(9)}, 0.5)
    bad = Comparison({**dict.fromkeys(range(9), 1.0), 4: diverged}, 0.5, test=test)
    for compared in ((bad,), (good, bad), (bad, good)):
        judged = judge([claim(*compared), claim(good)])
        assert [one.verdict for one in judged] == ["undecided", "holds"]
        assert all(one.basis and one.document() for one in judged)


def test_every_comparison_must_hold_or_any_of_them():
    good, bad = ({seed: value + 0.01 * seed for seed in range(5)} for value in (3.0, -3.0))
    both = Comparison(good, 0.5), Comparison(bad, 0.5)
    assert judge([claim(*both)])[0].verdict == "does not hold"
    assert judge([claim(*both, every=False)])[0].verdict == "holds"
    assert claim(*both).p_value()[0] == pytest.approx(2 * 2 * both[1].p_values()[1])  # two-sided, of two comparisons


def test_a_part_of_a_figure_concludes_nothing_from_all_comparisons():
    """Missing runs may refute "at every epsilon" and confirm "at some epsilon"; what one comparison settles is settled."""
    good, bad = (Comparison({seed: value + 0.01 * seed for seed in range(5)}, 0.5) for value in (3.0, -3.0))
    shown = [(one, every) for one in (good, bad) for every in (True, False)]
    claims = [claim(one, every=every, grows=True) for one, every in shown]
    assert [one.verdict for one in judge(claims)] == ["holds", "holds", "does not hold", "does not hold"]
    judged = judge(claims, partial=True)
    assert [one.verdict for one in judged] == ["undecided", "holds", "does not hold", "undecided"]
    assert all("comparisons are missing" in one.basis for one in judged)
    near = claim(Comparison({seed: 1.0 + (-1) ** seed for seed in range(4)}, 0.5), grows=True)
    told = [judge([near], partial=partial)[0].basis for partial in (False, True)]
    assert ["would decide" in basis for basis in told] == [True, False]  # more seeds of a part settle nothing
    (none,) = judge([claim(grows=True)], partial=True)
    assert (none.verdict, none.basis) == ("undecided", "")
    (whole,) = judge([claim(good)], partial=True)  # it has one comparison whatever else was run
    assert (whole.verdict, "comparisons are missing" in whole.basis) == ("holds", False)


def test_values_without_spread_need_six_seeds():
    assert [judge([claim(Comparison(dict.fromkeys(range(n), 3.0), 0.5))])[0].verdict for n in (5, 6)] == ["undecided", "holds"]


@pytest.mark.parametrize("margin", [0.5, 1.25, 2.0])
def test_differences_that_are_equal_up_to_rounding_have_no_spread(margin):
    """Of records that are counted, equal differences are common; a t of 1e15 would decide them with two seeds."""
    right = {0: 190, 1: 233, 2: 217, 3: 129, 4: 211, 5: 98}  # of 320 test records; 4 more are 1.25 points
    one = paired({s: 100 * ((n + 4) / 320) for s, n in right.items()}, {s: 100 * (n / 320) for s, n in right.items()}, margin)
    values = list(one.values.values())
    assert len(set(values)) > 1
    assert statistics.interval(values) is None
    assert statistics.seeds_needed(values, margin) is None
    assert one.p_values() == {0.5: (0.5**6, 1.0), 1.25: (1.0, 1.0), 2.0: (1.0, 0.5**6)}[margin]
    assert claim(one).p_value()[0] == min(1.0, 2 * min(one.p_values()))  # ties on all seeds: both sides have a p of 1
    few = Comparison({seed: one.values[seed] for seed in range(3)}, margin)
    assert judge([claim(few)])[0].verdict == "undecided"


def test_exact_claims_and_untested_ones_need_no_seeds():
    why = NotTested("rebalancing moved no label")
    judged = judge([Claim("a", "1", Exact(True)), Claim("b", "1", Exact(False)), Claim("c", "1", why)])
    assert [one.verdict for one in judged] == ["holds", "does not hold", "not tested"]
    assert [one.exact for one in judged] == [True, True, False]
    assert judged[2].basis == "rebalancing moved no label"


def test_a_cause_is_measured_or_called_a_guess_and_shown_only_for_failures():
    guess, shown = Cause("more noise"), Cause("more noise", "run 7: 3.2 points")
    failed = [judge([Claim("a", "1", Exact(False), cause)])[0] for cause in (guess, shown)]
    assert failed[0].line().endswith("; cause: a guess: more noise")
    assert failed[1].line().endswith("; cause: more noise (measured: run 7: 3.2 points)")
    assert judge([Claim("a", "1", Exact(True), guess)])[0].cause == ""


def test_holm_is_the_step_down_of_known_values():
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([]) == []


def test_holm_covers_the_claims_of_a_figure_that_seeds_could_decide():
    weak = dict(enumerate([1.0, 2.0, 3.0]))  # p = .074 two-sided
    strong = {seed: 1 + 0.01 * seed for seed in range(3)}
    alone = judge([claim(Comparison(strong))])[0]
    family = judge(
        [claim(Comparison(strong)), claim(Comparison(weak)), claim(Comparison({0: 5.0})), Claim("x", "1", Exact(True))]
    )
    assert family[0].p_holm == pytest.approx(2 * alone.p_value)  # two claims have more than one seed
    assert [one.verdict for one in family] == ["holds", "undecided", "undecided", "holds"]


def test_a_decision_that_is_kept_has_its_own_p_value_and_the_correction_of_its_look():
    strong = claim(Comparison({seed: 1 + 0.01 * seed for seed in range(3)}))
    alone, past = judge([strong])[0], [one.document() for one in strong.comparisons]
    earlier = {"a": Decision(1, "holds", 0.04, past)}
    (kept,) = judge([strong], earlier=earlier)
    assert (kept.p_value, kept.p_holm, kept.earlier_look) == (alone.p_value, 0.04, 1)
    assert "p 0.04 after Holm at look 1" in kept.basis


def test_shares_count_a_seed_once():
    wrong = share({seed: [False] * 20 for seed in range(3)})
    assert wrong.p_values()[1] < 0.01
    lost = judge([claim(wrong)])[0]
    assert (lost.verdict, "seeds, even without Holm" in lost.basis) == ("does not hold", False)  # it asks for no seeds
    right = share({seed: [True] * 20 for seed in range(10)})
    assert right.p_values()[0] == pytest.approx(0.9**10)  # not 0.9**200
    mixed = Comparison({0: 0.25, 1: 0.5, 2: 0.75, 3: 0.0}, 0.9, test="share")  # Hoeffding's bound at a mean of .375
    assert mixed.p_values() == (1.0, pytest.approx((0.9 / 0.375) ** 1.5 * (0.1 / 0.625) ** 2.5))
    assert statistics.interval([1.0, 0.0, 1.0, 1.0], "share") == pytest.approx((0.19412, 0.99369), abs=1e-4)


def test_recoveries_are_compared_by_sign():
    one = paired(dict.fromkeys(range(7), 1.0), {s: float(s == 0) for s in range(7)}, 0.0, test="sign")
    assert one.p_values()[0] == pytest.approx(0.5**6)
    assert "6 above and 0 below" in one.words()


def test_undecided_claims_say_how_many_seeds_would_decide():
    values = {seed: 1.0 + (-1) ** seed for seed in range(4)}  # mean 1, margin .5
    judged = judge([claim(Comparison(values, 0.5))])[0]
    needed = statistics.seeds_needed(list(values.values()), 0.5)
    assert f"about {needed} seeds would decide" in judged.basis
    spread = np.std(list(values.values()), ddof=1)
    width = [stats.t.ppf(0.975, n - 1) * spread / n**0.5 for n in (needed - 1, needed)]
    assert width[0] >= 0.5 > width[1]


def stretched(values, count):
    """The mean and the spread of some values over another number of seeds."""
    shape = np.linspace(-1, 1, count)
    return dict(enumerate(np.mean(list(values)) + np.std(list(values), ddof=1) * shape / np.std(shape, ddof=1)))


@pytest.mark.parametrize("every", [True, False])
def test_the_seeds_that_decide_are_those_of_the_side_that_would_decide(every):
    """One comparison beyond its margin decides the claim: another one that lies close to its margin needs no more seeds."""
    sign = -1 if every else 1
    beyond, close = ({seed: sign * (mean + (-1) ** seed) for seed in range(4)} for mean in (1.5, -0.3))

    def judged(count):
        compared = [Comparison(stretched(own.values(), count)) for own in (beyond, close)]
        return judge([claim(*compared, every=every)])[0]

    needed = int(re.search(r"about (\d+) seeds would decide", judged(4).basis).group(1))
    assert [judged(count).verdict for count in (needed - 1, needed)] == ["undecided", "does not hold" if every else "holds"]
    assert needed < statistics.seeds_needed(list(close.values()), 0.0)


@pytest.mark.parametrize("every", [True, False])
def test_of_several_comparisons_the_fastest_decides_or_the_slowest_is_waited_for(every):
    """One comparison beyond its margin suffices, with Bonferroni's correction for the two; within it, both are needed."""
    values = [{seed: mean + (-1) ** seed for seed in range(4)} for mean in (0.5, 0.8)]
    needed = [statistics.seeds_needed(list(own.values()), 0.0) for own in values]
    assert needed[0] > needed[1]
    inside, beyond = (1, -1) if every else (-1, 1)

    def told(sign):
        compared = [Comparison({seed: sign * value for seed, value in own.items()}) for own in values]
        return int(re.search(r"about (\d+) seeds would decide", judge([claim(*compared, every=every)])[0].basis).group(1))

    assert told(inside) == needed[0]
    assert told(beyond) == statistics.seeds_needed(list(values[1].values()), 0.0, 0.975) > needed[1]


def test_a_claim_that_holm_alone_leaves_undecided_asks_for_no_seeds_that_it_has():
    values = [1.0 + (-1) ** seed for seed in range(4)]
    needed = statistics.seeds_needed(list(values), 0.5)
    enough = claim(Comparison(stretched(values, needed), 0.5))
    assert statistics.seeds_needed(list(enough.comparisons[0].values.values()), 0.5) == needed
    others = [claim(Comparison({seed: (-1.0) ** seed for seed in range(4)})) for _ in range(9)]
    assert judge([enough])[0].verdict == "holds"
    judged = judge([enough, *others])[0]
    assert (judged.verdict, "would decide" in judged.basis) == ("undecided", False)


def test_seeds_are_not_foretold_where_a_comparison_that_is_needed_has_none():
    near, by_sign = Comparison({seed: 0.6 + (-1) ** seed for seed in range(4)}), Comparison({0: 1.0, 1: 1.0}, test="sign")
    assert "would decide" in judge([claim(near)])[0].basis
    assert "would decide" not in judge([claim(near, by_sign)])[0].basis


DRAWS = {
    "normal": lambda rng, size: rng.standard_normal(size),
    "uniform": lambda rng, size: rng.uniform(-1, 1, size),
    "difference of skewed": lambda rng, size: rng.exponential(size=size) - rng.exponential(size=size),
}


@pytest.mark.parametrize("shape", DRAWS)
@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_intervals_cover_and_false_alarms_stay_below_the_level(shape, seeds):
    """The mean sits on the margin: both verdicts would be false, and a t interval covers in 95 %."""
    values = DRAWS[shape](np.random.default_rng(seeds), (20_000, seeds))
    t = np.abs(values.mean(1)) / (values.std(1, ddof=1) / np.sqrt(seeds))
    false = float((t > stats.t.ppf(0.975, seeds - 1)).mean())
    low, high = (0.045, 0.055) if shape == "normal" else (0.02, 0.08)  # t is exact for normal differences only
    assert low < false < high
    for row in values[:25]:  # the vectorised rule above is the one that verdicts use
        decided = judge([claim(Comparison(dict(enumerate(row))))])[0].verdict != "undecided"
        assert decided == (abs(row.mean()) / (row.std(ddof=1) / np.sqrt(seeds)) > stats.t.ppf(0.975, seeds - 1))


def test_a_bootstrap_of_five_seeds_would_cover_too_rarely():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2000, 5))
    again = values[:, rng.integers(0, 5, (400, 5))].mean(2)
    low, high = np.quantile(again, [0.025, 0.975], axis=1)
    assert ((low < 0) & (high > 0)).mean() < 0.88


def test_a_figure_of_false_claims_rarely_has_a_verdict():
    """Twelve claims whose true mean is the margin: Holm keeps the chance of any verdict near 5 %; without it, it is 46 %."""
    rng = np.random.default_rng(1)
    p = 2 * stats.t.sf(np.abs(t_of(rng.standard_normal((3000, 12, 4)))), 3)
    assert np.mean([min(statistics.holm(row)) <= 0.05 for row in p.tolist()]) == pytest.approx(0.05, abs=0.012)
    assert (p.min(1) <= 0.05).mean() > 0.4


def t_of(values):
    return values.mean(-1) / (values.std(-1, ddof=1) / np.sqrt(values.shape[-1]))


def test_shares_with_whole_seeds_that_fail_together_raise_no_false_alarm():
    """A true share of .9 on the margin, where a seed's rounds are all right or all wrong: the worst dependence."""
    rng = np.random.default_rng(2)
    right = (rng.random((2000, 40)) < 0.9).astype(float)
    split = np.where(right[:, :20] == right[:, 20:], right[:, :20], 0.5)  # half of the rounds right: no longer 0 or 1
    for shares in (right, split):
        p = [statistics.p_values(row, 0.9, "share") for row in shares.tolist()]
        assert np.mean([2 * min(pair) <= 0.05 for pair in p]) < 0.06


def test_verdicts_are_four():
    assert claims.VERDICTS == ("holds", "does not hold", "undecided", "not tested")


def test_equal_means_differ_by_zero_in_words():
    one = paired({0: 0.1 + 0.2, 1: 0.5}, {0: 0.3, 1: 0.5})
    assert sum(one.values.values()) != 0  # rounding errors
    assert one.words().startswith("0 points, ")
    assert paired({0: 0.3, 1: 0.5}, {0: 0.1 + 0.2, 1: 0.5}).words().startswith("0 points, ")


def test_words_of_a_comparison_name_where_it_was_measured_and_its_numbers():
    mean, half = 1.24, 2.776445 * 0.850294 / 5**0.5  # t of 4 degrees of freedom, standard deviation of the differences
    ends = f"{mean - half:.3g} to {mean + half:.3g}"
    assert paired(TWO, ONE, 0.5, name="drug 2").words() == f"drug 2: 1.24 points, 95% interval {ends}, margin 0.5, 5 seeds"
    assert paired(TWO, {0: 0.0}, 0.5, unit="").words() == "1.9, margin 0.5, 1 seed"


@pytest.mark.parametrize(
    ("margin", "test", "fewest"), [(0.9, "share", 36), (0.95, "share", 72), (0.5, "share", 6), (0.0, "sign", 6)]
)
def test_a_claim_that_too_few_seeds_can_decide_says_so(margin, test, fewest):
    """With all values right, 5 of 5 or 35 of 35 seeds: undecided until the number that the text names."""

    def judged(count, value=1.0):
        return judge([claim(Comparison(dict.fromkeys(range(count), value), margin, test=test))])[0]

    assert [judged(count).verdict for count in (fewest - 1, fewest)] == ["undecided", "holds"]
    words = f"it cannot hold with fewer than {fewest} seeds, even without Holm"
    assert [words in judged(count).basis for count in (2, fewest - 1, fewest)] == [True, True, False]
    assert judged(fewest, margin).verdict == "undecided"
    assert words not in judged(fewest, margin).basis


def test_the_fewest_seeds_of_a_claim_regard_all_its_comparisons():
    strict, loose = (Comparison(dict.fromkeys(range(8), 1.0), margin, test="share") for margin in (0.95, 0.5))
    assert [claim(strict, loose, every=every).seeds_to_hold() for every in (True, False)] == [72, None]
    few = Comparison(dict.fromkeys(range(6), 1.0), 0.5, test="share")
    assert [claim(few).seeds_to_hold(), claim(strict, few, every=False).seeds_to_hold()] == [None, 7]  # Bonferroni
    assert claim(Comparison({0: 1.0, 1: 2.0})).seeds_to_hold() is None
