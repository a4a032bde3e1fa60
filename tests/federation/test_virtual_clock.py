"""The virtual clock: order and duration of transfers and client steps, from formulas that are easy by hand."""

from __future__ import annotations

import time

import pytest

from dpcfl_net.federation.virtual_clock import Trip, VirtualClock, VirtualNetwork, Work, arrival_s, trips
from dpcfl_net.transport.links.link import Link
from dpcfl_net.transport.links.schedule import Schedule, Step

MEGABIT = Schedule(Link(up_bps=1e6, down_bps=1e6, latency_s=0.1))  # 125 kB take a second
WORK = Work((125_000,), 2.0, (250_000,))


def test_a_call_is_transfer_computation_and_transfer() -> None:
    trip = trips(10.0, {0: WORK}, VirtualNetwork({0: MEGABIT}))[0]
    assert vars(trip) == pytest.approx(vars(Trip(10.0, 11.1, 11.1, 13.1, 13.1, 15.2)))
    assert [what for what, _, _ in trip.spans()] == ["receive", "train", "send"]


def test_a_compute_factor_makes_a_device_slower() -> None:
    found = trips(0.0, {0: WORK, 1: WORK}, VirtualNetwork({0: MEGABIT, 1: MEGABIT}, compute_factors={1: 3.0}))
    assert found[1].answered - found[0].answered == pytest.approx(4.0)


@pytest.mark.parametrize(("cores", "ends"), [(None, [2.0] * 4), (1, [2.0, 4.0, 6.0, 8.0]), (2, [2.0, 2.0, 4.0, 4.0])])
def test_clients_compute_in_parallel_up_to_the_number_of_cores(cores: int | None, ends: list[float]) -> None:
    work = {client: Work((0,), 2.0, (0,)) for client in range(4)}
    found = trips(0.0, work, VirtualNetwork(dict.fromkeys(work, Schedule()), cores))
    assert sorted(trip.computed for trip in found.values()) == pytest.approx(ends)


def test_a_core_goes_to_the_client_whose_task_is_there_first() -> None:
    links = {0: MEGABIT, 1: Schedule(Link(down_bps=1e7))}
    found = trips(0.0, {0: WORK, 1: WORK}, VirtualNetwork(links, cores=1))
    assert found[1].begun == pytest.approx(0.1)
    assert found[0].begun == pytest.approx(2.1)
    assert [what for what, _, _ in found[0].spans()] == ["receive", "wait", "train", "send"]


def test_answers_leave_at_multiples_of_the_deadline() -> None:
    trip = trips(0.0, {0: WORK}, VirtualNetwork({0: MEGABIT}), deadline_s=1.5)[0]
    assert trip.sent == pytest.approx(trip.arrived + 3.0)
    at_once = trips(0.0, {0: Work((0,), 0.0, (0,))}, VirtualNetwork({0: MEGABIT}), deadline_s=1.5)[0]
    assert at_once.sent == pytest.approx(at_once.arrived + 1.5)


def test_a_link_that_is_off_delays_the_transfer() -> None:
    off = Schedule(Link(up_bps=1e6, down_bps=1e6), (Step(0.0, 60.0, 0, 0),))
    assert arrival_s(off, (125_000,), "down", 5.0) == pytest.approx(61.0)


def test_long_messages_wait_for_confirmations() -> None:
    """16 chunks of 2 MB at 1 Gbit/s: 8 are sent at once, the others as confirmations come back after a round trip of 2 s."""
    parts = (0, *[2_000_000] * 16)
    fast, slow = (Schedule(Link(down_bps=bps, latency_s=1.0)) for bps in (1e9, 1e6))
    first_confirmed = 4 * 0.016 + 2.0
    assert arrival_s(fast, parts, "down", 0.0) == pytest.approx(first_confirmed + 8 * 0.016 + 1.0, rel=0.01)
    assert arrival_s(slow, parts, "down", 0.0) == pytest.approx(16 * 16 + 1.0)  # the line is never idle
    assert arrival_s(fast, parts[:9], "down", 0.0) == pytest.approx(8 * 0.016 + 1.0)


def test_the_clock_counts_the_server_s_processor_time_and_nothing_else() -> None:
    before = time.time()
    clock = VirtualClock(VirtualNetwork({}), elapsed_s=100.0)
    after = time.time()
    assert clock.now() == 100.0
    clock.start()
    time.sleep(0.3)
    with clock.paused():
        _spend(0.3)
    assert clock.now() - 100.0 < 0.1
    _spend(0.2)
    assert 0.2 <= clock.now() - 100.0 < 0.5
    clock.advance(200.0)
    clock.advance(150.0)
    assert 200.0 <= clock.now() < 200.1
    assert before + 100 <= clock.time() < after + 100.2  # the run would have begun 100 s before


def _spend(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(1000))
