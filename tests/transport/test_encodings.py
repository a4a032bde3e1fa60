"""Compressed forms of models and updates: round trips, bounds, and what no honest peer sends."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dpcfl_net.core.errors import Refused
from dpcfl_net.core.tensors import finite, pack, unpack
from dpcfl_net.transport import encodings

BIG = float(np.finfo(np.float32).max)


def floats(limit: float, most: int = 2500, least: int = 1):
    limit = float(np.float32(limit))
    return arrays(np.float32, st.integers(least, most), elements=st.floats(-limit, limit, width=32, allow_subnormal=False))


def norm(values: np.ndarray) -> float:
    return math.sqrt(math.fsum((values.astype(np.float64) ** 2).tolist()))


@given(floats(60000.0))
def test_float16_is_the_nearest_number_of_its_kind(model):
    rounded = encodings.to_half(model, "float16")
    assert np.array_equal(rounded, torch.from_numpy(model).half().numpy())
    back = encodings.from_half(rounded)
    assert back.dtype == np.float32
    assert (np.abs(back - model) <= np.maximum(np.abs(model) * 2.0**-11, 2.0**-25)).all()
    assert np.array_equal(encodings.to_half(back, "float16"), rounded)


@given(floats(3e38))
def test_bfloat16_is_the_nearest_number_of_its_kind(model):
    rounded = encodings.to_half(model, "bfloat16")
    assert np.array_equal(rounded, torch.from_numpy(model).bfloat16().view(torch.uint16).numpy())
    assert np.array_equal(encodings.from_half(rounded), torch.from_numpy(model).bfloat16().float().numpy())


@pytest.mark.parametrize(
    ("form", "outside"), [("float16", 65520.0), ("bfloat16", BIG), ("float16", np.nan), ("bfloat16", np.inf)]
)
def test_a_model_outside_the_range_is_refused_with_the_number(form, outside):
    model = np.array([1.0, -2.0, outside], np.float32)
    with pytest.raises(ValueError, match=rf"a model holds .*: {form} ends at"):
        encodings.to_half(model, form)
    assert finite(encodings.to_half(model[:2], form))


def test_the_bits_of_an_infinite_bfloat16_are_not_finite():
    assert finite(np.array([0x7F7F, 0xFF7F, 0], "<u2"))
    assert not any(finite(np.array([0, bits], "<u2")) for bits in (0x7F80, 0xFF80, 0x7FC0, 0xFFFF))


@settings(max_examples=60)
@given(floats(1e30))
def test_int8_is_within_half_a_step_and_never_longer(update):
    levels, scales = encodings.to_int8(update)
    assert (levels.dtype, scales.dtype, levels.size, scales.size) == (
        np.int8,
        np.float32,
        update.size,
        encodings.blocks(update.size),
    )
    decoded = encodings.from_int8(levels, scales)
    steps = np.repeat(scales.astype(np.float64), encodings.BLOCK)[: update.size]
    normal = steps > 1e-36  # a scale below the smallest normal number has fewer bits
    # Half a step, and the shortening of at most one part in 1e2 that keeps the norm.
    assert (np.abs(decoded.astype(np.float64) - update)[normal] <= 0.51 * steps[normal] + 0.02 * np.abs(update)[normal]).all()
    assert norm(decoded) <= norm(update)


def test_rounding_of_a_noisy_update_is_unbiased_and_small():
    """Gaussian noise is a dither: the mean of the error over many updates is that of a uniform error, far below the noise."""
    draws = np.random.default_rng(0)
    signal, repeats = np.linspace(-0.5, 0.5, 1024).astype(np.float32), 400
    errors = np.zeros(1024)
    squares = 0.0
    for _ in range(repeats):
        update = (signal + draws.standard_normal(1024)).astype(np.float32)
        error = encodings.from_int8(*encodings.to_int8(update)).astype(np.float64) - update
        errors += error / repeats
        squares += float((error**2).mean()) / repeats
    step = 4.5 / encodings.STEPS  # the largest of 1,024 noisy coordinates is about 3 to 4.5
    assert squares < step**2 / 12 * 1.2
    # 1,024 coordinates at 6 standard errors: false alarms below 3e-6 times 1e-3.
    assert np.abs(errors).max() < 6.5 * step / math.sqrt(12 * repeats)


@settings(max_examples=60)
@given(floats(BIG), st.floats(1e-4, 1.0))
def test_top_k_keeps_the_largest_and_the_first_of_equals(update, fraction):
    count = encodings.kept(update.size, fraction)
    indices, values = encodings.to_top_k(update, count)
    order = sorted(range(update.size), key=lambda k: (-abs(float(update[k])), k))
    assert indices.tolist() == sorted(order[:count])
    decoded = encodings.from_top_k(indices, values, update.size)
    assert np.array_equal(decoded[indices], update[indices])
    assert np.count_nonzero(decoded) <= count
    assert (count == update.size) <= np.array_equal(decoded, update)


@pytest.mark.parametrize("indices", [[0, 0, 1], [2, 1, 3], [-1, 0, 1], [3, 4, 5], [0, 1, 2**31 - 1], [-(2**31), 0, 1]])
def test_indices_that_no_client_sends_are_refused(indices):
    values = np.ones(3, np.float32)
    with pytest.raises(Refused, match=r"strictly increasing within 0\.\.4") as caught:
        encodings.from_top_k(np.array(indices, "<i4"), values, 5)
    assert caught.value.code == "encoding"
    assert encodings.from_top_k(np.array([0, 3, 4], "<i4"), values, 5).tolist() == [1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("level", "scale", "said"), [(1, -1.0, "negative"), (-128, 1.0, "outside -127..127"), (127, 3e38, "not finite")]
)
def test_scales_and_levels_that_no_client_sends_are_refused(level, scale, said):
    levels, scales = np.array([0, level], np.int8), np.array([scale], np.float32)
    with pytest.raises(Refused, match=said) as caught:
        encodings.from_int8(levels, scales)
    assert caught.value.code == "encoding"
    assert encodings.from_int8(np.array([0, -127], np.int8), np.array([2.0], np.float32)).tolist() == [0, -254]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_stays_so_and_raises_nothing(bad):
    """The server refuses it as it does without compression; the client must not fail on what it released."""
    update = np.array([1.0, bad, 2.0], np.float32)
    assert not finite(encodings.to_int8(update)[1])
    assert not finite(encodings.to_top_k(update, 1)[1])


def test_every_form_survives_the_codec_of_named_arrays():
    update = np.linspace(-1, 1, 2000).astype(np.float32)
    levels, scales = encodings.to_int8(update)
    indices, values = encodings.to_top_k(update, 20)
    sent = {"a": levels, "b": scales, "c": indices, "d": values}
    sent |= {form: encodings.to_half(update, form) for form in encodings.HALF}
    found = unpack(pack(sent))
    assert all(found[name].dtype == array.dtype and np.array_equal(found[name], array) for name, array in sent.items())


@pytest.mark.parametrize(
    ("fraction", "size", "count"), [(0.1, 30, 3), (0.07, 100, 7), (0.29, 100, 29), (0.1, 31, 4), (1e-9, 5, 1)]
)
def test_top_k_counts_the_fraction_as_it_is_written(fraction, size, count):
    """In binary, 0.1 * 30 is slightly above 3, and 0.07 * 100 above 7."""
    assert encodings.kept(size, fraction) == count
