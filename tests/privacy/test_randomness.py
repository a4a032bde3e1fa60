"""Private streams: keyed, separate, one-way in form, and independent of any global generator."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dpcfl_net.privacy.randomness import derive, stream

KEY = b"sixteen bytes ok"


def test_the_same_key_and_purpose_give_the_same_stream() -> None:
    assert np.array_equal(stream(KEY, "noise").standard_normal(1000), stream(KEY, "noise").standard_normal(1000))


def test_streams_differ_by_key_and_by_purpose() -> None:
    streams = [stream(KEY, "noise"), stream(KEY, "batches"), stream(KEY + b"\0", "noise"), stream(KEY[::-1], "noise")]
    draws = [s.standard_normal(20_000) for s in streams]
    for a, b in itertools.combinations(draws, 2):
        assert not np.isin(a, b).any()
        assert abs(np.corrcoef(a, b)[0, 1]) < 6 / np.sqrt(20_000)


def test_global_generators_are_neither_read_nor_moved() -> None:
    np.random.seed(1)
    before = np.random.get_state()[1].tolist()
    first = stream(KEY, "noise").random(10)
    assert np.random.get_state()[1].tolist() == before
    np.random.seed(2)
    assert np.array_equal(first, stream(KEY, "noise").random(10))


def test_derive_tells_apart_every_sequence_of_labels() -> None:
    texts = [(), ("",), ("", ""), ("a",), ("b",), ("a", "b"), ("ab",), ("a", "", "b"), ("1",), ("i1",)]
    sequences = [*texts, (1,), (-1,), (1, 1), (11,), (2**70,)]
    keys = {derive(KEY, *labels) for labels in sequences}
    assert len(keys) == len(sequences)
    assert all(len(key) == 32 for key in keys)
    assert derive(KEY, "a", 1) == derive(KEY, "a", 1)
    assert derive(KEY + b"\0", "a") != derive(KEY, "a")


@pytest.mark.parametrize("key", [b"", b"fifteen bytes!!", "sixteen chars ok"])
def test_short_keys_are_refused(key: bytes) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        derive(key, "a")


@pytest.mark.parametrize("label", [True, 1.0, None, b"a"])
def test_labels_of_other_types_are_refused(label: object) -> None:
    with pytest.raises(TypeError):
        derive(KEY, label)  # type: ignore[arg-type]
