"""Norms of arrays: the fast check never accepts what the exact norm would refuse."""

from __future__ import annotations

import numpy as np
import pytest

from dpcfl_net.core.tensors import norm, surely_within


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 50_000])
@pytest.mark.parametrize("scale", [1e-30, 1e-21, 1.0, 1e18])
def test_a_norm_over_the_bound_is_never_surely_within(size, scale):
    rng = np.random.default_rng(size)
    for values in (rng.standard_normal(size), np.full(size, 0.1), rng.pareto(1.1, size)):
        array = (scale * values).astype(np.float32)
        length = norm(array)
        assert not surely_within(array, length * (1 - 1e-12))
        assert not surely_within(array, 0.0)


def test_a_norm_well_below_the_bound_is_surely_within():
    for size in (1, 4096, 50_000):
        array = np.random.default_rng(size).standard_normal(size, dtype=np.float32)
        assert surely_within(array, norm(array) * 1.001)
        assert surely_within(array.reshape(1, -1), norm(array) * 1.001)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_values_that_float32_cannot_square_are_left_to_the_exact_norm(bad):
    array = np.ones(5000, np.float32)
    array[17] = bad
    assert not surely_within(array, 1e35)


def test_other_types_are_left_to_the_exact_norm():
    assert not surely_within(np.full(5000, 2**62), 1e300)
