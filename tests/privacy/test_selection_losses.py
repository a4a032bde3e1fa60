"""Selections of narrow and wide ranges: against high precision, direct search, Renyi accounting, and themselves."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import binom

from dpcfl_net.privacy.accounting.accountant import epsilon
from dpcfl_net.privacy.events.bounded_range_selection import BoundedRangeSelection, _points, _profile

BORDERS = (1e-4, 4.0, 500.0)
COUNTS = (1, 2, 16, 17, 64, 65, 128, 129, 256, 257, 1000)


def spent(extent: float, count: int, delta: float, accountant: str = "pld") -> float:
    return epsilon([BoundedRangeSelection(extent, count)], delta, accountant=accountant)


# Against exact divergences


def _exact_profiles(extent: float, y: float):
    """F_1 in closed form, and F_2 by a search over t with 50 digits, at the loss y * extent >= 0."""
    mpmath = pytest.importorskip("mpmath")

    def profiles(functions, number):
        """F_1 at the loss, and what F_2 would be if t were the best, in the arithmetic of `math` or `mpmath`."""
        width = number(extent)
        loss = number(y) * width

        def one(at):
            if at < 0:
                return -functions.expm1(at) + functions.exp(at) * one(-at)
            return number(0) if at >= width else functions.expm1((at - width) / 2) ** 2 / -functions.expm1(-width)

        def value(t):
            rise = functions.expm1(t - width) / functions.expm1(-width)
            return rise * one(loss - t) + (1 - rise) * one(loss - t + width)

        return one(loss), value

    _, near = profiles(math, float)  # floats, quicker, tell where to search
    best = max(range(401), key=lambda i: near(extent * i / 400))
    with mpmath.workdps(50):
        one, value = profiles(mpmath, mpmath.mpf)
        width = mpmath.mpf(extent)
        low, high = width * max(best - 1, 0) / 400, width * min(best + 1, 400) / 400
        for _ in range(40):  # what a ternary search finds is a value that some selection reaches
            left, right = low + (high - low) / 3, high - (high - low) / 3
            low, high = (left, high) if value(left) < value(right) else (low, right)
        return float(one), float(value((low + high) / 2))


@pytest.mark.parametrize("extent", [1e-12, 1e-9, 1e-5, 9.9e-5, 1e-3, 0.5, 4.0, 4.1, 12.0, 60.0])
def test_one_and_two_selections_against_fifty_digits(extent):
    points = _points(extent, 2)
    for y in (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5):
        at = round(y * points)
        one, two = _exact_profiles(extent, at / points)
        found_one, found_two = (_profile(extent, points, size) for size in (1, 2))
        if at < points:
            assert one <= found_one[at] <= one * (1 + 2e-3) + 1e-300
        assert two <= found_two[at] <= two * (1 + 5e-3)


def test_three_wide_selections_against_a_direct_search():
    """F_3 at the losses that decide, by trying 4,000 values of t on a fine table of F_2; the table's chords err upward."""
    extent, points = 9.0, 2000
    table, found = _profile(extent, points, 2), _profile(extent, _points(extent, 3), 3)
    grid = extent / points * np.arange(-points, len(table))
    below = np.exp(-grid[-len(table) :]) * table - np.expm1(-grid[-len(table) :])
    values = np.concatenate((below[points:0:-1], table))
    t = extent * np.arange(1, points) / points
    rise = np.expm1(t - extent) / math.expm1(-extent)
    for share in (0.5, 1.0, 1.5, 2.0, 2.5, 2.8):
        at = round(share * _points(extent, 3))
        loss = at * extent / _points(extent, 3)
        reached = np.max(
            rise * np.interp(loss - t, grid, values, right=0.0)
            + (1 - rise) * np.interp(loss - t + extent, grid, values, right=0.0)
        )
        assert reached * (1 - 1e-5) <= found[at] <= reached * (1 + 1e-3)


# Against selections that all have the same two losses


def two_point(extent: float, count: int, t: float, delta: float) -> float:
    """Exact epsilon of `count` selections whose losses are t or t - extent."""
    successes = np.arange(count + 1)
    losses = count * (t - extent) + extent * successes
    masses = binom.pmf(successes, count, math.expm1(t - extent) / math.expm1(-extent))
    low, high = 0.0, count * extent
    for _ in range(80):
        middle = (low + high) / 2
        beyond = losses > middle
        low, high = (middle, high) if masses[beyond] @ -np.expm1(middle - losses[beyond]) > delta else (low, middle)
    return high


@pytest.mark.parametrize(
    ("extent", "count", "delta", "room"),
    [
        (1e-5, 1, 1e-6, 1.002),
        (1e-5, 200, 1e-6, 1.01),
        (1e-5, 10_000, 1e-6, 1.01),
        (5e-5, 1000, 1e-7, 1.01),
        (1e-8, 100, 1e-9, 1.01),
        (1e-10, 1000, 1e-11, 1.01),
        (1e-12, 300, 1e-12, 1.01),
        (4.1, 20, 1e-4, 1.02),
        pytest.param(4.1, 256, 1e-4, 1.01, marks=pytest.mark.slow),
        (10.0, 20, 1e-4, 1.01),
        pytest.param(10.0, 1000, 1e-6, 1.01, marks=pytest.mark.slow),
        (40.0, 10, 1e-4, 1.01),
        (100.0, 50, 1e-6, 1.01),
        pytest.param(400.0, 1000, 1e-6, 1.02, marks=pytest.mark.slow),
        (600.0, 1000, 1e-6, 1.02),
    ],
)
def test_narrow_and_wide_ranges_are_charged_what_they_cost(extent, count, delta, room):
    least = max(two_point(extent, count, extent * share, delta) for share in np.linspace(0.02, 0.995, 118))
    assert least * (1 - 1e-9) <= spent(extent, count, delta) <= min(room * least, extent * count * (1 + 1e-5))


def test_narrow_selections_cost_by_their_deviation_and_not_by_their_number():
    """A normal loss of deviation E sqrt(k) / 2 has the divergence of a Gaussian release of that mean, to first order."""
    from dpcfl_net.privacy.events.gaussian import plain_epsilon

    for extent, count, delta in ((1e-5, 10_000, 1e-6), (1e-6, 10_000, 1e-7), (1e-8, 10**6, 1e-9)):
        assert spent(extent, count, delta) == pytest.approx(plain_epsilon(extent * math.sqrt(count) / 2, delta), rel=0.01)


def test_narrow_ranges_scale():
    """F_k(y) is of the order of E, so E, delta and epsilon shrink together: no precision is lost on the way down."""
    whole = spent(1e-4, 100, 1e-5)
    for scale in (2.0**-10, 2.0**-20, 2.0**-26):
        assert spent(1e-4 * scale, 100, 1e-5 * scale) / scale == pytest.approx(whole, rel=2e-3)


@pytest.mark.parametrize(
    "extent", [1e-9, 1e-3, 0.02, 0.15, 1.0, *(pytest.param(wide, marks=pytest.mark.slow) for wide in (3.9, 4.1, 6.0, 10.0))]
)
def test_not_above_renyi_accounting(extent):
    """Near count * extent, where both are exact but for the grid, by a ten thousandth."""
    for count in (20, 64, 300, 1000):
        for delta in (1e-3, 1e-6, 1e-9):
            assert spent(extent, count, delta) <= spent(extent, count, delta, "rdp") * (1 + 1e-4 * (extent > 4))


@pytest.mark.parametrize("extent", [*(pytest.param(wide, marks=pytest.mark.slow) for wide in (15.0, 60.0, 300.0)), 800.0, 1e4])
def test_wide_ranges_are_near_renyi_accounting(extent):
    """Where next to nothing is left between the truth and pure privacy, the coarser grid may cost more than the moments."""
    for count in (1, 20, 300):
        assert spent(extent, count, 1e-6) <= 1.006 * spent(extent, count, 1e-6, "rdp")


# Order and continuity


@pytest.mark.parametrize("count", [1, *(pytest.param(count, marks=pytest.mark.slow) for count in (20, 100, 300))])
def test_more_range_never_costs_less(count):
    ranges = np.sort(np.concatenate([np.geomspace(1e-9, 1e3, 13), [b * s for b in BORDERS for s in (0.999, 1, 1.001, 1.02)]]))
    found = [
        [spent(float(extent), count, delta) for delta in (1e-3, 1e-6, 1e-10)] for extent in ranges
    ]  # a range keeps its profiles
    for by_range in zip(*found, strict=True):
        assert all(before <= after * (1 + 1e-6) for before, after in pairwise(by_range))


@pytest.mark.parametrize(
    "extent", [1e-6, 0.01, 0.5, *(pytest.param(wide, marks=pytest.mark.slow) for wide in (3.0, 5.0, 50.0))]
)
def test_every_further_selection_costs(extent):
    found = [spent(extent, count, 1e-8) for count in (*range(1, 20), 63, 64, 65, 66, 127, 128, 129, 130, 255, 256, 257, 258)]
    assert all(before <= after for before, after in pairwise(found))
    by_delta = [spent(extent, 40, delta) for delta in np.geomspace(1e-2, 1e-14, 25)]
    assert all(before <= after for before, after in pairwise(by_delta))


@pytest.mark.parametrize(
    ("border", "delta"),
    [(1e-4, 1e-4)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [(4.0, 1e-4), (500.0, 1e-4), *((border, 1e-8) for border in BORDERS)]
    ],
)
def test_nothing_jumps_where_the_computation_changes(border, delta):
    """All counts of one range in a row: they share its profiles."""
    below, above = ([spent(border * (1 + side * 1e-9), count, delta) for count in COUNTS] for side in (-1, 1))
    assert above == pytest.approx(below, rel=0.01)
