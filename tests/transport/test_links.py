"""Links: the transfer-time formula against numerical integration and simulation, presets, traces, and errors."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.transport.links.link import MSS_BYTES, Link
from dpcfl_net.transport.links.pipe import Bottleneck
from dpcfl_net.transport.links.presets import PRESETS, preset
from dpcfl_net.transport.links.schedule import Schedule, Step
from dpcfl_net.transport.links.trace import COLUMNS, read_trace

TICK_S = 0.001
HEADER = ",".join(COLUMNS)


def ticks(least: int, most: int) -> st.SearchStrategy[float]:
    return st.integers(least, most).map(lambda count: count * TICK_S)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    on_s = draw(st.none() | ticks(20, 500))
    link = Link(
        latency_s=draw(ticks(0, 200)),
        down_bps=draw(st.integers(100_000, 10_000_000)),
        loss=draw(st.sampled_from([0.0, 0.001, 0.1])),
        on_s=on_s,
        off_s=0.0 if on_s is None else draw(ticks(0, 500)),
    )
    edges = sorted(draw(st.sets(st.integers(0, 3000), max_size=6)))
    edges = edges[: len(edges) // 2 * 2]
    rates, delays = st.none() | st.just(0) | st.integers(100_000, 10_000_000), st.none() | ticks(0, 200)
    steps = [
        Step(a * TICK_S, b * TICK_S, None, draw(rates), draw(delays)) for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]
    return Schedule(link, tuple(steps))


def rate_at(schedule: Schedule, time_s: float) -> float:
    """Rate down, written without the code under test."""
    link, rate, latency_s = schedule.link, schedule.link.down_bps, schedule.link.latency_s
    for step in schedule.steps:
        if step.from_s <= time_s < step.to_s:
            rate = rate if step.down_bps is None else step.down_bps
            latency_s = latency_s if step.latency_s is None else step.latency_s
    if link.on_s is not None and math.fmod(time_s, link.on_s + link.off_s) >= link.on_s:
        return 0.0
    if link.loss and latency_s:
        rate = min(rate, 1460 * 8 / (2 * latency_s) * math.sqrt(3 / 2) / math.sqrt(link.loss))
    return rate


@settings(max_examples=100)
@given(schedules(), st.integers(2, 100_000), ticks(0, 2000))
def test_sending_times_agree_with_numerical_integration(schedule: Schedule, size: int, start_s: float) -> None:
    left, time_s = 8.0 * size, start_s
    while left > 1e-6:
        left -= rate_at(schedule, time_s + TICK_S / 2) * TICK_S  # constant within a tick
        time_s += TICK_S
    # Where the last bit passes just before the link is turned off, rounding decides: one byte less and one byte more surround it.
    assert schedule.sent_at(size - 1, "down", start_s) <= time_s + 1e-6
    assert schedule.sent_at(size + 1, "down", start_s) >= time_s - TICK_S - 1e-6


@given(schedules(), st.integers(0, 100_000), st.integers(0, 100_000), ticks(0, 2000))
def test_sending_in_two_parts_takes_as_long(schedule: Schedule, first: int, second: int, start_s: float) -> None:
    middle_s = schedule.sent_at(first, "down", start_s)
    least, most = (schedule.sent_at(first + second + change, "down", start_s) for change in (-1, 1))
    assert least - 1e-6 <= schedule.sent_at(second, "down", middle_s) <= most + 1e-6 or not first or not second
    assert start_s <= middle_s


@pytest.mark.parametrize(
    ("link", "size", "direction", "expected_s"),
    [
        (Link(), 10**9, "up", 0.0),
        (Link(latency_s=0.1), 10**9, "up", 0.1),
        (Link(up_bps=1e6, down_bps=8e6, latency_s=0.05), 10**6, "up", 8.05),
        (Link(up_bps=1e6, down_bps=8e6, latency_s=0.05), 10**6, "down", 1.05),
        (Link(up_bps=8e6, on_s=0.25, off_s=9.75), 10**6, "up", 30.25),  # 1 s of sending in four cycles
    ],
)
def test_transfer_times_of_simple_links(link: Link, size: int, direction: Any, expected_s: float) -> None:
    assert Schedule(link).transfer_time(size, direction) == pytest.approx(expected_s)


def test_a_transfer_waits_until_the_link_is_on() -> None:
    schedule = Schedule(Link(on_s=1.0, off_s=2.0), (Step(3.0, 3.5, up_bps=0),))
    assert schedule.transfer_time(0, "up", 0.5) == 0.0
    assert schedule.transfer_time(0, "up", 1.5) == pytest.approx(2.0)  # on at 3, but the step is off until 3.5
    assert schedule.transfer_time(0, "down", 1.5) == pytest.approx(1.5)
    assert schedule.off_before_s(6.0) == pytest.approx(4.5)


def test_many_off_times_take_no_time_to_compute() -> None:
    schedule = Schedule(Link(up_bps=1000, on_s=0.001, off_s=0.001))
    assert schedule.transfer_time(10**9, "up") == pytest.approx(1.6e7)


def test_packet_loss_bounds_the_rate() -> None:
    """Mathis et al. 1997 with 1460 bytes, 100 ms and 1 %: 1.43 Mbit/s."""
    link = Link(latency_s=0.05, up_bps=1e6, down_bps=1e8, loss=0.01)
    assert link.rate_bps("down") == pytest.approx(1.430e6, rel=1e-3)
    assert link.rate_bps("up") == 1e6
    assert Link(down_bps=1e8, loss=0.01).rate_bps("down") == 1e8  # without delay, repairing a loss takes no time
    assert Link(latency_s=0.05).rate_bps("down") == math.inf


@pytest.mark.parametrize("packets", [1, 5, 400])
def test_expected_retransmission_delay_agrees_with_a_simulation(packets: int) -> None:
    link, draw, draws = Link(latency_s=0.1, up_bps=2e6, loss=0.01), random.Random(7), 20_000
    packet_s = 8 * MSS_BYTES / link.rate_bps("up")
    total, squares = 0.0, 0.0
    for _ in range(draws):
        delay = 0.0
        for age in range(min(packets, math.ceil(0.2 / packet_s))):
            if draw.random() < link.loss:
                delay = max(delay, 0.2 - age * packet_s)
        total, squares = total + delay, squares + delay**2
    mean = total / draws
    error = math.sqrt((squares / draws - mean**2) / draws)
    # The formula takes the sending of packets as continuous: at most half a packet's time off.
    assert abs(mean - link.retransmission_s(packets * MSS_BYTES, "up")) < 5.5 * error + link.loss * packet_s


def test_the_relay_delays_a_message_by_retransmissions_as_the_formula_says() -> None:
    """Chunks of 2 kB counted as two packets each: on slow links the delay was a third too long."""
    link, draws = Link(latency_s=0.15, up_bps=768e3, loss=0.02), 2000
    size, found = 40 * MSS_BYTES, []
    for seed in range(draws):
        bottleneck, left, arrival_s = Bottleneck(Schedule(link), "up", random.Random(seed)), size, 0.0
        while left:
            part = min(left, bottleneck.chunk)
            left, arrival_s = left - part, max(arrival_s, bottleneck.admit(part, 0.0))
        found.append(arrival_s - Schedule(link).sent_at(size, "up", 0.0) - link.latency_s)
    error = statistics.stdev(found) / math.sqrt(draws)
    packet_s = 8 * MSS_BYTES / link.rate_bps("up")
    assert abs(statistics.fmean(found) - link.retransmission_s(size, "up")) < 3 * error + link.loss * packet_s


@pytest.mark.parametrize("rate", [1, 7e3, 250e3, 40e6, None])
def test_a_chunk_of_the_relay_is_whole_packets_of_8_ms_at_most_64_kb(rate: float | None) -> None:
    chunk = Bottleneck(Schedule(Link(up_bps=None if rate is None else 8 * rate)), "up", random.Random(0)).chunk
    assert (chunk % MSS_BYTES, MSS_BYTES <= chunk <= 64 << 10) == (0, True)
    assert rate is None or chunk < rate * 0.008 + MSS_BYTES


def test_presets_have_sources_and_are_listed_for_an_unknown_name() -> None:
    assert {"datacenter", "cable", "4g", "3g", "satellite"} <= set(PRESETS)
    assert all(found.source and found.link.up_bps and found.link.down_bps for found in PRESETS.values())
    assert preset("3g") == Link(latency_s=0.15, up_bps=768e3, down_bps=1.6e6)
    with pytest.raises(ConfigError, match=r"preset is 'satelite': must be one of datacenter, .*did you mean 'satellite'"):
        preset("satelite")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"latency_s": -1}, "latency_s is -1: must be 0 to 60"),
        ({"latency_s": math.nan}, "latency_s is nan: must be 0 to 60"),
        ({"latency_s": 0.01, "jitter_s": 0.02}, "jitter_s is 0.02: must be 0 to latency_s, 0.01"),
        ({"up_bps": 0}, "up_bps is 0: must be 1 to 1e\\+12, or null for an unlimited rate"),
        ({"down_bps": math.inf}, "down_bps is inf: must be 1 to 1e\\+12"),
        ({"loss": 0.6}, "loss is 0.6: must be 0 to 0.5"),
        ({"loss": True}, "loss is True"),
        ({"resets_per_hour": 1e9}, "resets_per_hour is 1000000000.0: must be 0 to 36000"),
        ({"on_s": 0}, "on_s is 0: must be 0.001 to 1e\\+06, or null"),
        ({"off_s": 1}, "off_s is 1: needs on_s"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Link(**fields)


def test_a_step_with_less_delay_than_the_links_jitter_has_as_much_jitter_as_delay() -> None:
    schedule = Schedule(Link(latency_s=0.1, jitter_s=0.05), (Step(1.0, 2.0, latency_s=0.01), Step(2.0, 3.0, latency_s=0.3)))
    links = [schedule.link_at(time_s) for time_s in (0.5, 1.5, 2.5, 3.5)]
    assert [(link.latency_s, link.jitter_s) for link in links] == [(0.1, 0.05), (0.01, 0.01), (0.3, 0.05), (0.1, 0.05)]


def test_steps_must_not_overlap() -> None:
    with pytest.raises(ConfigError, match="must not overlap"):
        Schedule(Link(), (Step(0, 2), Step(1, 3)))


def write(folder: Path, *rows: str, header: str = HEADER) -> Path:
    path = folder / "trace.csv"
    path.write_text("\n".join((header, *rows)) + "\n")
    return path


def test_a_trace_is_sorted_and_empty_cells_are_the_link_s(tmp_path: Path) -> None:
    path = write(tmp_path, "1,10,20,0,0,", "1,0,5,1e6,2000000,0.1", "", "0, 3, 4, , , 0.5")
    steps = read_trace(path, 3)
    assert steps == {
        0: (Step(3, 4, None, None, 0.5),),
        1: (Step(0, 5, 1e6, 2e6, 0.1), Step(10, 20, 0, 0, None)),
    }
    schedule = Schedule(Link(up_bps=8e6, latency_s=0.02), steps[1])
    assert schedule.transfer_time(10**6, "up", 6.0) == pytest.approx(1.02)  # a gap
    assert schedule.transfer_time(10**6, "up", 0.0) == pytest.approx(5 + 3 / 8 + 0.02)  # 5 Mbit in the step, 3 after it
    assert schedule.transfer_time(10**6, "up", 12.0) == pytest.approx(9.02)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["5,0,1,1,1,0"], "line 2: client is '5': must be a client from 0 to 2"),
        (["x,0,1,1,1,0"], "line 2: client is 'x'"),
        (["0,0,1,1,1,0", "0,2,1,1,1,0"], "line 3: to_s is 1: must be greater than from_s, 2"),
        (["0,0,1,-1,1,0"], "line 2: up_bps is '-1': must be 0, or a number from 1 to 1e\\+12, or empty"),
        (["0,0,1,1,0.5,0"], "line 2: down_bps is '0.5'"),
        (["0,0,1,1,1,inf"], "line 2: latency_s is 'inf': must be a number from 0 to 60, or empty"),
        (["0,,1,1,1,0"], "line 2: from_s is '': must be a number from 0 to 1e\\+06$"),
        (["0,0,1,1,1"], "line 2: 5 fields, must be 6: client,from_s"),
        (["0,0,5,1,1,0", "1,0,5,1,1,0", "0,4,6,1,1,0"], "line 4: from_s is 4: client 0 has a row until 5 in line 2; .*overlap"),
        (['0,0,1,1,1,"0'], "line 2: unexpected end of data"),
    ],
)
def test_errors_of_a_trace_name_line_and_field(tmp_path: Path, rows: list[str], said: str) -> None:
    path = write(tmp_path, *rows)
    with pytest.raises(ConfigError, match=f"trace.csv, {said}"):
        read_trace(path, 3)


def test_a_trace_needs_its_header(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"line 1: the header is 'client,rate', must be {HEADER}"):
        read_trace(write(tmp_path, header="client,rate"), 3)
    with pytest.raises(ConfigError, match="no such file"):
        read_trace(tmp_path / "missing.csv", 3)
