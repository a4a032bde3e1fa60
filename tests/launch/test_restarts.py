"""Restarts of roles: a limit for each role, and delays that double."""

from __future__ import annotations

import pytest

from dpcfl_net.launch import restarts
from dpcfl_net.launch.restarts import MOST_RESTART_S, RESTART_S, Restarts


@pytest.fixture
def now(monkeypatch):
    """The clock of the restarts, in seconds; the test sets it."""
    clock = [100.0]
    monkeypatch.setattr(restarts.time, "monotonic", lambda: clock[0])
    return clock


def test_each_role_has_a_limit(now):
    roles = Restarts(2)
    assert [roles.schedule("observer") for _ in range(3)] == [1, 2, None]
    assert roles.schedule("coordinator") == 1
    assert roles.scheduled == {"observer", "coordinator"}
    assert Restarts(0).schedule("observer") is None


def test_a_role_that_crashes_again_waits_twice_as_long_up_to_a_limit(now):
    roles, waited = Restarts(9), []
    for _ in range(9):
        crashed = now[0]
        roles.schedule("observer")
        assert roles.due() == []
        while not roles.due():
            now[0] += RESTART_S / 2
        roles.begin("observer")
        assert not roles.scheduled
        waited.append(now[0] - crashed)
    assert waited == pytest.approx([min(RESTART_S * 2**k, MOST_RESTART_S) for k in range(9)], abs=RESTART_S / 2)
