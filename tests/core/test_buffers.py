"""Reuse of large buffers."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from dpcfl_net.core import buffers, tensors

LARGE = buffers.LEAST + 4


@pytest.fixture(autouse=True, scope="module")
def _no_garbage() -> None:
    """Buffers that earlier tests left in cycles of references would become free during a test."""
    gc.collect()


@pytest.fixture(autouse=True)
def _none_free() -> Iterator[None]:
    buffers.give_back()
    yield
    buffers.keep_at_most(float("inf"))
    buffers.give_back()


def test_a_buffer_is_used_again_only_when_nothing_refers_to_it() -> None:
    first = buffers.empty(LARGE)
    array = np.frombuffer(first, np.float32)[10:]
    address = array.__array_interface__["data"][0] - 40
    array[:] = 1.0
    del first
    other = np.frombuffer(buffers.empty(LARGE), np.float32)
    other[:] = 2.0
    assert (array == 1.0).all()  # a view of the first one keeps it
    assert buffers.free_bytes() == 0
    del array
    assert buffers.free_bytes() == LARGE
    again = np.frombuffer(buffers.empty(LARGE), np.float32)
    assert again.__array_interface__["data"][0] == address
    assert buffers.free_bytes() == 0


def test_packed_tensors_that_are_kept_never_change() -> None:
    models = [{"model": np.full(LARGE // 4, value, np.float32)} for value in range(4)]
    packed = [tensors.pack(model) for model in models]
    split = tensors.unpack(packed[0])
    assert split["model"].flags.aligned
    del packed[0]
    more = [tensors.pack(models[3]) for _ in range(3)]
    assert (split["model"] == 0).all()
    assert all((tensors.unpack(kept)["model"] == value + 1).all() for value, kept in enumerate(packed))
    assert len({bytes(kept) for kept in more}) == 1


def test_a_new_buffer_takes_the_place_of_free_ones_of_other_sizes() -> None:
    held = [buffers.empty(LARGE) for _ in range(4)]
    held.clear()
    assert buffers.free_bytes() == 4 * LARGE
    larger = buffers.empty(2 * LARGE + 1)
    assert buffers.free_bytes() == LARGE
    del larger
    assert buffers.free_bytes() == 3 * LARGE + 1


def test_free_buffers_are_limited() -> None:
    buffers.keep_at_most(2 * LARGE)
    held = [buffers.empty(LARGE) for _ in range(4)]
    held.clear()
    assert buffers.free_bytes() == 2 * LARGE
    buffers.keep_at_most(LARGE)
    assert buffers.free_bytes() == LARGE
    buffers.give_back()
    assert buffers.free_bytes() == 0
    small = buffers.empty(buffers.LEAST - 1)
    del small
    assert buffers.free_bytes() == 0


def test_threads_never_share_a_buffer() -> None:
    failures: list[int] = []

    def work(number: int) -> None:
        for turn in range(200):
            mine = np.frombuffer(buffers.empty(LARGE), np.uint8)
            mine[::4096] = number
            if not (mine[::4096] == number).all():
                failures.append(turn)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert buffers.free_bytes() <= 4 * LARGE
