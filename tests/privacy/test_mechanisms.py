"""The exponential mechanism against exact probabilities; noise on its grid."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from dpcfl_net.privacy.mechanisms import (
    GRID_BITS,
    exponential_mechanism,
    gaussian_on_grid,
    lowest_by_exponential_mechanism,
    randomised_response,
    shortened,
)
from dpcfl_net.privacy.normal_stream import NormalStream
from dpcfl_net.privacy.randomness import stream

KEY = b"sixteen bytes ok"


@pytest.mark.parametrize(
    ("counts", "eta"), [([5, 7, 6, 7], 0.4), ([0, 30], 0.05), ([3], 1.0), ([9, 9, 9], 0.7), ([100, 50, 99], 0.0)]
)
def test_selection_has_the_exact_probabilities(counts: list[int], eta: float) -> None:
    draws = 20_000
    rng = stream(KEY, f"{counts}")
    seen = np.bincount([exponential_mechanism(counts, eta, rng) for _ in range(draws)], minlength=len(counts))
    weights = np.exp(eta * (np.array(counts) - max(counts)))
    expected = draws * weights / weights.sum()
    assert expected.min() > 50
    if len(counts) == 1:
        assert seen[0] == draws
    else:
        assert stats.chisquare(seen, expected).pvalue > 1e-7


def test_a_wrong_scale_of_eta_would_be_seen() -> None:
    rng = stream(KEY, "control")
    seen = np.bincount([exponential_mechanism([5, 7, 6, 7], 0.2, rng) for _ in range(20_000)], minlength=4)
    weights = np.exp(0.4 * np.array([5, 7, 6, 7]))
    assert stats.chisquare(seen, 20_000 * weights / weights.sum()).pvalue < 1e-7


class _Extreme:
    """A generator stuck at one end of [0, 1)."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self, size: int) -> np.ndarray:
        return np.full(size, self.value)


@pytest.mark.parametrize("value", [0.0, math.nextafter(1, 0)])
def test_the_ends_of_the_uniform_draw_stay_finite(value: float) -> None:
    with np.errstate(all="raise"):
        assert exponential_mechanism([1, 3, 2], 0.5, _Extreme(value)) == 1  # type: ignore[arg-type]


class _Draws:
    """A generator with given numbers in [0, 1), and the smallest whole numbers."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def random(self, size: int) -> np.ndarray:
        return np.array(self.values[:size])

    def integers(self, low: int, high: int, size: int) -> np.ndarray:
        return np.full(size, low)


@pytest.mark.parametrize("epsilon", [30.0, 40.0, 1e6])
def test_the_rarest_outcome_can_be_drawn_at_any_epsilon(epsilon: float) -> None:
    unlucky = _Draws(0.0, math.nextafter(1, 0))
    assert exponential_mechanism([1, 0], epsilon, unlucky) == 1  # type: ignore[arg-type]
    losses = np.array([0.0, 9.0])
    assert lowest_by_exponential_mechanism(losses, epsilon, 2, 1.0, unlucky) == 1  # type: ignore[arg-type]
    assert randomised_response([1], epsilon, 2, _Draws(1 - 800 * 2.0**-53)).tolist() == [0]  # type: ignore[arg-type]


@pytest.mark.parametrize(("epsilon", "categories"), [(29.5, 2), (28.3, 3), (27.9, 2), (26.6, 5), (25.1, 4)])
def test_a_label_is_replaced_at_least_as_often_as_its_epsilon_needs(epsilon: float, categories: int) -> None:
    others = (categories - 1) * math.exp(-epsilon)
    needed = math.ceil(others / (1 + others) * 2**53)
    released = [
        int(randomised_response([1], epsilon, categories, _Draws(1 - n * 2.0**-53))[0])  # type: ignore[arg-type]
        for n in (needed, needed + 1)
    ]
    assert released == [2 % categories, 1]


@pytest.mark.parametrize("label", [None, -1, 3, 4])
def test_a_label_that_is_none_of_the_categories_gives_one_at_random(label: int | None) -> None:
    released = randomised_response([label] * 3_000, 30.0, 3, stream(KEY, f"label {label}"))
    assert stats.chisquare(np.bincount(released, minlength=3)).pvalue > 1e-7


def test_no_rounding_makes_a_clipped_vector_longer_than_the_clip() -> None:
    rng = np.random.default_rng(0)
    for clip in (0.1, 1.0, 3.0):
        for _ in range(20):
            parts = shortened([rng.normal(size=7), rng.normal(size=5).astype(np.float32)], clip)
            assert sum(Fraction(float(x)) ** 2 for part in parts for x in part) <= Fraction(clip) ** 2


def test_only_differences_of_counts_matter_however_large() -> None:
    small = [exponential_mechanism([0, 1, 2], 0.3, stream(KEY, str(i))) for i in range(200)]
    huge = [exponential_mechanism([2**60, 2**60 + 1, 2**60 + 2], 0.3, stream(KEY, str(i))) for i in range(200)]
    assert small == huge
    assert len(set(small)) == 3


@pytest.mark.parametrize(
    ("counts", "eta"),
    [([], 1.0), ([1.5, 2.0], 1.0), ([1, 2], -0.1), ([1, 2], math.nan), ([1, 2], math.inf), ([[1]], 1.0)],
)
def test_bad_arguments_are_refused(counts: list, eta: float) -> None:
    with pytest.raises(ValueError):
        exponential_mechanism(counts, eta, stream(KEY, "bad"))


def test_noise_has_its_deviation_and_is_normal() -> None:
    size, deviation = 200_000, 3.7
    noise = gaussian_on_grid(np.zeros(size), deviation, NormalStream(KEY, "noise")) / deviation
    assert abs(noise.std() - 1) < 6 / math.sqrt(2 * size)
    assert abs(noise.mean()) < 6 / math.sqrt(size)
    assert stats.kstest(noise, "norm").pvalue > 1e-7


def test_every_noisy_sum_is_a_whole_multiple_of_the_grid() -> None:
    total = np.random.default_rng(0).normal(size=50_000) * 10
    deviation = 1.3 * 0.7
    steps = gaussian_on_grid(total, deviation, NormalStream(KEY, "noise")) / (deviation * 2.0**-GRID_BITS)
    assert np.abs(steps - np.rint(steps)).max() < 1e-6
    assert np.abs(total / (deviation * 2.0**-GRID_BITS) % 1).max() > 0.9


def test_the_sum_is_in_the_noisy_sum() -> None:
    total = np.linspace(-5, 5, 100_000)
    plain = gaussian_on_grid(np.zeros_like(total), 1.0, NormalStream(KEY, "noise"))
    moved = gaussian_on_grid(total, 1.0, NormalStream(KEY, "noise"))
    assert np.abs(moved - plain - total).max() <= 1.01 * 2.0**-GRID_BITS
