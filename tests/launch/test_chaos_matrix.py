"""Whole runs under faults: every process killed at every step, and long series of faults, against the undisturbed run.

The figures of docs/how-to/chaos.md: pytest tests/launch/test_chaos_matrix.py -m slow -rP
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chaos_runs import TINY, assert_charged_as_planned, chaos, charges, kinds, timed_run
from run_results import last_models

from dpcfl_net.core import runlog

STEPS = ("sent", "charged", "answered", "done")
CLIENTS = 8
EIGHT = {**TINY, "data": {**TINY["data"], "clients": [2, 2, 2, 2]}, "rounds": 10}
RELAYED = {**TINY, "network": {"how": "relay", "default": {"latency_ms": 5}}}
VICTIMS = {
    "client 1": ["client 1"],
    "coordinator": ["coordinator"],
    "observer": ["observer"],
    "parent": ["parent"],
    "parent of all processes": ["parent of all processes"],
    "relay": ["relay"],
    "all": ["all"],
    "all and parents": ["all", "parent", "parent of all processes"],
    "all, parents and relay": ["relay", "all", "parent", "parent of all processes"],
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, float]:
    """The undisturbed run of TINY."""
    timed_run(tmp_path_factory.mktemp("cold"), None, TINY)  # so that libraries and data are in memory
    return timed_run(tmp_path_factory.mktemp("tiny"), None, TINY)


@pytest.fixture(scope="module")
def eight(tmp_path_factory) -> tuple[Path, float]:
    """The undisturbed run of EIGHT."""
    return timed_run(tmp_path_factory.mktemp("eight"), None, EIGHT)


def assert_same(folder: Path, undisturbed: Path) -> None:
    """A disturbed run released and charged what the undisturbed one did, which is its plan."""
    assert last_models(folder) == last_models(undisturbed)
    assert charges(folder) == charges(undisturbed)
    assert_charged_as_planned(folder)
    warned = [line["text"] for line in runlog.read(folder / "warnings.jsonl")]
    assert not [text for text in warned if "did not happen" in text]


def report(name: str, folder: Path, seconds: float, undisturbed_s: float) -> None:
    """Print one row of the table."""
    warned = [line["text"] for line in runlog.read(folder / "warnings.jsonl")]
    restarts = sum("restarted (" in text for text in warned)
    found = ", ".join(f"{count} {what}" for what, count in sorted(kinds(folder).items()))
    print(f"| {name} | {found} | {restarts} | {seconds:.1f} | {undisturbed_s:.1f} |")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_run_whose_processes_are_killed_finishes_by_itself_with_the_same_bits_and_charges(tmp_path, tiny, victim, step):
    undisturbed, undisturbed_s = tiny
    settings = RELAYED if "relay" in victim else TINY
    plan = chaos(tmp_path, processes=[{"kill": name, "at": {"round": 3, "step": step}} for name in VICTIMS[victim]])
    folder, seconds = timed_run(tmp_path, plan, settings)
    assert_same(folder, undisturbed)
    report(f"{victim}, {step}", folder, seconds, undisturbed_s)


def test_a_coordinator_that_is_killed_after_the_last_round_is_not_waited_for_again(tmp_path, tiny):
    """Its clients may have left already; the latency keeps it saying goodbye until the signal arrives."""
    undisturbed, undisturbed_s = tiny
    settings = {**TINY, "network": {"how": "relay", "default": {"latency_ms": 100}}}
    plan = chaos(tmp_path, processes=[{"kill": "coordinator", "at": {"round": TINY["rounds"], "step": "done"}}])
    folder, seconds = timed_run(tmp_path, plan, settings)
    assert_same(folder, undisturbed)
    assert kinds(folder) == {"kill": 1}
    assert not [line for line in runlog.read(folder / "warnings.jsonl") if line["view"] == "pause"]
    report("coordinator, after the last round", folder, seconds, undisturbed_s)


def test_late_and_lost_messages(tmp_path, eight):
    undisturbed, undisturbed_s = eight
    plan = chaos(tmp_path, messages=[{"drop": 0.05, "delay": {"share": 0.3, "seconds": [0.01, 0.5]}}])
    folder, seconds = timed_run(tmp_path, plan, EIGHT)
    assert_same(folder, undisturbed)
    found = kinds(folder)
    messages = 6 * CLIENTS * EIGHT["rounds"]  # of each task and result: a header, a chunk and an acknowledgement
    assert found["delay"] > messages * 0.3 / 2
    assert found["drop"] > messages * 0.05 / 4
    report("30 % late by up to .5 s, 5 % lost", folder, seconds, undisturbed_s)


def test_five_of_eight_clients_are_cut_off_and_the_run_continues_without_them(tmp_path, eight):
    undisturbed, undisturbed_s = eight
    cut = [0, 2, 3, 5, 6]
    plan = chaos(tmp_path, partitions=[{"clients": cut, "rounds": [4, 6]}])
    settings = {**EIGHT, "runtime": {"quorum": 0.3, "round_timeout_s": 3}}
    folder, seconds = timed_run(tmp_path, plan, settings)
    missing = {line["round"]: line["missing"] for line in runlog.read(folder / "metrics.jsonl") if "missing" in line}
    assert missing == {t: cut if 4 <= t <= 6 else [] for t in range(1, EIGHT["rounds"] + 1)}
    whole = charges(undisturbed)
    for name, charged in charges(folder).items():
        away = (4, 5, 6) if int(name.split("_")[1]) in cut else ()
        assert charged == [(t, kind) for t, kind in whole[name] if t not in away]
    report("5 of 8 clients cut off for 3 rounds, continued without them", folder, seconds, undisturbed_s)


def test_five_of_eight_clients_are_stopped_in_three_rounds_and_the_run_waits_for_them(tmp_path, eight):
    undisturbed, undisturbed_s = eight
    stops = [
        {"stop": f"client {c}", "at": {"round": t, "step": "sent"}, "seconds": 14} for t in (4, 5, 6) for c in (0, 2, 3, 5, 6)
    ]
    # A client that last reported to wait for a core has ten more seconds.
    settings = {**EIGHT, "runtime": {"round_timeout_s": 2, "pause_s": 60}}
    folder, seconds = timed_run(tmp_path, chaos(tmp_path, processes=stops), settings)
    assert_same(folder, undisturbed)
    paused = sum(line.get("paused_s", 0.0) for line in runlog.read(folder / "metrics.jsonl"))
    assert paused > 0
    report(f"5 of 8 clients stopped for 14 s in 3 rounds, paused {paused:.0f} s", folder, seconds, undisturbed_s)


def test_three_random_workers_are_killed_in_each_round(tmp_path, eight):
    undisturbed, undisturbed_s = eight
    rounds: Any = range(1, EIGHT["rounds"] + 1)
    # Answered, charged, sent: "sent" comes after a round in which each victim still had to answer, so that it runs again by then.
    plan = [{"kill": "random 3 clients", "at": {"round": t, "step": STEPS[-t % 3]}} for t in rounds]
    settings = {**EIGHT, "runtime": {"max_restarts": 20}}
    folder, seconds = timed_run(tmp_path, chaos(tmp_path, processes=plan), settings)
    assert_same(folder, undisturbed)
    assert kinds(folder) == {"kill": 3 * len(rounds)}
    report("3 random workers killed in each round", folder, seconds, undisturbed_s)


def test_the_coordinator_is_killed_five_times(tmp_path, eight):
    undisturbed, undisturbed_s = eight
    plan = [{"kill": "coordinator", "at": {"round": t, "step": STEPS[t % 4]}} for t in (2, 3, 5, 6, 8)]
    settings = {**EIGHT, "runtime": {"max_restarts": 5}}
    folder, seconds = timed_run(tmp_path, chaos(tmp_path, processes=plan), settings)
    assert_same(folder, undisturbed)
    assert kinds(folder) == {"kill": 5}
    report("coordinator killed 5 times", folder, seconds, undisturbed_s)
