"""Random allocation if a record is replaced: divergences against exact values and simulations, and the lemma behind the worst pair."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import ndtr
from test_allocation import limits

from dpcfl_net.privacy.accounting.accountant import deltas, epsilon
from dpcfl_net.privacy.accounting.allocation_replaced import difference, divergence, replacement_losses
from dpcfl_net.privacy.accounting.signed_sums import sum_of
from dpcfl_net.privacy.events.allocated_gaussian import AllocatedGaussian
from dpcfl_net.privacy.events.gaussian import plain_epsilon
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian


def positive_part(noise: float, ratio: float, strike: float) -> float:
    """E max(A - a B - k, 0): the difference increases in x, so that it is positive above one point."""
    y = strike * math.exp(noise**-2 / 2)
    root = math.hypot(y, 2 * math.sqrt(ratio))
    zero = noise * math.log((y + root) / 2 if y > 0 else 2 * ratio / (root - y))
    return float(ndtr(1 / noise - zero) - ratio * ndtr(-1 / noise - zero) - strike * ndtr(-zero))


def of_two_batches(noise: float, ratio: float) -> float:
    """One epoch of two batches: the first term by quadrature, the second in closed form."""

    def weighed(x: float) -> float:
        first = math.exp(x / noise - noise**-2 / 2) - ratio * math.exp(-x / noise - noise**-2 / 2)
        return math.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * positive_part(noise, ratio, -first)

    return quad(weighed, -14, 14, limit=400, epsabs=1e-14, epsrel=1e-11)[0] / 2


@pytest.mark.parametrize("noise", [0.3, 0.9, 40.0])
def test_one_batch_is_a_gaussian_release_of_twice_the_sensitivity(noise):
    for loss in (0.0, 1 / noise, 8 / noise):
        exact = float(ndtr(1 / noise - loss * noise / 2) - math.exp(loss) * ndtr(-1 / noise - loss * noise / 2))
        assert exact * (1 - 1e-9) <= divergence(noise, 1, loss) <= exact * (1 + 1e-3) + 2e-20
    for delta in (1e-3, 1e-9):
        exact = plain_epsilon(2 / noise, delta)
        assert exact * (1 - 1e-9) <= replacement_losses(noise, 1, 1e-4).epsilon(delta) <= exact * (1 + 1e-2)


@pytest.mark.parametrize("noise", [0.3, 0.9, 4.0, 1000.0])
def test_two_batches_have_the_divergence_of_a_quadrature(noise):
    for loss in (0.0, 0.3 / noise, 1 / noise, 3 / noise):
        exact = of_two_batches(noise, math.exp(loss))
        assert exact - 1e-13 <= divergence(noise, 2, loss) <= exact * (1 + 2e-3) + 1e-13


def test_rounding_keeps_the_mean_and_raises_convex_functions():
    noise, ratio, terms = 0.8, 1.7, 37
    one = difference(noise, ratio, 64)
    total = sum_of(one, terms)
    values, masses = total.points()
    mean, variance = 1 - ratio, math.exp(noise**-2) * (1 + ratio**2) - 2 * ratio * math.exp(-(noise**-2)) - (1 - ratio) ** 2
    assert masses.min() >= 0
    assert masses.sum() == pytest.approx(1, abs=1e-12)
    assert masses @ values == pytest.approx(terms * mean, rel=1e-12)
    assert terms * variance <= masses @ (values - terms * mean) ** 2 <= terms * variance * (1 + 2e-3)
    values, masses = one.points()
    for strike in (-1e3, -20.0, -0.7, 0.0, 0.01, 2.0, 50.0, 1e4):
        exact = positive_part(noise, ratio, strike)
        assert exact * (1 - 1e-11) <= masses @ np.maximum(values - strike, 0) + 1e-22 <= exact * 1.1 + 1e-18


def check_by_simulation(noise: float, batches: int, epochs: int, runs: int) -> None:
    points, rng = [0.0, 0.5, 1.0, 2.0, 4.0], np.random.default_rng(5)
    found = deltas([AllocatedGaussian(noise, batches, epochs)], points, "replace-one")
    losses = np.zeros(runs)
    for _ in range(epochs):
        x = noise * rng.standard_normal((runs, batches))
        x[np.arange(runs), rng.integers(batches, size=runs)] += 1
        losses += np.log(np.exp(x / noise**2).sum(1)) - np.log(np.exp(-x / noise**2).sum(1))
    for point, bound in zip(points, found, strict=True):
        low, high = limits(np.maximum(-np.expm1(point - losses), 0))
        assert low <= bound <= high * 1.01


def test_deltas_are_those_of_the_simulated_pair():
    check_by_simulation(0.9, 12, 2, 100_000)


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "batches", "epochs"), [(0.6, 5, 4), (0.9, 63, 3), (1.5, 20, 10), (0.5, 100, 1)])
def test_deltas_are_those_of_the_simulated_pair_in_long_runs(noise, batches, epochs):
    check_by_simulation(noise, batches, epochs, 200_000)


def test_opposite_unit_moves_are_the_worst_for_every_weight_of_the_noise_alone():
    """The lemma: the integral of max(N(v) - a N(u) - k N(0), 0) over the plane, abs(v), abs(u) <= 1, and k of either sign."""
    rng, noise, side = np.random.default_rng(2), 0.7, np.linspace(-6, 6, 601)
    x, y = np.meshgrid(side, side)
    cell = (side[1] - side[0]) ** 2

    def normal(at) -> np.ndarray:
        return np.exp(-((x - at[0]) ** 2 + (y - at[1]) ** 2) / (2 * noise**2)) / (2 * math.pi * noise**2)

    below = 0
    for _ in range(60):
        (angle, other), (length, shorter) = rng.uniform(0, 2 * math.pi, 2), np.minimum(rng.uniform(0, 1.5, 2), 1)
        v = length * math.cos(angle), length * math.sin(angle)
        u = shorter * math.cos(other), shorter * math.sin(other)
        a, k = math.exp(rng.uniform(-2, 2)), rng.uniform(-3, 3)
        found = float(np.maximum(normal(v) - a * normal(u) - k * normal((0, 0)), 0).sum()) * cell
        worst = positive_part(noise, a, k)
        assert found <= worst + 1e-6
        below += found < worst - 1e-3
    assert below > 30  # the bound is no triviality
    opposite = np.maximum(normal((1, 0)) - 2 * normal((-1, 0)) + 0.5 * normal((0, 0)), 0).sum() * cell
    assert opposite == pytest.approx(positive_part(noise, 2, -0.5), rel=1e-4)


def test_replacing_costs_about_what_it_does_with_poisson_batches():
    for records, batch, noise in ((2000, 32, 0.9235), (2000, 96, 1.3284)):
        batches = math.ceil(records / batch)
        found = epsilon([AllocatedGaussian(noise, batches, 40)], 1e-4, "replace-one")
        poisson = epsilon([SampledGaussian(noise, 1 / batches, 40 * batches)], 1e-4, "replace-one")
        assert found == pytest.approx(poisson, rel=0.02)
        assert found > epsilon([AllocatedGaussian(noise, batches, 40)], 1e-4)


@pytest.mark.slow
def test_epsilon_falls_with_noise_and_batches_and_rises_with_epochs():
    def spent(noise: float, batches: int, epochs: int) -> float:
        return epsilon([AllocatedGaussian(noise, batches, epochs)], 1e-5, "replace-one")

    by_noise = [spent(noise, 30, 5) for noise in (0.1, 0.5, 1.0, 900.0, 1e4)]
    by_batches = [spent(0.8, batches, 5) for batches in (1, 2, 7, 1000)]
    by_epochs = [spent(0.8, 7, epochs) for epochs in (20, 2, 1)]
    for values in (by_noise, by_batches, by_epochs):
        assert values == sorted(values, reverse=True)
