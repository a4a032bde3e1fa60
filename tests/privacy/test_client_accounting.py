"""Client-level accounting: samples of fixed size, draws by loss, and sensitivities found by trying every rebalancing."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from conftest import ROOT, dpcfl

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.federation.claim import plan_events
from dpcfl_net.privacy.accounting.accountant import calibrate, deltas, epsilon, epsilon_by_prefix
from dpcfl_net.privacy.accounting.document import account
from dpcfl_net.privacy.client_level import block_norm, joint_noise, labels_first_sensitivity
from dpcfl_net.privacy.client_selection import (
    draw_epsilon,
    paper_events,
    selection_epsilon,
    unconditional_epsilon,
)
from dpcfl_net.privacy.events.bounded_range_selection import BoundedRangeSelection
from dpcfl_net.privacy.events.fixed_size_gaussian import FixedSizeGaussian
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.privacy.events.unprotected import Unprotected
from dpcfl_net.privacy.ledger.entries import FIRST_PREV, Entry, digest, verify_lines
from dpcfl_net.privacy.slots import CentralSlot

DELTA = 1e-3
EXAMPLE = ROOT / "configs" / "account" / "rr_cluster_epsilon2.json"
SAMPLES = FixedSizeGaussian(1.5, 100, 1000, 50)


def spent(*events, accountant="pld", delta=DELTA):
    return epsilon(events, delta, "replace-one", accountant)


# Samples of fixed size without replacement


@pytest.mark.parametrize(
    ("steps", "target", "noise"),
    [
        pytest.param(100, 2, 1.81249, marks=pytest.mark.slow),  # Also the example document's.
        pytest.param(100, 4, 1.18805, marks=pytest.mark.slow),
        (100, 8, 0.830891),
        (200, 2, 2.40422),
        pytest.param(200, 4, 1.52151, marks=pytest.mark.slow),
        pytest.param(200, 8, 1.02756, marks=pytest.mark.slow),
    ],
)
def test_noise_of_samples_without_replacement(steps, target, noise):
    assert spent(FixedSizeGaussian(1.001 * noise, 100, 1000, steps)) < target
    assert spent(FixedSizeGaussian(0.999 * noise, 100, 1000, steps)) > target


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_calibration_meets_the_target_and_no_less_noise_would(accountant):
    noise = calibrate(lambda z: [FixedSizeGaussian(z, 20, 200, 40)], 3, DELTA, "replace-one", accountant)
    assert spent(FixedSizeGaussian(noise, 20, 200, 40), accountant=accountant) <= 3
    assert spent(FixedSizeGaussian(noise / 1.0005, 20, 200, 40), accountant=accountant) > 3


def hockey_stick(first, second, noise, y):
    """Exact divergence of two mixtures of Gaussians, {mean: weight}, at epsilon y: numerical integration."""
    x = np.linspace(-14 * noise, 14 * noise, 40_001)

    def density(means):
        bells = [w * np.exp(-0.5 * ((x - mean) / noise) ** 2) for mean, w in means.items()]
        return np.sum(bells, axis=0) / (noise * math.sqrt(2 * math.pi))

    return np.trapezoid(np.maximum(density(first) - math.exp(y) * density(second), 0), x)


def sums_of_samples(values, size):
    chosen = [sum(sample) for sample in itertools.combinations(values, size)]
    return {total: count / len(chosen) for total, count in Counter(chosen).items()}


def test_no_data_tell_more_than_the_profile_and_some_tell_as_much():
    """Every population of 4 with values -1, 0, 1, samples of 2, noise 2: sensitivity 2 when a value is replaced."""
    from dpcfl_net.privacy.events.fixed_size_gaussian import fixed_size_losses

    profile = fixed_size_losses(1.0, 0.5, 1e-3)
    for y in (-1.0, -0.2, 0.0, 0.3, 1.0, 2.0):
        bound = profile.delta(y)
        found = [
            hockey_stick(sums_of_samples((mine, *others), 2), sums_of_samples((theirs, *others), 2), 2.0, y)
            for others in itertools.combinations_with_replacement((-1, 0, 1), 3)
            for mine, theirs in itertools.permutations((-1, 0, 1), 2)
        ]
        assert max(found) == pytest.approx(bound, rel=1e-5)
        assert max(found) <= bound * (1 + 1e-7)


@pytest.mark.parametrize(("noise", "rate"), [(0.5, 0.3), (1.8, 0.1), (4.0, 0.9)])
def test_the_profile_is_the_worse_of_the_librarys_two_directions(noise, rate):
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    from dpcfl_net.privacy.events.fixed_size_gaussian import fixed_size_losses

    profile = fixed_size_losses(noise, rate, 1e-4)
    y = np.array([-2.0, -0.5, -0.1, 0.0, 0.1, 0.5, 2.0])
    either = [
        GaussianPrivacyLoss(noise, sampling_prob=rate, adjacency_type=kind).get_delta_for_epsilon(y)
        for kind in (AdjacencyType.ADD, AdjacencyType.REMOVE)
    ]
    assert np.array([profile.delta(v) for v in y]) == pytest.approx(np.maximum(*either), rel=1e-6, abs=1e-12)


def test_never_below_what_members_of_some_kinds_really_lose():
    """Others at -C: add/remove with sensitivity 2C. Others at 0: one member moves from +C to -C."""
    event = FixedSizeGaussian(1.2, 10, 100, 60)
    for delta in (1e-2, 1e-5):
        ours = spent(event, delta=delta)
        assert ours > epsilon([SampledGaussian(1.2, 0.1, 60)], delta, "zero-out")
        assert ours > epsilon([SampledGaussian(2.4, 0.1, 60)], delta, "replace-one")
        assert ours < spent(event, accountant="rdp", delta=delta)


def test_another_client_alone_may_learn_more_from_its_own_turns_than_is_claimed():
    """With 1 of 2 clients in a sample, the other one knows the sample: each round that it misses is a release without sampling."""
    rounds, delta = 20, 1e-2
    z = calibrate(lambda noise: [FixedSizeGaussian(noise, 1, 2, rounds)], 5, delta, adjacency="replace-one")
    turns = np.array([math.comb(rounds, k) / 2**rounds for k in range(rounds + 1)])
    # A replaced client moves a sum by 1 here, by which the noise of samples of fixed size is measured.
    known = [0.0, *(deltas([SampledGaussian(2 * z, 1.0, k)], [7.13, 7.14], "replace-one") for k in range(1, rounds + 1))]
    above, below = sum(share * found for share, found in zip(turns, known, strict=True))
    assert above > delta > below


def test_rdp_is_that_of_dp_accounting():
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    from dpcfl_net.privacy.accounting.event_counts import EventCounts
    from dpcfl_net.privacy.accounting.rdp import ORDERS, rdp_epsilon

    other = RdpAccountant(ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE)
    sampled = dp_accounting.SampledWithoutReplacementDpEvent(1000, 100, dp_accounting.GaussianDpEvent(1.5))
    exact = rdp_epsilon(EventCounts().add([SAMPLES]).merged(), DELTA)
    assert exact == pytest.approx(other.compose(sampled, 50).get_epsilon(DELTA), rel=1e-9)
    assert exact <= spent(SAMPLES, accountant="rdp") <= exact * (1 + 1e-6)


def test_everybody_in_the_sample_is_the_plain_mechanism():
    whole = spent(FixedSizeGaussian(2.0, 30, 30, 4))
    assert whole == pytest.approx(spent(SampledGaussian(4.0, 1.0, 4)), rel=2e-3)
    assert whole == pytest.approx(spent(FixedSizeGaussian(2.0, 2999, 3000, 4)), rel=5e-3)


def test_epsilon_follows_noise_sample_and_steps():
    for less, more in (
        (replace(SAMPLES, noise_multiplier=1.6), SAMPLES),
        (replace(SAMPLES, sample_size=90), SAMPLES),
        (SAMPLES, replace(SAMPLES, population=900)),
        (SAMPLES, replace(SAMPLES, steps=55)),
    ):
        assert spent(less) < spent(more)
    assert spent(replace(SAMPLES, steps=0)) == 0
    assert spent(replace(SAMPLES, noise_multiplier=1e-200)) == math.inf
    assert spent(replace(SAMPLES, noise_multiplier=1e200)) < 1e-6


def test_samples_compose_with_other_releases():
    together = [SAMPLES, SampledGaussian(9.0, 1.0, 1), BoundedRangeSelection(0.1, 3)]
    assert spent(SAMPLES) < spent(*together) < spent(SAMPLES) + spent(*together[1:])
    assert spent(SAMPLES, BoundedRangeSelection(0.1, 3), accountant="rdp") > spent(SAMPLES, accountant="rdp")
    assert spent(*[replace(SAMPLES, steps=25)] * 2) == spent(SAMPLES)
    prefixes = epsilon_by_prefix([[event] for event in together], DELTA, "replace-one")
    assert all(before < after for before, after in pairwise(prefixes))
    assert prefixes[0] == pytest.approx(spent(SAMPLES), rel=1e-3)
    assert prefixes[-1] == pytest.approx(spent(*together), rel=1e-12)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"noise_multiplier": 0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"sample_size": 0}, "sample_size"),
        ({"sample_size": 1001}, "sample_size.*1000"),
        ({"sample_size": 10.0}, "sample_size"),
        ({"population": True}, "population"),
        ({"steps": -1}, "steps"),
    ],
)
def test_bad_samples_are_named(change, named):
    with pytest.raises(ValueError, match=named):
        replace(SAMPLES, **change)


def test_other_adjacencies_are_refused_with_the_reason():
    for ask in (
        lambda: epsilon([SAMPLES], DELTA),
        lambda: calibrate(lambda z: [replace(SAMPLES, noise_multiplier=z)], 2, DELTA),
        lambda: epsilon_by_prefix([[SAMPLES]], DELTA),
    ):
        with pytest.raises(ValueError, match=r"replace-one.*makes room"):
            ask()
    with pytest.raises(ValueError, match="SampledGaussian"):
        spent(SAMPLES, SampledGaussian(1.0, 0.1, 1), accountant="rdp")


def test_the_account_command_finds_the_noise_of_a_sampled_round():
    done = dpcfl("account", "--json", EXAMPLE)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["noise_multiplier"] == pytest.approx(1.81249, rel=5e-3)
    assert 1.99 < answer["epsilon"] <= 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"adjacency": "zero-out"}, ["FixedSizeGaussian", "replace-one", "zero-out"]),
        ({"target_epsilon": None}, ["events[0].noise_multiplier", "target_epsilon"]),
        ({"events": [{"type": "FixedSizeGaussian", "sample_size": 5, "steps": 1}]}, ["events[0].population", "missing"]),
        ({"events": [{"type": "FixedSizeGaussian", "sample_size": 5, "population": 4, "steps": 1}]}, ["sample_size", "5"]),
    ],
)
def test_bad_documents_with_samples_say_what_is_wrong(change, said):
    with pytest.raises(ConfigError) as caught:
        account(json.loads(EXAMPLE.read_text()) | change)
    assert all(word in str(caught.value) for word in said)


def test_a_ledger_line_and_a_plan_hold_samples():
    @dataclass(frozen=True)
    class Round:
        def event(self, noise_multiplier, adjacency):
            return FixedSizeGaussian(noise_multiplier, 100, 1000, 1)

    header = Entry(0, "header", owner={"job": "j"}).line(FIRST_PREV)
    debit = Entry(1, "debit", job="j", slots=("round",), events=(SAMPLES,), spent={"round": 1}).line(digest(header))
    assert verify_lines([header, debit], "ledger")[1].events == (SAMPLES,)
    assert plan_events([Round()] * 50, 1.5, "replace-one") == [SAMPLES]


# Poisson samples of clients that keep a state


def with_a_state(noise, rate, angle, away):
    """Laws of two releases with the client, without it and with another one, in the plane of the second one's sum, and the cell's size.

    In round 1 the clients send 1 and -1. In round 2 they turn this by an angle, to the side that tells if they were drawn before; with
    `away` only a client that was drawn does, and the other sends 1 or -1 again.
    """
    first, along, across = (np.linspace(-1 - 6 * noise, 1 + 6 * noise, count) for count in (101, 101, 81))

    def density(mean, at):
        return np.exp(-((at - mean) ** 2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))

    def second(sends, turned):
        drawn = np.outer(density(sends * math.cos(turned), along), density(math.sin(turned), across))
        return (1 - rate) * np.outer(density(0, along), density(0, across)) + rate * drawn

    def run(sends):
        out, drawn = (1 - rate) * density(0, first), rate * density(sends, first)
        return np.multiply.outer(out, second(sends, 0.0 if away else -angle)) + np.multiply.outer(drawn, second(sends, angle))

    nothing = np.multiply.outer(density(0, first), np.outer(density(0, along), density(0, across)))
    return run(1.0), nothing, run(-1.0), math.prod(at[1] - at[0] for at in (first, along, across))


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("angle", [0.0, 0.2, 0.8, math.pi / 2])
def test_a_state_that_tells_earlier_samples_costs_no_more_than_the_samples(angle, away):
    noise, rate, at = 0.7, 0.2, [0.5, 2.0, 4.0]
    one, nothing, other, cell = with_a_state(noise, rate, angle, away)
    for adjacency, pairs in (("zero-out", ((one, nothing), (nothing, one))), ("replace-one", ((one, other),))):
        claimed = deltas([SampledGaussian(noise, rate, 2)], at, adjacency)
        for y, claim in zip(at, claimed, strict=True):
            real = max(float(np.maximum(p - math.exp(y) * q, 0).sum()) * cell for p, q in pairs)
            assert real < claim * (1 + 1e-3)
            assert angle or real > claim * (1 - 5e-3)


# What one round's labels and sums cost together


def test_joint_noise_is_what_composing_spends():
    labels, sums = 5.0, 2.0
    joint = joint_noise(sums, labels)
    assert joint == pytest.approx(1 / math.sqrt(1 / 4 + 1 / 25))
    both = spent(FixedSizeGaussian(sums, 9, 9, 1), FixedSizeGaussian(labels, 9, 9, 1))
    assert both == pytest.approx(spent(FixedSizeGaussian(joint, 9, 9, 1)), rel=2e-3)


def round_of(labels_share):
    return CentralSlot("round", "fixed", 100, 1000, (("labels", labels_share), ("sums", 1 - labels_share)))


def test_a_split_adds_up_again():
    sums, labels = (round_of(0.2).part_noise(1.8, part) for part in ("sums", "labels"))
    assert joint_noise(sums, labels) == pytest.approx(1.8)
    assert labels == 2 * sums
    assert round_of(1e-9).part_noise(1.8, "sums") == pytest.approx(1.8)


@pytest.mark.parametrize("call", [lambda: joint_noise(), lambda: joint_noise(1.0, 0.0), lambda: joint_noise(math.nan)])
def test_bad_noises_are_named(call):
    with pytest.raises(ValueError, match="noise_multipliers"):
        call()


@pytest.mark.parametrize(("noise", "share", "named"), [(0, 0.5, "noise_multiplier"), (1, 0, "share"), (1, 1, "share")])
def test_bad_splits_are_named(noise, share, named):
    with pytest.raises(ValueError, match=named):
        round_of(share).event(noise)


# Sensitivities: updates are +-C with C = 1, a cluster is the tuple of its members' updates


def as_printed(clusters, least):
    """Donors: any member of a cluster of at least `least` (Yang et al., Algorithm 2, lines 12 and 13)."""
    yield [(j, i) for j, members in enumerate(clusters) if len(members) >= least for i in range(len(members))]


def from_surplus(clusters, least):
    """Donors: in each cluster a random choice of as many members as it has above `least`."""
    offers = [
        itertools.combinations([(j, i) for i in range(len(members))], max(len(members) - least, 0))
        for j, members in enumerate(clusters)
    ]
    for offer in itertools.product(*offers):
        yield list(itertools.chain(*offer))


def rebalanced(clusters, least, donors):
    """How often each tuple of the clusters' sums comes out, over all choices of donors; None if there are too few donors."""
    vacant = [j for j, members in enumerate(clusters) for _ in range(least - len(members))]
    outcomes = Counter()
    for pool in donors(clusters, least):
        if len(pool) < len(vacant):
            return None
        for moved in itertools.permutations(pool, len(vacant)):
            sums = [sum(members) for members in clusters]
            for to, (source, i) in zip(vacant, moved, strict=True):
                sums[to] += clusters[source][i]
                sums[source] -= clusters[source][i]
            outcomes[tuple(sums)] += 1
    return outcomes


def squared_distance(first, second):
    """The largest squared distance that the best coupling of two sets of outcomes cannot avoid (infinite Wasserstein)."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import maximum_flow

    size, other = len(first), len(second)
    distances = ((np.array(list(first))[:, None] - np.array(list(second))[None]) ** 2).sum(axis=-1)
    give = np.array(list(first.values())) * second.total()
    take = np.array(list(second.values())) * first.total()
    for bound in np.unique(distances):
        edges = np.zeros((size + other + 2, size + other + 2), dtype=np.int32)
        edges[0, 1 : size + 1], edges[size + 1 : -1, -1] = give, take
        edges[1 : size + 1, size + 1 : -1] = np.where(distances <= bound, give.sum(), 0)
        if maximum_flow(csr_matrix(edges), 0, size + other + 1).flow_value == give.sum():
            return int(bound)
    raise AssertionError("two probability distributions have a coupling")


def populations(clusters, most):
    """All clusterings of up to `most` clients with updates +-1."""
    for sizes in itertools.product(range(most + 1), repeat=clusters):
        if sum(sizes) <= most:
            for plus in itertools.product(*(range(size + 1) for size in sizes)):
                yield tuple((1,) * p + (-1,) * (size - p) for size, p in zip(sizes, plus, strict=True))


def without_one(population):
    for j, members in enumerate(population):
        for update in set(members):
            rest = list(members)
            rest.remove(update)
            yield (*population[:j], tuple(rest), *population[j + 1 :])


def with_one(population):
    for j, members in enumerate(population):
        for update in (1, -1):
            yield (*population[:j], tuple(sorted((*members, update), reverse=True)), *population[j + 1 :])


def worst(clusters, least, most, donors, replaced):
    """The largest squared distance between neighbours with at least clusters * least clients, of at most `most`."""
    known, found = {}, 0

    def outcomes(population):
        if population not in known:
            known[population] = rebalanced(population, least, donors)
        return known[population]

    for population in populations(clusters, most):
        fewer = list(without_one(population))
        others = {other for rest in fewer for other in with_one(rest)} if replaced else set(fewer)
        for other in others:
            enough = min(sum(map(len, population)), sum(map(len, other))) >= clusters * least
            if enough and outcomes(population) and outcomes(other):
                found = max(found, squared_distance(outcomes(population), outcomes(other)))
    return found


@pytest.mark.parametrize(
    ("clusters", "least", "most", "donors", "replaced", "squared"),
    [
        (2, 1, 4, from_surplus, False, 5),
        (2, 2, 5, from_surplus, False, 5),
        (2, 1, 4, from_surplus, True, 8),
        (2, 2, 5, from_surplus, True, 8),
        (3, 1, 5, from_surplus, False, 9),
        (3, 2, 7, from_surplus, False, 9),
        pytest.param(3, 2, 7, from_surplus, True, 12, marks=pytest.mark.slow),
        (3, 1, 5, as_printed, False, 9),
        pytest.param(3, 2, 7, as_printed, False, 25, marks=pytest.mark.slow),
        pytest.param(3, 2, 7, as_printed, True, 20, marks=pytest.mark.slow),
    ],
)
def test_sensitivity_of_rebalancing_by_trying_everything(clusters, least, most, donors, replaced, squared):
    assert worst(clusters, least, most, donors, replaced) == squared


@pytest.mark.parametrize("least", [1, 2, 3])
def test_the_printed_rebalancing_has_no_bound_that_holds_for_every_minimum(least):
    """A cluster just large enough may be emptied; with one member fewer it is filled up by the third cluster instead."""
    third = (1,) * (2 * least)
    fewer = rebalanced(((), (-1,) * (least - 1), (*third, 1)), least, as_printed)
    removed = rebalanced(((), (-1,) * least, (*third, 1)), least, as_printed)
    replaced = rebalanced(((), (-1,) * least, third), least, as_printed)
    assert squared_distance(removed, fewer) == 6 * least**2 - 2 * least + 5
    assert squared_distance(replaced, fewer) == 6 * least**2 - 4 * least + 4


def test_surplus_donors_move_three_clusters_when_a_client_is_replaced():
    before, after = ((), (1, -1, -1), (1, 1, 1, 1)), ((), (-1, -1), (1, 1, 1, 1, -1))
    assert squared_distance(rebalanced(before, 2, from_surplus), rebalanced(after, 2, from_surplus)) == 12


@pytest.mark.parametrize("donors", [as_printed, from_surplus])
def test_rebalancing_after_public_labels_costs_nothing(donors):
    """The same labels on both sides: one slot's update is exchanged (2C), or zeroed (C), wherever rebalancing puts it."""
    largest = {-1: 0, 0: 0}
    for population in populations(3, 5):
        outcomes = rebalanced(population, 1, donors)
        for j, i in [(j, i) for j, members in enumerate(population) for i in range(len(members)) if members[i] == 1]:
            for update in largest:
                members = (*population[j][:i], update, *population[j][i + 1 :])
                other = rebalanced((*population[:j], members, *population[j + 1 :]), 1, donors)
                if outcomes:
                    largest[update] = max(largest[update], squared_distance(outcomes, other))
    sums, _ = labels_first_sensitivity(1.0, 0.1)
    assert math.sqrt(largest[-1]) == sums == 2
    assert math.sqrt(largest[0]) == 1


def test_labels_and_blocks_by_trying_every_client():
    clip, label_clip, k = 0.5, 0.1, 3
    swaps = [label_clip * np.linalg.norm(a - b) for a, b in itertools.permutations(np.eye(k), 2)]
    assert labels_first_sensitivity(clip, label_clip) == pytest.approx((2 * clip, max(swaps)))
    assert labels_first_sensitivity(clip, 5.0)[1] == pytest.approx(math.sqrt(2))
    vectors = [
        np.concatenate([np.eye(k)[label] * update, np.eye(k)[label] * clip / 4])
        for label in range(k)
        for update in (clip, -clip, 0.3 * clip)
    ]
    assert max(np.linalg.norm(v) for v in vectors) == pytest.approx(block_norm(clip))
    assert block_norm(clip) == pytest.approx(1.03 * clip, rel=1e-3)
    assert max(np.linalg.norm(v - w) for v in vectors for w in vectors) == pytest.approx(2 * clip)


# Draws of clients by their losses (EM-FDRO)


def test_totals_of_the_published_setting():
    assert selection_epsilon(2, 25, 20, 30) == pytest.approx(73.4, abs=0.05)
    assert selection_epsilon(4, 25, 20, 30) == pytest.approx(232.8, abs=0.05)
    assert unconditional_epsilon(2, 25, 20, 30) == 1200
    assert unconditional_epsilon(4, 25, 20, 30) == 2400


def test_an_honest_total_leaves_next_to_nothing_for_each_of_600_draws():
    assert epsilon([BoundedRangeSelection(0.0508, 600)], DELTA, "replace-one", "rdp") == pytest.approx(2, rel=1e-3)
    assert epsilon([BoundedRangeSelection(0.0565, 600)], DELTA, "replace-one") == pytest.approx(2, rel=5e-3)


def probability(order, weights):
    left, chance = sum(weights), 1.0
    for i in order:
        chance *= weights[i] / left
        left -= weights[i]
    return chance


@pytest.mark.parametrize(("clients", "drawn"), [(2, 1), (3, 1), (3, 2), (4, 2), (5, 3), (6, 5)])
@pytest.mark.parametrize("total", [0.5, 2.0, 4.0])
def test_one_draw_by_trying_every_loss_and_outcome(clients, drawn, total):
    """Losses 0, tau/2, tau; the bound is reached exactly by draws told with their order."""
    r = math.exp(total / 2)
    worst_ratio, worst_set = 0.0, 0.0
    for others in itertools.combinations_with_replacement((1.0, math.sqrt(r), r), clients - 1):
        chances = {}
        for order in itertools.permutations(range(clients), drawn):
            pair = [probability(order, (mine, *others)) for mine in (1.0, r)]
            worst_ratio = max(worst_ratio, abs(math.log(pair[0] / pair[1])))
            chances[frozenset(order)] = np.add(chances.get(frozenset(order), 0.0), pair)
        worst_set = max(worst_set, *(abs(math.log(low / high)) for low, high in chances.values()))
    assert worst_ratio == pytest.approx(draw_epsilon(total, clients, drawn))
    assert worst_set <= draw_epsilon(total, clients, drawn) * (1 + 1e-12)


def test_draws_at_their_limits():
    assert draw_epsilon(2, 25, 25) == 0
    assert draw_epsilon(0, 25, 5) == 0
    assert draw_epsilon(2, 10_000, 1) == pytest.approx(1, rel=1e-3)
    totals = [draw_epsilon(2, 25, drawn) for drawn in range(1, 25)]
    assert all(less <= more for less, more in pairwise(totals))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((-1, 25, 20), "epsilon"),
        ((math.nan, 25, 20), "epsilon"),
        ((2000, 25, 20), "epsilon"),
        ((2, 25, 0), "drawn"),
        ((2, 25, 26), "25"),
    ],
)
def test_bad_draws_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        draw_epsilon(*arguments)
    with pytest.raises(ValueError, match=named):
        unconditional_epsilon(*arguments, 30)


@pytest.mark.parametrize("cost", [selection_epsilon, unconditional_epsilon])
def test_a_negative_number_of_rounds_has_no_epsilon(cost):
    """It had a negative one."""
    with pytest.raises(ValueError, match="rounds must be non-negative, got -1"):
        cost(2, 25, 20, -1)
    assert cost(2, 25, 20, 0) == 0


def test_events_of_the_noisy_and_of_the_published_mode():
    events = [SampledGaussian(20.0, 1.0, 31), SampledGaussian(1.5, 0.07, 480)]
    assert epsilon(events[1:], DELTA) < epsilon(events, DELTA) < epsilon(events[1:], DELTA) + epsilon(events[:1], DELTA)
    assert epsilon(paper_events(), DELTA) == math.inf
    assert isinstance(paper_events()[0], Unprotected)
