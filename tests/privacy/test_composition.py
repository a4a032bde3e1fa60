"""Composition of loss distributions against exact ones: two-point losses, Gaussians in closed form, the library's composition."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from conftest import dpcfl
from scipy.stats import binom

from dpcfl_net.privacy.accounting.accountant import epsilon, epsilon_by_prefix
from dpcfl_net.privacy.accounting.composition import best_tilt, compose, symmetric
from dpcfl_net.privacy.events.bounded_range_selection import BoundedRangeSelection, selection_block
from dpcfl_net.privacy.events.gaussian import plain_epsilon, plain_gaussian
from dpcfl_net.privacy.events.randomised_response import RandomisedResponse
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian, divergences, sampled_losses


def exact_delta(mean: float, spent: float):
    """Balle and Wang 2018, Theorem 8, with many digits."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        mean, spent = mpmath.mpf(mean), mpmath.mpf(spent)
        # ncdf loses its tail to 1 - ncdf: erfc keeps it.
        near, far = (mpmath.erfc((spent / mean + side * mean / 2) / mpmath.sqrt(2)) / 2 for side in (-1, 1))
        return near - mpmath.exp(spent) * far


@pytest.mark.parametrize(
    ("event", "distance"),
    [
        (SampledGaussian(2.0, 1.0, 1), math.erf(1 / (2**1.5 * 2.0))),
        (SampledGaussian(2.0, 0.1, 1), 0.1 * math.erf(1 / (2**1.5 * 2.0))),
        (RandomisedResponse(0.5, 2, 1), math.tanh(0.25)),
        (BoundedRangeSelection(0.5, 1), math.tanh(0.125)),
    ],
)
def test_epsilon_is_zero_from_the_total_variation_on(event, distance):
    assert epsilon([event], distance * (1 - 1e-3)) > 0
    assert epsilon([event], distance * (1 + 1e-3)) == 0


# Full batches


@pytest.mark.parametrize("mean", [1e-9, 1e-6, 9.9e-4, 1.01e-3, 0.03, 0.3, 1.0, 10.0, 30.0, 1e4])
@pytest.mark.parametrize("delta", [0.3, 1e-2, 1e-5, 1e-10, 1e-15, 1e-200])
def test_one_gaussian_is_charged_its_closed_form(mean, delta):
    spent = plain_epsilon(mean, delta)
    if spent == 0:
        assert exact_delta(mean, 0.0) <= delta
    else:
        assert exact_delta(mean, spent) <= delta < exact_delta(mean, spent * (1 - 1e-6))


@pytest.mark.parametrize("steps", [10**6, 10**9])
def test_a_million_full_batch_steps_are_charged_at_once_as_one_gaussian(steps, tmp_path):
    event = {"type": "SampledGaussian", "noise_multiplier": 3000.0, "sampling_rate": 1, "steps": steps}
    (tmp_path / "events.json").write_text(json.dumps({"events": [event], "delta": 1e-10}))
    done = dpcfl("account", "--json", tmp_path / "events.json", timeout=30)
    assert done.returncode == 0, done.stderr
    spent, mean = json.loads(done.stdout)["epsilon"], math.sqrt(steps) / 3000
    assert exact_delta(mean, spent) <= 1e-10 < exact_delta(mean, spent * (1 - 2e-6))


def test_full_batches_merge_across_noise_multipliers_and_prefixes():
    """1/z^2 = sum of n/z^2: 3-4-5 triangles, and a prefix is charged what one event of the same precision is."""
    assert epsilon([SampledGaussian(5 / 3, 1.0, 1), SampledGaussian(5 / 4, 1.0, 1)], 1e-6) == pytest.approx(
        epsilon([SampledGaussian(1.0, 1.0, 1)], 1e-6), rel=2e-7
    )
    rounds = [[SampledGaussian(2000.0, 1.0, 10**6)], [SampledGaussian(3000.0, 1.0, 10**9)], [SampledGaussian(50.0, 1, 7)]] * 3
    spent = epsilon_by_prefix(rounds, 1e-12)
    assert all(before < after for before, after in pairwise(spent))
    precision = 3 * (10**6 / 2000**2 + 10**9 / 3000**2 + 7 / 50**2)
    assert spent[-1] == pytest.approx(plain_epsilon(math.sqrt(precision), 1e-12), rel=1e-6)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_full_batches_beside_sampled_ones_count_as_one_release(adjacency):
    sampled = SampledGaussian(2.0, 0.01, 100)
    many = epsilon([SampledGaussian(3000.0, 1.0, 10**9), sampled], 1e-9, adjacency)
    assert many == pytest.approx(epsilon([SampledGaussian(3000 / 10**4.5, 1.0, 1), sampled], 1e-9, adjacency), rel=1e-6)
    alone = epsilon([SampledGaussian(3000.0, 1.0, 10**9)], 1e-9, adjacency)
    assert alone < many < 1.01 * alone


# Compositions that are known exactly


def randomised_response(loss: float):
    """Losses +loss and -loss: the grid holds them exactly."""
    return symmetric(np.array([np.tanh(loss / 2), 0.0]), loss)


def exact_two_point(loss: float, count: int, spent: float) -> float:
    up = binom(count, 1 / (1 + math.exp(-loss)))
    losses = loss * (2 * np.arange(count + 1) - count)
    return float(up.pmf(np.arange(count + 1))[losses > spent] @ -np.expm1(spent - losses[losses > spent]))


@pytest.mark.parametrize(("loss", "count"), [(0.5, 2), (0.1, 100), (2.0, 30), (1e-3, 10**6), (1e-6, 1000), (0.01, 30_000)])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-12])
def test_two_point_losses_compose_to_a_binomial(loss, count, delta):
    """Never below and hardly above the exact value, also for a delta far below the rounding of the Fourier transform."""
    if exact_two_point(loss, count, 0.0) <= delta:
        return
    parts = [(randomised_response(loss), count)]
    best, *others = (compose(parts, 1e-7 * delta, share * best_tilt(parts, delta)).epsilon(delta) for share in (0.5, 0.125, 0))
    assert exact_two_point(loss, count, best) <= delta * (1 + 1e-9)
    assert exact_two_point(loss, count, best * (1 - 1e-9)) >= delta * (1 - 1e-5)
    for spent in others:
        assert spent == math.inf or exact_two_point(loss, count, spent) <= delta * (1 + 1e-9)


def test_without_a_tilt_rounding_is_paid_for_as_a_probability():
    parts = [(randomised_response(1e-3), 10**6)]
    composed = compose(parts, 1e-13)
    assert 1e-9 < composed.rounding(0.0) == composed.rounding(3.0) < 2e-9
    assert compose(parts, 1e-19, 0.5 * best_tilt(parts, 1e-12)).rounding(7.2) < 1e-6 * 1e-12
    for spent in (0.0, 0.5, 2.0):
        exact = exact_two_point(1e-3, 10**6, spent)
        assert exact <= composed.delta(spent) <= exact * (1 + 1e-6) + 3e-9
    assert composed.epsilon(1e-9) == math.inf


def test_a_delta_is_read_with_its_rounding():
    composed = compose([(plain_gaussian(0.1, 1e-3), 100)], 1e-13)
    far = composed.interval * composed.highest
    assert composed.delta(far) == composed.infinite + composed.rounding(far) > composed.infinite


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-9, 1e-13])
@pytest.mark.parametrize(("mean", "count"), [(0.3, 1), (0.1, 50), (0.01, 10_000), (2.0, 4)])
def test_composed_gaussians_are_one_gaussian(mean, count, delta):
    parts = [(plain_gaussian(mean, mean / 20), count)]
    spent = compose(parts, 1e-7 * delta, 0.5 * best_tilt(parts, delta)).epsilon(delta)
    assert exact_delta(mean * math.sqrt(count), spent) <= delta * (1 + 1e-9)
    assert exact_delta(mean * math.sqrt(count), spent * (1 - 1e-3)) > delta


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.0, 0.1, 50), (0.8, 0.01, 3000), (3.0, 0.5, 10)])
@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_the_librarys_composition_on_the_same_grid(noise, rate, steps, adjacency):
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution

    relation = NeighboringRelation.ADD_OR_REMOVE_ONE if adjacency == "zero-out" else NeighboringRelation.REPLACE_ONE
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=1e-3, neighboring_relation=relation
    ).self_compose(steps, 1e-12)
    composed = []
    for losses in sampled_losses(noise, rate, adjacency, 1e-3):
        parts = [(losses, steps)]
        composed.append(compose(parts, 1e-12, 0.5 * best_tilt(parts, 1e-5)))
    spent = max(losses.epsilon(1e-5) for losses in composed)
    assert spent == pytest.approx(theirs.get_epsilon_for_delta(1e-5), rel=1e-5)
    deltas = max(compose([(losses, steps)], 1e-12).delta(1.0) for losses in sampled_losses(noise, rate, adjacency, 1e-3))
    assert deltas == pytest.approx(theirs.get_delta_for_epsilon(1.0), rel=1e-5)


@pytest.mark.parametrize("noise", [1e-3, 0.05, 0.3, 1.0, 5.0, 1e4])
@pytest.mark.parametrize("rate", [1e-6, 0.001, 0.05, 0.5, 0.99, 1 - 1e-6])
@pytest.mark.parametrize("side", ["REMOVE", "ADD", "REPLACE"])
def test_divergences_of_one_release_are_the_librarys(noise, rate, side):
    mechanisms = pytest.importorskip("dp_accounting.pld.privacy_loss_mechanism")
    pair = mechanisms.GaussianPrivacyLoss(noise, sampling_prob=rate, adjacency_type=mechanisms.AdjacencyType[side])
    interval = pair.connect_dots_bounds().epsilon_upper / 500
    ours = divergences(noise, rate, side, interval)
    theirs = pair.get_delta_for_epsilon(interval * np.arange(len(ours)))
    assert len(ours) >= 501
    np.testing.assert_allclose(ours, theirs, rtol=1e-14, atol=2e-15)


# Distributions


@pytest.mark.parametrize(
    "made",
    [
        lambda: sampled_losses(0.8, 0.01, "zero-out", 1e-4),
        lambda: sampled_losses(1.0, 1e-5, "zero-out", 1e-6),
        lambda: sampled_losses(1.25, 0.005, "replace-one", 1e-4),
        lambda: sampled_losses(1.0, 0.999, "zero-out", 1e-3),
        lambda: [plain_gaussian(1e-3, 1e-5), plain_gaussian(3.0, 1e-2)],
        lambda: [selection_block(0.15, 20, 1e-3), selection_block(1e-9, 200, 1e-10), selection_block(30.0, 5, 0.1)],
        lambda: [randomised_response(0.1)],
    ],
)
def test_masses_sum_to_one_under_both_inputs(made):
    """Masses far below the rounding of a divergence near 1 add nothing and are never negative."""
    for losses in made():
        at = losses.interval * np.arange(losses.lowest, losses.highest + 1)
        assert losses.probabilities.min() >= 0
        assert losses.probabilities.sum() + losses.infinite == pytest.approx(1, abs=1e-9)
        assert losses.probabilities @ np.exp(-at) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("steps", [2, 100])
def test_few_releases_with_a_heavy_tail_are_read_where_their_divergence_is(steps):
    """The tilt that is best for Renyi accounting leads far beyond epsilon there; what decides is the least of all tilts."""
    spent = [epsilon([SampledGaussian(1.0, 1e-4, steps)], delta) for delta in (1e-4 * steps, 1e-5, 1e-8)]
    untilted = []
    for delta in (1e-5, 1e-8):
        sides = sampled_losses(1.0, 1e-4, "zero-out", 1e-5)
        untilted.append(max(compose([(losses, steps)], 1e-7 * delta).epsilon(delta) for losses in sides))
    assert spent[0] == 0
    assert spent[1:] == pytest.approx(untilted, rel=2e-2)


def test_smaller_deltas_than_the_rounding_of_a_transform_are_resolved():
    spent = [epsilon([SampledGaussian(1.0, 0.01, 1000)], delta) for delta in (1e-5, 1e-9, 1e-13, 1e-16)]
    for before, after in pairwise(spent):
        assert before < after
    for delta, value in zip((1e-9, 1e-13, 1e-16), spent[1:], strict=True):
        bound = epsilon([SampledGaussian(1.0, 0.01, 1000)], delta, accountant="rdp")
        assert 0.85 * bound < value < bound
    steps = [SampledGaussian(5.0, 0.01, 10**7), BoundedRangeSelection(0.1, 3)]
    assert epsilon(steps, 1e-9) < epsilon(steps, 1e-9, accountant="rdp")
