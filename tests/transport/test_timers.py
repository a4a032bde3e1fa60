"""Deadlines by key, against a plain dictionary."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from dpcfl_net.transport.timers import SPARE, Timers

STEPS = st.lists(
    st.tuples(st.sampled_from(["set", "drop", "expired"]), st.integers(0, 5), st.floats(0, 100, allow_nan=False)), max_size=300
)


@given(STEPS)
def test_a_key_expires_once_at_its_last_deadline(steps: list[tuple[str, int, float]]) -> None:
    timers, expected = Timers(), dict[int, float]()
    for what, key, at in steps:
        if what == "set":
            timers.set(key, at)
            expected[key] = at
        elif what == "drop":
            timers.drop(key)
            expected.pop(key, None)
        else:
            due = sorted((when, name) for name, when in expected.items() if when <= at)
            assert timers.expired(at) == [name for _, name in due]
            for _, name in due:
                del expected[name]
        assert timers.next <= min(expected.values(), default=math.inf)


def test_replaced_deadlines_take_no_memory() -> None:
    timers = Timers()
    for at in range(10_000):
        timers.set(at % 3, 1e6 - at)
    assert len(timers._heap) <= SPARE + 7
    assert timers.expired(1e6) == [0, 2, 1]
    assert timers.next == math.inf
