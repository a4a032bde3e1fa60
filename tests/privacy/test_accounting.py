"""Accounting: published and independently computed values, other libraries, soundness bounds, traps and refusals."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import tracemalloc
from itertools import chain, pairwise

import numpy as np
import pytest
from conftest import ROOT

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.privacy.accounting.accountant import calibrate, epsilon, epsilon_by_prefix
from dpcfl_net.privacy.accounting.document import account, main
from dpcfl_net.privacy.events.allocated_gaussian import AllocatedGaussian
from dpcfl_net.privacy.events.bounded_range_selection import BoundedRangeSelection
from dpcfl_net.privacy.events.labelled_fixed_size_gaussian import LabelledFixedSizeGaussian
from dpcfl_net.privacy.events.randomised_response import RandomisedResponse
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.privacy.events.unprotected import Unprotected

DELTA = 1e-4
EXAMPLE = ROOT / "configs" / "account" / "r_dpcfl_epsilon5.json"


def plan(records: int, first_round: bool = True, selection: float = 0.0):
    """K=1, E=200, b=32; a full-batch first round or none; 20 selections or none."""
    steps = math.ceil(records / 32)

    def events_of(z: float) -> list:
        sampled = SampledGaussian(z, 32 / records, (199 if first_round else 200) * steps)
        return [sampled] + [SampledGaussian(z, 1.0, 1)] * first_round + [BoundedRangeSelection(selection, 20)] * (selection > 0)

    return events_of


REFERENCES = [
    ("rdp", plan(6600), 3, 1.93354),
    ("rdp", plan(6600), 5, 1.31036),
    ("rdp", plan(6600), 10, 0.857673),
    ("rdp", plan(6600), 15, 0.716109),
    ("rdp", plan(6600, selection=0.15), 5, 1.35888),
    ("rdp", plan(8000, False), 3, 1.37426),
    ("rdp", plan(8000, False), 5, 1.01198),
    ("rdp", plan(8000, False), 10, 0.74546),
    pytest.param("pld", plan(6600), 3, 1.79071, marks=pytest.mark.slow),
    ("pld", plan(6600), 5, 1.22955),
    pytest.param("pld", plan(6600), 10, 0.821998, marks=pytest.mark.slow),
    pytest.param("pld", plan(6600), 15, 0.692281, marks=pytest.mark.slow),
    pytest.param("pld", plan(6600, selection=0.15), 5, 1.26876, marks=pytest.mark.slow),  # Also the example document's.
    pytest.param("pld", plan(8000, False), 3, 1.28929, marks=pytest.mark.slow),
    pytest.param("pld", plan(8000, False), 5, 0.964101, marks=pytest.mark.slow),
    pytest.param("pld", plan(8000, False), 10, 0.720887, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("accountant", "events_of", "target", "reference"), REFERENCES)
def test_calibration_gives_the_reference_noise(accountant, events_of, target, reference):
    noise = calibrate(events_of, target, DELTA, accountant=accountant)
    assert noise == pytest.approx(reference, rel=1e-3)
    assert epsilon(events_of(noise), DELTA, accountant=accountant) <= target
    assert epsilon(events_of(noise / 1.0005), DELTA, accountant=accountant) > target


@pytest.mark.parametrize(
    ("accountant", "steps", "target", "reference"),
    [
        ("pld", 100, 2, 1.67395),
        pytest.param("pld", 100, 4, 1.10003, marks=pytest.mark.slow),
        pytest.param("pld", 100, 8, 0.778411, marks=pytest.mark.slow),
        pytest.param("pld", 200, 2, 2.21394, marks=pytest.mark.slow),
        pytest.param("pld", 200, 4, 1.38467, marks=pytest.mark.slow),
        pytest.param("pld", 200, 8, 0.940497, marks=pytest.mark.slow),
        ("rdp", 100, 2, 1.85745),
        ("rdp", 100, 4, 1.20362),
        ("rdp", 100, 8, 0.844326),
    ],
)
def test_calibration_of_sampled_clients(accountant, steps, target, reference):
    noise = calibrate(lambda z: [SampledGaussian(z, 0.1, steps)], target, 1e-3, accountant=accountant)
    assert noise == pytest.approx(reference, rel=1e-3)


def test_one_published_noise_multiplier_under_every_accountant():
    events = plan(6600)(1.31036)
    assert epsilon(events, DELTA, accountant="rdp") == pytest.approx(4.99999, rel=1e-3)
    assert epsilon(events, DELTA) == pytest.approx(4.56016, rel=1e-3)
    assert epsilon(events, DELTA, "replace-one") == pytest.approx(9.84, rel=1e-3)


def test_replace_one_needs_much_more_noise():
    assert calibrate(plan(6600), 5, DELTA, "replace-one") / 1.22955 == pytest.approx(1.82, rel=5e-3)


def test_replace_one_takes_the_selection_range_as_given():
    noise = 1.26876
    assert epsilon(plan(6600, selection=0.30)(noise), DELTA, "replace-one") == pytest.approx(10.87, rel=1e-3)
    assert epsilon(plan(6600, selection=0.15)(noise), DELTA, "replace-one") == pytest.approx(10.43, rel=1e-3)


def test_selections_alone():
    events = [BoundedRangeSelection(0.15, 20)]
    assert epsilon(events, DELTA) == pytest.approx(1.0814, rel=1e-3)
    assert epsilon(events, DELTA, accountant="rdp") == pytest.approx(1.171, rel=1e-3)
    assert epsilon([BoundedRangeSelection(0.15, 1)] * 20, DELTA) == epsilon(events, DELTA)


def test_a_block_is_tighter_than_composed_single_selections():
    from dpcfl_net.privacy.accounting.composition import compose
    from dpcfl_net.privacy.events.bounded_range_selection import selection_block

    one, twenty = (selection_block(0.15, size, 1e-4) for size in (1, 20))
    assert compose([(one, 20)], 1e-15).epsilon(DELTA) == pytest.approx(1.233, rel=2e-3)
    assert twenty.epsilon(DELTA) == pytest.approx(1.0814, rel=1e-3)


def _two_point_epsilon(extent: float, count: int, t: float) -> float:
    """Exact epsilon of `count` selections whose losses are t or t - extent: a binomial."""
    from scipy.stats import binom

    rise = math.expm1(t - extent) / math.expm1(-extent)
    losses = count * (t - extent) + extent * np.arange(count + 1)
    masses = binom.pmf(np.arange(count + 1), count, rise)
    low, high = 0.0, count * extent
    for _ in range(60):
        middle = (low + high) / 2
        beyond = losses > middle
        low, high = (middle, high) if masses[beyond] @ -np.expm1(middle - losses[beyond]) > DELTA else (low, middle)
    return high


@pytest.mark.parametrize(("extent", "count"), [(0.15, 1), (0.15, 20), (0.6, 5), (0.05, 100), (2.0, 3), (3.9, 2), (0.002, 60)])
def test_a_block_is_never_below_what_some_selections_really_spend(extent, count):
    spent = max(_two_point_epsilon(extent, count, extent * share) for share in np.linspace(0.02, 0.98, 97))
    claimed = epsilon([BoundedRangeSelection(extent, count)], DELTA)
    assert spent * (1 - 1e-9) <= claimed
    assert claimed <= min(1.05 * spent, extent * count)


def test_two_adaptive_selections_against_a_direct_search():
    """F_2 at one epsilon by brute force over t in each step; the block's divergence may only be a little above."""
    from dpcfl_net.privacy.events.bounded_range_selection import _profile

    extent, y = 0.5, 0.4
    t = np.linspace(1e-6, extent - 1e-6, 2001)
    rise = np.expm1(t - extent) / math.expm1(-extent)

    def one(losses: np.ndarray) -> np.ndarray:
        chances = rise * -np.expm1(np.minimum(losses[:, None] - t, 0.0))
        return np.max(chances + (1 - rise) * -np.expm1(np.minimum(losses[:, None] - t + extent, 0.0)), axis=1)

    truth = np.max(rise * one(y - t) + (1 - rise) * one(y - t + extent))
    profile = _profile(extent, 100, 2)
    assert truth <= profile[80] <= 1.002 * truth


def test_more_than_one_block_of_selections():
    spent = epsilon([BoundedRangeSelection(0.02, 300)], DELTA)
    exact = max(_two_point_epsilon(0.02, 300, 0.02 * share) for share in np.linspace(0.3, 0.7, 9))
    assert exact <= spent <= 1.03 * exact


def test_selections_of_different_ranges_compose():
    both = epsilon([BoundedRangeSelection(0.15, 10), BoundedRangeSelection(0.1, 5)], DELTA)
    assert epsilon([BoundedRangeSelection(0.15, 10)], DELTA) < both < epsilon([BoundedRangeSelection(0.15, 15)], DELTA)


def test_joint_composition_beats_adding_epsilons():
    joint = epsilon(plan(6600, selection=0.15)(1.3), DELTA)
    assert joint < epsilon(plan(6600)(1.3), DELTA) + 0.5 * epsilon([BoundedRangeSelection(0.15, 20)], DELTA)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize(
    "events",
    [
        [SampledGaussian(1.2, 0.004, 40000), SampledGaussian(1.2, 1.0, 1)],
        pytest.param([SampledGaussian(3.0, 0.5, 10)], marks=pytest.mark.slow),
        pytest.param([SampledGaussian(0.5, 0.004, 1000)], marks=pytest.mark.slow),
        pytest.param([SampledGaussian(1.0, 0.999, 5)], marks=pytest.mark.slow),
        pytest.param([SampledGaussian(1.0, 0.01, 3), SampledGaussian(2.0, 0.1, 7)], marks=pytest.mark.slow),
    ],
)
def test_pld_agrees_with_the_accountant_of_dp_accounting(events, adjacency):
    assert epsilon(events, 1e-5, adjacency) == pytest.approx(_dp_accounting(events, 1e-5, adjacency, 1e-4), rel=5e-4)


def _dp_accounting(events, delta, adjacency, interval):
    import dp_accounting
    from dp_accounting import pld

    relation = dp_accounting.NeighboringRelation
    other = pld.PLDAccountant(
        relation.ADD_OR_REMOVE_ONE if adjacency == "zero-out" else relation.REPLACE_ONE, value_discretization_interval=interval
    )
    for event in events:
        plain = dp_accounting.GaussianDpEvent(event.noise_multiplier)
        rate = event.sampling_rate
        other.compose(plain if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, plain), event.steps)
    return other.get_epsilon(delta)


def test_rdp_agrees_with_opacus():
    from opacus.accountants.analysis import rdp as opacus_rdp

    from dpcfl_net.privacy.accounting.rdp import ORDERS

    events = plan(6600)(1.31036)
    divergences = sum(
        opacus_rdp.compute_rdp(q=e.sampling_rate, noise_multiplier=e.noise_multiplier, steps=e.steps, orders=list(ORDERS))
        for e in events
    )
    other, _ = opacus_rdp.get_privacy_spent(orders=list(ORDERS), rdp=divergences, delta=DELTA)
    assert epsilon(events, DELTA, accountant="rdp") == pytest.approx(other, rel=2e-3)


def test_pld_agrees_with_opacus_prv():
    from opacus.accountants import PRVAccountant

    other = PRVAccountant()
    other.history = [(event.noise_multiplier, event.sampling_rate, event.steps) for event in plan(6600)(1.31036)]
    upper = other.get_epsilon(DELTA, eps_error=0.01)
    assert upper - 0.02 <= epsilon(plan(6600)(1.31036), DELTA) <= upper


@pytest.mark.parametrize(("sensitivity", "adjacency"), [(1.0, "zero-out"), (2.0, "replace-one")])
@pytest.mark.parametrize("noise", [0.3, 1.0, 30.0])
def test_full_batches_are_the_plain_gaussian_mechanism(noise, sensitivity, adjacency):
    """Against the closed form of Balle and Wang 2018, Theorem 8."""
    from scipy.special import log_ndtr, ndtr

    mean = sensitivity * math.sqrt(4) / noise
    spent = epsilon([SampledGaussian(noise, 1.0, 4)], 1e-6, adjacency)
    delta = ndtr(mean / 2 - spent / mean) - math.exp(spent + log_ndtr(-mean / 2 - spent / mean))
    assert (1 - 1e-3) * 1e-6 < delta <= 1e-6


def test_rdp_of_full_batches_needs_no_logarithm_of_zero():
    from dpcfl_net.privacy.accounting.rdp import ORDERS
    from dpcfl_net.privacy.events.sampled_gaussian import sampled_renyi

    with np.errstate(all="raise"):
        assert sampled_renyi(2.0, 1.0, ORDERS) == pytest.approx(ORDERS / 8)
    assert epsilon([SampledGaussian(2.0, 1.0, 5)], DELTA, accountant="rdp") == pytest.approx(
        epsilon([SampledGaussian(2.0, 1 - 1e-12, 5)], DELTA, accountant="rdp"), rel=1e-6
    )


def _divergence(noise: float, rate: float, order: float) -> float:
    """Renyi divergence of one sampled release by numerical integration, exact to about 1e-11."""
    from scipy.special import logsumexp

    # The integrand is analytic within pi z^2 of the axis: the sum's error is exp(-2 pi^2 z^2 / spacing), beyond all digits.
    spacing = min(noise / 16, noise**2 / 2)
    x = np.arange(-12 * noise, order + 12 * noise, spacing)
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * noise**2))
    moment = logsumexp(order * ratio - x**2 / (2 * noise**2)) + math.log(spacing / (noise * math.sqrt(2 * math.pi)))
    return float(moment) / (order - 1)


@pytest.mark.parametrize(
    ("noise", "rate"),
    [(3.0, 0.5), (0.3, 0.01), (10.0, 0.9), (0.05, 0.2), (1.0, 1e-6), (0.844, 0.1), (1.3, 0.005), (50.0, 1e-3)],
)
def test_no_renyi_order_is_lost_or_too_small(noise, rate):
    """q=.5, z=3, a=1.5 has a published series that does not converge, and others are high: never above the chord, though."""
    from dpcfl_net.privacy.accounting.rdp import ORDERS
    from dpcfl_net.privacy.events.sampled_gaussian import sampled_renyi

    found = sampled_renyi(noise, rate, ORDERS)
    truth = np.array([_divergence(noise, rate, order) for order in ORDERS])
    assert np.all(np.isfinite(found))
    assert np.all(found >= truth * (1 - 1e-10) - 1e-14)
    whole = ORDERS % 1 == 0
    assert found[whole] == pytest.approx(truth[whole], rel=1e-6, abs=1e-13)
    chords = np.interp(ORDERS, np.r_[1.0, ORDERS[whole]], np.r_[0.0, (truth * (ORDERS - 1))[whole]]) / (ORDERS - 1)
    assert np.all(found <= chords * (1 + 1e-6) + 1e-13)


@pytest.mark.parametrize(
    ("noise", "rate", "order", "moment"),
    [
        (0.844, 0.1, 1.7, 0.016422232147415168),
        (3.0, 0.5, 1.5, 0.010706678160315954),
        (1.0, 0.01, 7.3, 0.004778204174461943),
        (0.3, 0.01, 2.5, 9.320510388045705),
        (0.7, 0.005, 3.1, 0.0006117762850253649),
    ],
)
def test_fractional_orders_against_forty_digits(noise, rate, order, moment):
    """Values by mpmath.quad, 40 digits; the accountant may be above them, never below."""
    from dpcfl_net.privacy.accounting.rdp import ORDERS
    from dpcfl_net.privacy.events.sampled_gaussian import sampled_renyi

    found = sampled_renyi(noise, rate, ORDERS)[int(np.argmin(np.abs(ORDERS - order)))] * (order - 1)
    assert _divergence(noise, rate, order) * (order - 1) == pytest.approx(moment, rel=1e-9)
    assert moment * (1 - 1e-12) <= found <= 1.4 * moment


@pytest.mark.parametrize("rate", [1e-5, 1e-8, 1e-10, 1e-300])
def test_tiny_rates_are_never_free_under_rdp(rate):
    """The library's moments come out at or below zero there, and it then reports epsilon 0."""
    from dpcfl_net.privacy.accounting.rdp import ORDERS
    from dpcfl_net.privacy.events.sampled_gaussian import sampled_renyi

    found = sampled_renyi(1.0, rate, ORDERS)
    assert np.all(found >= ORDERS * rate**2 * math.expm1(1.0) / 2)
    assert np.all(found > 0)
    assert epsilon([SampledGaussian(1.0, rate, 1000)], 1e-12, accountant="rdp") > 0


def test_renyi_divergence_of_a_selection_against_a_fine_search():
    from dpcfl_net.privacy.accounting.rdp import ORDERS
    from dpcfl_net.privacy.events.bounded_range_selection import selection_renyi

    for extent in (0.15, 3.0):
        ours = selection_renyi(extent, ORDERS)
        t = np.linspace(1e-9, extent * (1 - 1e-9), 200_001)
        rise = np.expm1(t - extent) / math.expm1(-extent)
        for i in (0, 50, 120, len(ORDERS) - 1):
            a = ORDERS[i]
            direct = np.max(np.logaddexp(np.log(rise) + (a - 1) * t, np.log1p(-rise) + (a - 1) * (t - extent))) / (a - 1)
            assert ours[i] == pytest.approx(direct, rel=1e-6)
            assert ours[i] <= min(a * extent**2 / 8, extent) * (1 + 1e-12)


@pytest.mark.parametrize("count", [15, pytest.param(300, marks=pytest.mark.slow)])
def test_no_selection_is_free_under_rdp_whatever_its_range(count):
    """At some ranges, .06 among them, a probability comes out a rounding above 1; nothing may come of that."""
    for extent in (0.06, *np.linspace(0.001, 0.3, count)):
        spent = epsilon([BoundedRangeSelection(float(extent), 2)], DELTA, accountant="rdp")
        assert extent < spent <= 2 * extent


def test_no_label_is_free_under_rdp_however_little_it_tells():
    """With k = 3 the rounding of the logarithms makes a divergence of 1e-18 negative; the library turns that into epsilon 0."""
    for extent in (1e-9, 1e-8, 1e-4):
        assert epsilon([RandomisedResponse(extent, 3, 60)], 1e-12, accountant="rdp") > epsilon(
            [RandomisedResponse(extent, 3, 60)], 1e-12
        )
    assert epsilon([RandomisedResponse(500.0, 3, 1)], 1e-12, accountant="rdp") == pytest.approx(500, rel=1e-3)


def test_renyi_accounting_charges_very_wide_ranges_nearly_in_full():
    """e^E overflows beyond 709."""
    for extent in (700.0, 720.0, 1e5):
        assert 0.95 * extent < epsilon([BoundedRangeSelection(extent, 1)], 1e-6, accountant="rdp") <= extent * (1 + 1e-6)


def test_tiny_sampling_rates_get_a_finer_grid():
    events = [SampledGaussian(1.0, 1e-5, 100_000)]
    assert epsilon(events, 1e-7) == pytest.approx(0.015624, rel=2e-3)
    assert _dp_accounting(events, 1e-7, "zero-out", 1e-4) > 2 * epsilon(events, 1e-7)


def test_tiny_rates_beside_a_full_batch():
    events = [SampledGaussian(1.0, 1e-5, 10_000), SampledGaussian(2.0, 1.0, 1)]
    assert epsilon(events, 1e-6) == pytest.approx(2.25413, rel=1e-3)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize(
    "events",
    [
        pytest.param([SampledGaussian(1.2, 0.004, 40000)], marks=pytest.mark.slow),
        pytest.param([SampledGaussian(1.0, 0.1, 50)], marks=pytest.mark.slow),
        [SampledGaussian(1.5, 0.004, 5000), SampledGaussian(1.5, 1.0, 1), BoundedRangeSelection(0.2, 7)],
    ],
)
def test_finer_grids_only_lower_epsilon_and_only_a_little(events, adjacency):
    from dpcfl_net.privacy.accounting.event_counts import EventCounts
    from dpcfl_net.privacy.accounting.pld import COARSE, FINE, Grid, pld_epsilon

    merged = EventCounts().add(events).merged()
    coarse, fine, finest = (pld_epsilon(merged, DELTA, adjacency, grid) for grid in (COARSE, FINE, Grid(5e-5, 30)))
    assert coarse >= fine >= finest
    assert fine < 1.0005 * finest
    assert coarse < 1.02 * finest


def test_extreme_noise_stays_finite_and_ordered():
    with np.errstate(invalid="raise"):
        for adjacency in ("zero-out", "replace-one"):
            values = [epsilon([SampledGaussian(z, 0.01, 3)], 1e-5, adjacency) for z in (0.05, 0.1, 1.0, 50.0, 1e5)]
            assert all(math.isfinite(value) for value in values)
            assert all(more > less for more, less in pairwise(values[:4]))
            assert values[4] < 1e-4


def test_zero_out_is_the_worse_of_both_directions_and_replace_one_is_worse_still():
    events = [SampledGaussian(1.0, 0.1, 50)]
    zero_out, replace_one = epsilon(events, DELTA), epsilon(events, DELTA, "replace-one")
    assert zero_out < replace_one < 2.5 * zero_out


SMALLEST_NOISE = [
    ([SampledGaussian(0.0012, 0.31, 39_000)], "zero-out", (6260, 6400)),
    ([LabelledFixedSizeGaussian(0.0012, 1.0, 10, 386, 1230, 39_000)], "replace-one", (6330, 6500)),
    ([AllocatedGaussian(0.0012, 10, 20)], "zero-out", (10.0, 10.2)),
    ([AllocatedGaussian(0.0012, 10, 20)], "replace-one", (40.0, 40.8)),
]


@pytest.mark.parametrize(("events", "adjacency", "expected"), SMALLEST_NOISE)
def test_very_little_noise_needs_little_memory(events, adjacency, expected):
    """Its losses are wide: a grid as fine as for ordinary noise had 10**8 points, and took minutes and 6 GiB."""
    tracemalloc.start()
    found = epsilon(events, 1e-6, adjacency)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**27
    low, high = expected  # about 1 / (2 z^2), or four times that, for each release with the record
    assert low <= found * 0.0012**2 <= high


@pytest.mark.parametrize("rate", [1e-17, 1e-18, 1e-20])
def test_rates_below_the_rounding_of_the_library_are_counted(rate):
    assert 0 <= epsilon([SampledGaussian(1.0, rate, 1000)], 1e-30) <= epsilon([SampledGaussian(1.0, 1e-16, 1000)], 1e-30) < 1e-6


@pytest.mark.parametrize("extent", [1e-20, 1e-22, 1e-100])
def test_narrow_selections_beside_other_events_are_counted(extent):
    alone = epsilon([SampledGaussian(1.0, 0.01, 1000)], 1e-5)
    assert alone <= epsilon([SampledGaussian(1.0, 0.01, 1000), BoundedRangeSelection(extent, 10)], 1e-5) <= alone * (1 + 1e-6)


@pytest.mark.parametrize("delta", [1e-300, 6e-309, 1e-309, 1e-320])
def test_deltas_near_the_smallest_number_have_an_answer_or_a_reason(delta):
    before = epsilon([SampledGaussian(1.0, 1.0, 10)], 1e-299)
    assert before < epsilon([SampledGaussian(1.0, 1.0, 10)], delta) < before + 5
    for events in ([SampledGaussian(1.0, 0.1, 10)], [BoundedRangeSelection(0.1, 10)]):
        with pytest.raises(ValueError, match='below what accountant "pld" resolves'):
            epsilon(events, delta)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_no_noise_multiplier_makes_the_accountant_give_up(adjacency):
    """From next to no noise to next to no loss; a distribution cut or rounded too hard has more infinite loss than delta."""

    def events_of(z: float) -> list:
        return [SampledGaussian(z, 1.0, 1), SampledGaussian(z, 0.016, 39 * 63), BoundedRangeSelection(0.15, 4)]

    values = [epsilon(events_of(z), DELTA, adjacency) for z in (0.1, *np.geomspace(0.5, 300, 8))]
    assert all(math.isfinite(value) for value in values)
    assert all(more > less for more, less in pairwise(values))
    noise = calibrate(events_of, 5, DELTA, adjacency)
    assert epsilon(events_of(noise), DELTA, adjacency) <= 5 < epsilon(events_of(noise / 1.0005), DELTA, adjacency)


def test_order_and_grouping_do_not_matter():
    whole = [SampledGaussian(1.1, 0.01, 300), SampledGaussian(1.1, 1.0, 2), BoundedRangeSelection(0.1, 3)]
    parts = [BoundedRangeSelection(0.1, 1), SampledGaussian(1.1, 1.0, 1), SampledGaussian(1.1, 0.01, 299)]
    parts += [SampledGaussian(1.1, 0.01, 1), SampledGaussian(1.1, 1.0, 1), BoundedRangeSelection(0.1, 2)]
    for accountant in ("pld", "rdp"):
        assert epsilon(parts, DELTA, accountant=accountant) == epsilon(whole, DELTA, accountant=accountant)


@pytest.mark.filterwarnings("error")
def test_senseless_parameters_are_charged_on_the_safe_side():
    for adjacency in ("zero-out", "replace-one"):
        assert epsilon([SampledGaussian(1e200, 1.0, 5)], 1e-5, adjacency) < 1e-6
        assert epsilon([SampledGaussian(1.0, 1e-300, 5)], 1e-5, adjacency) < 1e-6
        assert epsilon([SampledGaussian(1e-200, 0.1, 5)], 1e-5, adjacency) == math.inf
        assert math.isfinite(epsilon([SampledGaussian(1e-3, 1.0, 10**9), SampledGaussian(1.0, 0.1, 2)], 1e-5, adjacency))
    for count in (3, 1000):
        assert epsilon([BoundedRangeSelection(1e6, count)], 1e-5) == pytest.approx(count * 1e6, rel=1e-3)
    assert epsilon([BoundedRangeSelection(1e-300, 10**9)], 1e-12) == 0
    assert epsilon([SampledGaussian(1.0, 1.0, 1), BoundedRangeSelection(1e-12, 3)], 1e-5) == pytest.approx(4.37718, rel=1e-3)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_nothing_spends_nothing_and_unprotected_spends_everything(accountant):
    free = [
        SampledGaussian(1.0, 0.5, 0),
        SampledGaussian(1.0, 0.0, 9),
        BoundedRangeSelection(0.5, 0),
        BoundedRangeSelection(0, 4),
    ]
    assert epsilon([], DELTA, accountant=accountant) == 0
    assert epsilon(free, DELTA, accountant=accountant) == 0
    assert epsilon([SampledGaussian(1.0, 0.5, 3), Unprotected("raw labels")], DELTA, accountant=accountant) == math.inf


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_prefixes_are_what_epsilon_says_of_them(accountant):
    groups = [[SampledGaussian(1.25, 1.0, 1)], [], *[[SampledGaussian(1.25, 0.01, 60), BoundedRangeSelection(0.15, 1)]] * 4]
    groups += [[SampledGaussian(1.25, 0.01, 60)]] * 2
    prefixes = epsilon_by_prefix(groups, DELTA, "zero-out", accountant)
    for i, value in enumerate(prefixes):
        assert value == epsilon(list(chain(*groups[: i + 1])), DELTA, accountant=accountant)
    assert all(before <= after * (1 + 1e-9) for before, after in pairwise(prefixes))


def test_prefixes_with_nothing_yet_and_without_protection():
    groups = [[], [SampledGaussian(1.0, 1.0, 1)], [Unprotected("raw")], [SampledGaussian(1.0, 1.0, 1)]]
    first, second, *rest = epsilon_by_prefix(groups, DELTA, "replace-one", "pld")
    assert first == 0
    assert second == epsilon(groups[1], DELTA, "replace-one")
    assert rest == [math.inf, math.inf]
    assert epsilon_by_prefix([], DELTA) == []


@pytest.mark.parametrize("delta", [0, 1, -0.1, 1.5, math.nan, math.inf, "1e-4", True, None])
def test_delta_must_lie_between_zero_and_one(delta):
    for call in (lambda: epsilon([], delta), lambda: calibrate(plan(6600), 5, delta), lambda: epsilon_by_prefix([], delta)):
        with pytest.raises(ValueError, match="delta"):
            call()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 0.5, 1), "noise_multiplier"),
        ((math.nan, 0.5, 1), "noise_multiplier"),
        ((1.0, 1.1, 1), "sampling_rate"),
        ((1.0, -0.1, 1), "sampling_rate"),
        ((1.0, 0.5, -1), "steps"),
        ((1.0, 0.5, 1.5), "steps"),
    ],
)
def test_bad_events_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        SampledGaussian(*arguments)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="adjacency"):
        epsilon([], DELTA, "add-remove")
    with pytest.raises(ValueError, match="accountant"):
        epsilon([], DELTA, accountant="gdp")
    with pytest.raises(ValueError, match='those of a member that is added or removed: use accountant "pld"'):
        epsilon([SampledGaussian(1.0, 0.1, 1)], DELTA, "replace-one", "rdp")
    with pytest.raises(ValueError, match="events"):
        epsilon([(1.0, 0.1, 1)], DELTA)
    with pytest.raises(ValueError, match="delta 1e-30"):
        epsilon([SampledGaussian(1.0, 0.01, 1000)], 1e-30)


@pytest.mark.parametrize("target", [0, -1, math.nan, math.inf, "5", True])
def test_targets_must_be_positive_and_finite(target):
    with pytest.raises(ValueError, match="epsilon"):
        calibrate(plan(6600), target, DELTA)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_targets_that_no_noise_meets_are_refused(accountant):
    with pytest.raises(ValueError, match="selections and labels alone"):
        calibrate(plan(6600, selection=0.15), 1.0, DELTA, accountant=accountant)
    with pytest.raises(ValueError, match="Unprotected"):
        calibrate(lambda z: [SampledGaussian(z, 0.1, 1), Unprotected("raw")], 5, DELTA, accountant=accountant)
    with pytest.raises(ValueError, match="noise could be chosen"):
        calibrate(lambda z: [BoundedRangeSelection(0.1, 1)], 5, DELTA, accountant=accountant)
    with pytest.raises(ValueError, match="not met at the largest noise multiplier"):
        calibrate(lambda z: [SampledGaussian(z, 0.1, 1), SampledGaussian(0.5, 1.0, 1)], 2, DELTA, accountant=accountant)
    with pytest.raises(ValueError, match="too little noise for a meaningful guarantee"):
        calibrate(lambda z: [SampledGaussian(z, 1.0, 1)], 1e6, DELTA, accountant=accountant)


@pytest.mark.parametrize("target", [0.05, 0.5, pytest.param(40.0, marks=pytest.mark.slow)])
def test_calibration_holds_far_from_the_usual_targets(target):
    def events_of(z: float) -> list:
        return [SampledGaussian(z, 0.02, 500), SampledGaussian(2 * z, 1.0, 1)]

    for adjacency in ("zero-out", "replace-one"):
        noise = calibrate(events_of, target, 1e-5, adjacency)
        assert epsilon(events_of(noise), 1e-5, adjacency) <= target < epsilon(events_of(noise / 1.0005), 1e-5, adjacency)


@pytest.mark.parametrize(
    ("accountant", "target", "delta", "selections"),
    [("pld", 0.05, 1e-12, 0), ("rdp", 0.05, 1e-12, 0), ("pld", 10.3, DELTA, 20)],
)
def test_calibration_meets_targets_below_the_least_value_of_its_rough_bound(accountant, target, delta, selections):
    def events_of(z: float) -> list:
        return [SampledGaussian(z, 0.016, 63), BoundedRangeSelection(1.0, selections)]

    noise = calibrate(events_of, target, delta, accountant=accountant)
    spent = [epsilon(events_of(z), delta, accountant=accountant) for z in (noise, noise / 1.0005)]
    assert spent[0] <= target < spent[1]


def test_a_document_gives_epsilon_or_the_noise():
    document = json.loads(EXAMPLE.read_text())
    answer = account(document)
    assert answer["noise_multiplier"] == pytest.approx(1.26876, rel=1e-3)
    assert 4.99 < answer["epsilon"] <= 5
    del document["target_epsilon"]
    for event in document["events"][:2]:
        event["noise_multiplier"] = answer["noise_multiplier"]
    again = account(document)
    assert again["epsilon"] == answer["epsilon"]
    assert "noise_multiplier" not in again


def test_a_document_without_protection_has_a_reason():
    answer = account({"events": [{"type": "Unprotected", "reason": "raw updates"}], "delta": 1e-5})
    assert answer["epsilon"] is None
    assert answer["reason"] == "raw updates"
    json.dumps(answer, allow_nan=False)


GOOD = {"type": "SampledGaussian", "noise_multiplier": 1.0, "sampling_rate": 0.1, "steps": 3}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"events": [GOOD], "delta": 1e-5, "epsilons": 1}, ["epsilons", "target_epsilon"]),
        ({"delta": 1e-5}, ["events"]),
        ({"events": [GOOD]}, ["delta", "None"]),
        ({"events": [GOOD], "delta": 2}, ["delta", "2", "between 0 and 1"]),
        ({"events": [GOOD], "delta": 1e-5, "adjacency": "add"}, ["adjacency", "add", "zero-out"]),
        ({"events": [GOOD], "delta": 1e-5, "accountant": "prv"}, ["accountant", "prv", "rdp"]),
        ({"events": [GOOD | {"steps": 1.5}], "delta": 1e-5}, ["events[0].steps", "1.5", "whole"]),
        ({"events": [GOOD | {"rate": 1}], "delta": 1e-5}, ["events[0].rate", "sampling_rate"]),
        ({"events": [{"type": "Laplace"}], "delta": 1e-5}, ["events[0]", "Laplace", "SampledGaussian"]),
        ({"events": [GOOD, {"type": "BoundedRangeSelection", "epsilon": 1}], "delta": 1e-5}, ["events[1].count", "missing"]),
        ({"events": [{"type": "Unprotected", "reason": 3}], "delta": 1e-5}, ["events[0].reason", "3"]),
        ({"events": [GOOD | {"noise_multiplier": None}], "delta": 1e-5}, ["events[0].noise_multiplier", "target_epsilon"]),
        ({"events": [GOOD], "delta": 1e-5, "target_epsilon": 5}, ["target_epsilon", "noise_multiplier"]),
        (
            {"events": [GOOD | {"noise_multiplier": None}], "delta": 1e-5, "target_epsilon": -1},
            ["epsilon", "-1", "positive"],
        ),
    ],
)
def test_bad_documents_say_what_is_wrong(document, said):
    with pytest.raises(ConfigError) as caught:
        account(document)
    assert all(word in str(caught.value) for word in said)


def test_every_problem_of_a_document_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        account({"events": [GOOD | {"steps": -1}, {"type": "x"}], "delta": 0, "unknown": 1})
    assert len(caught.value.problems) == 4


def test_the_command_reads_a_document_and_prints_json():
    done = subprocess.run(
        [sys.executable, "-m", "dpcfl_net.privacy.accounting.document"],
        input=json.dumps({"events": [GOOD], "delta": 1e-5}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["epsilon"] == epsilon([SampledGaussian(1.0, 0.1, 3)], 1e-5)


@pytest.mark.parametrize("text", ["{", "[]", '{"delta": 1}'])
def test_the_command_refuses_bad_input(text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main() == 2
    said = capsys.readouterr()
    assert said.err
    assert not said.out


@pytest.mark.slow
def test_subtracting_the_selections_first_costs_a_third_more_noise():
    separate = calibrate(plan(6600), 5 - 20 * 0.15, DELTA)
    assert separate / 1.26876 > 1.3


@pytest.mark.slow
def test_prefixes_of_a_whole_run():
    rounds = [[SampledGaussian(1.25, 1.0, 1)]]
    rounds += [[SampledGaussian(1.25, 32 / 6600, 207)] + [BoundedRangeSelection(0.15, 1)] * (i < 20) for i in range(199)]
    prefixes = epsilon_by_prefix(rounds, DELTA)
    assert len(prefixes) == 200
    assert prefixes[-1] == epsilon(list(chain(*rounds)), DELTA)
    assert all(before <= after * (1 + 1e-9) for before, after in pairwise(prefixes))


def test_what_was_spent_when_a_run_stops_is_no_promise_if_its_releases_decide_when():
    """Who stops as soon as the privacy loss exceeds what was spent has 4 times the delta; of the plan the same delta holds."""
    noise, rounds, delta, runs = 10.0, 60, 1e-3, 200_000
    spent = np.array(epsilon_by_prefix([[SampledGaussian(noise, 1.0, 1)]] * rounds, delta))
    steps = np.random.default_rng(8).normal(0.5 / noise**2, 1 / noise, (runs, rounds))
    losses = np.cumsum(steps, axis=1)
    over = losses > spent
    end = np.where(over.any(axis=1), over.argmax(axis=1), rounds - 1)
    at_end = losses[np.arange(runs), end]
    stopped = float(np.maximum(-np.expm1(spent[end] - at_end), 0).mean())
    promised = float(np.maximum(-np.expm1(spent[-1] - losses[:, -1]), 0).mean())
    assert 3.5 * delta < stopped < 4.5 * delta  # its deviation is below 0.06 delta
    assert promised < 1.5 * delta
