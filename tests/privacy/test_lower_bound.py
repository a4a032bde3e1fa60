"""Lower bounds on epsilon lie below the upper ones and below closed forms, and close to them."""

from __future__ import annotations

import numpy as np
import pytest

from dpcfl_net.privacy.accounting.accountant import epsilon
from dpcfl_net.privacy.accounting.lower import epsilon_at_least
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize(
    "events",
    [
        [SampledGaussian(3.0, 1.0, 4)],
        [SampledGaussian(1.0, 0.1, 40)],
        [SampledGaussian(1.0, 0.2, 5), SampledGaussian(2.0, 1.0, 1)],
    ],
)
def test_the_lower_bound_is_just_below_the_upper_one(events, adjacency):
    upper = epsilon(events, 1e-5, adjacency)
    lower = epsilon_at_least(events, 1e-5, upper, adjacency)
    assert 0.997 * upper < lower < upper


def test_one_release_is_bounded_below_by_its_definition():
    """Delta at the bound, integrated directly, is at least delta."""
    z, q, delta = 0.8, 0.05, 1e-6
    lower = epsilon_at_least([SampledGaussian(z, q, 1)], delta, 4.0)
    x = np.linspace(-12, 14, 2_000_001)
    out, moved = (np.exp(-((x - shift) ** 2) / (2 * z**2)) / (z * np.sqrt(2 * np.pi)) for shift in (0, 1))
    held = (1 - q) * out + q * moved
    worst = max(np.trapezoid(np.maximum(p - np.exp(lower) * r, 0), x) for p, r in ((held, out), (out, held)))
    assert delta < worst < 1.05 * delta


def test_noise_that_hides_everything_gives_zero():
    assert epsilon_at_least([SampledGaussian(1000.0, 0.01, 1)], 0.1, 0.5) == 0


@pytest.mark.parametrize(("noise", "rate", "steps"), [(0.5, 1e-4, 10**5), (100.0, 0.1, 10**6)])
@pytest.mark.parametrize("delta", [1e-9, pytest.param(1e-10, marks=pytest.mark.slow), 1e-12])
def test_many_releases_are_bounded_below_at_small_deltas(noise, rate, steps, delta):
    events = [SampledGaussian(noise, rate, steps)]
    upper = epsilon(events, delta)
    assert 0.8 * upper < epsilon_at_least(events, delta, upper) < upper
