"""Seconds until an accuracy, stragglers, time of clients and bytes by kind, from lines of a run's files."""

from __future__ import annotations

from typing import Any

import pytest

from dpcfl_net.results.number_format import number
from dpcfl_net.results.round_tables import RoundTables
from dpcfl_net.results.round_times import (
    Point,
    accuracy_curve,
    bytes_by_kind,
    client_times,
    elapsed_by_round,
    first_reached,
    stragglers,
    usual_target,
)

Lines = list[dict[str, Any]]


def served(*seconds: tuple[int, float]) -> Lines:
    return [{"view": "server", "round": t, "seconds": s} for t, s in seconds]


def call(t: int, start: float, **answers: float) -> Lines:
    """Tasks at `start`, and answers at other times."""
    lines: Lines = []
    for name, at in answers.items():
        peer = f"client {name.removeprefix('c')}"
        lines.append({"time": start, "direction": "down", "peer": peer, "kind": "TASK", "round": t, "bytes": 100})
        lines.append({"time": at, "direction": "up", "peer": peer, "kind": "RESULT", "round": t, "bytes": 30})
    return lines


def test_damaged_numbers_count_as_missing() -> None:
    """A whole number of 400 digits in messages.jsonl, which an agent may write, ended the report and the screen of the run."""
    assert [number(value) for value in (10**400, -(10**400), float("nan"), True, "1", 2)] == [None] * 5 + [2.0]
    assert stragglers([{"time": 10**400, "peer": "client 1", "kind": "TASK", "round": 10**400}]) == (0, [])
    lines = {t: {"accuracy_mean": value} for t, value in enumerate((1.7e308, 1.01, -1.0, 0.5), 1)}
    assert usual_target([accuracy_curve({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, lines)]) == pytest.approx(0.47)


def test_seconds_of_rounds_add_up_over_a_resumption() -> None:
    """A resumed run writes its last round again, and may repeat rounds whose checkpoint was damaged."""
    assert elapsed_by_round(served((1, 2.0), (2, 3.0), (3, 1.0))) == {1: 2.0, 2: 5.0, 3: 6.0}
    assert elapsed_by_round(served((1, 2.0), (2, 3.0), (2, 0.0), (3, 1.0))) == {1: 2.0, 2: 5.0, 3: 6.0}
    assert elapsed_by_round(served((1, 2.0), (2, 3.0), (1, 0.0), (2, 4.0), (3, 1.0))) == {1: 2.0, 2: 5.0, 3: 10.0}
    assert elapsed_by_round([{"view": "observer", "round": 1, "seconds": 9.0}, {"view": "server", "round": 2}]) == {}


@pytest.mark.parametrize("answered", [0, 2], ids=["resumed", "repeated"])
def test_a_round_that_is_written_twice_keeps_its_bytes_and_seconds(answered: int) -> None:
    line = {"view": "server", "round": 2, "time": 5.0, "missing": [1], "answered": 3, "paused_s": 0.5}
    again = {"view": "server", "round": 2, "time": 9.0, "missing": [], "answered": answered, "paused_s": 0.0}
    tables = RoundTables()
    lines = [
        {**line, "seconds": 3.0, "bytes_up": 100, "bytes_down": 50},
        {**again, "seconds": 0.25, "bytes_up": 7, "bytes_down": 5},
    ]
    tables.add_metrics(lines)
    whole = {"seconds": 3.25, "bytes_up": 107, "bytes_down": 55, "paused_s": 0.5}
    assert tables.served == {2: {**(again if answered else line), **whole}}


def test_time_to_accuracy_is_the_end_of_the_first_round_that_reached_it() -> None:
    observed = {t: {"accuracy_mean": a} for t, a in {1: 0.2, 3: 0.6, 4: 0.5, 5: 0.7}.items()}
    curve = accuracy_curve({1: 2.0, 2: 4.0, 3: 6.0, 4: 8.0}, observed)
    assert curve == [Point(1, 2.0, 0.2), Point(3, 6.0, 0.6), Point(4, 8.0, 0.5)]
    assert first_reached(curve, 0.5) == Point(3, 6.0, 0.6)
    assert first_reached(curve, 0.61) is None
    assert usual_target([curve, [Point(1, 1.0, 0.9)], []]) == pytest.approx(0.57)  # 95 % of 60 %
    assert usual_target([[Point(1, 1.0, 0.61)]]) == pytest.approx(0.57)  # 57.95 %, rounded down: every run reached it
    assert usual_target([[]]) is None


def test_the_last_answer_of_each_call_holds_it_up() -> None:
    lines = [
        *call(1, 0.0, c0=1.0, c1=1.5, c2=4.0),
        *call(1, 5.0, c0=6.0, c1=6.5),  # a second call of the same round
        *call(2, 7.0, c0=8.0, c2=9.5),
        *call(3, 10.0, c1=11.0),  # nobody waits for the only client
    ]
    calls, held = stragglers(lines)
    assert calls == 3
    assert [(one.client, one.times, one.total_s, one.most_s) for one in held] == [(2, 2, 4.0, 2.5), (1, 1, 0.5, 0.5)]
    late = {"time": 99.0, "direction": "up", "peer": "client 7", "kind": "RESULT", "round": 2}
    assert stragglers([*lines, late, {"kind": "TASK"}, {"peer": "client x", "round": 1}]) == (calls, held)
    again = {
        **lines[-1],
        "round": 2,
        "peer": "client 0",
        "time": 9.9,
    }  # a client whose connection was cut sends its answer again
    assert stragglers([*lines, again]) == (calls, held)


def test_time_of_clients_is_their_spans_and_the_rest() -> None:
    spans: Lines = [
        {"who": "client 1", "what": "receive", "round": 1, "start": 0.0, "end": 1.0},
        {"who": "client 1", "what": "train", "round": 1, "start": 1.0, "end": 3.0},
        {"who": "client 1", "what": "train", "round": 2, "start": 5.0, "end": 6.0},
        {"who": "client 0", "what": "send", "round": 2, "start": 6.0, "end": 16.5},
        {"who": "coordinator", "what": "wait", "round": 2, "start": 0.0, "end": 9.0},
        {"who": "client 0", "what": "train", "round": 2, "start": 6.0, "end": None},
    ]
    found = client_times(spans, 10.0)
    assert list(found) == [0, 1]
    assert found[1] == {"train": 3.0, "receive": 1.0, "send": 0.0, "wait": 0.0, "idle": 6.0}
    assert found[0]["idle"] == 0.0


def test_control_bytes_are_the_traffic_besides_tasks_and_results() -> None:
    messages = call(1, 0.0, c0=1.0, c1=2.0)
    total: Lines = [{"round": 1, "bytes_up": 50, "bytes_down": 120}, {"round": 2, "bytes_up": 40, "bytes_down": 130}]
    assert bytes_by_kind(messages, total) == {"TASK": (2, 0, 200), "RESULT": (2, 60, 0), "control": (0, 30, 50)}
    assert bytes_by_kind(messages, []) == {}
    assert bytes_by_kind([], total) == {}


def test_bytes_of_a_round_that_was_stopped_do_not_hide_the_control_traffic() -> None:
    messages = [*call(1, 0.0, c0=1.0, c1=2.0), *call(2, 3.0, c0=1.0, c1=2.0)]
    total: Lines = [{"round": 1, "bytes_up": 70, "bytes_down": 210}]
    assert bytes_by_kind(messages, total) == {"TASK": (2, 0, 200), "RESULT": (2, 60, 0), "control": (0, 10, 10)}
