"""Rounds of a growing run folder: when each is complete, and with which figures it comes."""

from __future__ import annotations

from pathlib import Path

from run_folder import write_lines

from dpcfl_net.results.rounds import RoundMetrics, RoundTail


def served(t: int) -> dict:
    return {"view": "server", "round": t, "seconds": 1.0, "bytes_up": 10 * t, "bytes_down": 5}


def observed(t: int) -> dict:
    return {"view": "observer", "round": t, "accuracy_mean": t / 10}


def test_a_round_waits_for_the_observer_until_two_later_rounds_exist(tmp_path: Path) -> None:
    tail, returned = RoundTail(tmp_path, 9), []
    for line in (served(1), served(2), observed(2), served(3), observed(3), served(4)):
        write_lines(tmp_path / "metrics.jsonl", [line])
        returned.append([(one.round, one.accuracy) for one in tail.new()])
    assert returned == [[], [], [], [(1, None), (2, 0.2)], [(3, 0.3)], []]
    assert [(one.round, one.accuracy) for one in tail.new(ended=True)] == [(4, None)]


def test_the_observer_is_not_waited_for_in_rounds_that_it_does_not_evaluate(tmp_path: Path) -> None:
    tail = RoundTail(tmp_path, 5, evaluate_every=2)
    write_lines(tmp_path / "metrics.jsonl", [*map(served, (1, 2, 3, 4)), observed(2), observed(4), served(5)])
    assert [one.round for one in tail.new()] == [1, 2, 3, 4]  # the last round is evaluated
    write_lines(tmp_path / "metrics.jsonl", [observed(5)])
    assert [one.round for one in tail.new()] == [5]


def test_a_round_comes_with_the_figures_of_all_files(tmp_path: Path) -> None:
    shares = {"accuracy_worst": 0.02, "accuracy_minority": 0.03, "accuracy_central": 0.04, "loss_mean": 2.5}
    write_lines(tmp_path / "metrics.jsonl", [{**served(1), "missing": [2], "time": 7.0}, {**observed(1), **shares}])
    write_lines(tmp_path / "clusters.jsonl", [{"view": "server", "round": 1, "assignment": [0, None, 1], "clusters": 2}])
    write_lines(tmp_path / "clusters.jsonl", [{"view": "observer", "round": 1, "ari": 0.5}])
    assert RoundTail(tmp_path, 9).new() == [
        RoundMetrics(
            1, 9, accuracy=0.1, assignment=(0, None, 1), clusters=2, ari=0.5, missing=(2,), seconds=1.0, bytes_up=10,
            bytes_down=5, time=7.0, accuracy_worst=0.02, accuracy_minority=0.03, accuracy_central=0.04, loss=2.5,
        )
    ]  # fmt: skip


def test_rounds_whose_lines_a_crash_of_the_machine_took_hold_up_no_later_round(tmp_path: Path) -> None:
    """Their checkpoints are flushed, their lines are not: the resumed run writes its last round again, and none before it."""
    tail = RoundTail(tmp_path, 9)
    write_lines(tmp_path / "metrics.jsonl", [served(1), observed(1)])
    assert [one.round for one in tail.new()] == [1]
    write_lines(tmp_path / "metrics.jsonl", [{**served(4), "resumed": True}, observed(4), served(5), observed(5)])
    assert [one.round for one in tail.new()] == [4, 5]
    write_lines(tmp_path / "metrics.jsonl", [{**served(5), "resumed": True}, served(6), observed(6)])
    assert [one.round for one in tail.new()] == [6]
