"""Restarts of roles and workers: a limit for each, and delays that double."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.experiment import config as configuration
from dpcfl_net.launch import restarts
from dpcfl_net.launch.placement.base import LOST, ClientRange, end_of_process
from dpcfl_net.launch.placement.placements import LocalPlacement
from dpcfl_net.launch.placement.worker_pool import EXIT_S, PoolLimits, WorkerPool
from dpcfl_net.launch.processes import FederationRun
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


class Crashing:
    """Launcher and handles of workers that end with a code, 4 as on a full disk, when the test says so."""

    reason, log_path = "no space left on device", Path("no log")

    def __init__(self, code: int = 4) -> None:
        self.starts: list[int] = []
        self.sentinel, self._code, self.commands, self.closed = 0, code, list[str](), 0

    def start(self, process: ClientRange) -> Crashing:
        self.sentinel = process.clients[0]
        self.starts.append(self.sentinel)
        return self

    def send_command(self, command: str) -> None:
        self.commands.append(command)

    def signal(self, number: int) -> None:
        self.commands.append(f"signal {number}")

    def wait(self) -> int:
        return self._code

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def crash(now) -> Callable[[float], float]:
    """Lets the only worker of a pool crash some seconds after its start; returns the seconds until it is started again."""
    launcher = Crashing()
    pool = WorkerPool(launcher, 1, PoolLimits(1, 1, 99, True), report=lambda text: None, on_lost=lambda client: None)
    pool.start_worker([0])
    pool.update()

    def crash(lived_s: float) -> float:
        now[0] += lived_s
        crashed, starts = now[0], len(launcher.starts)
        pool.ended(0)
        pool.update()
        while len(launcher.starts) == starts:
            now[0] += RESTART_S / 2
            pool.start_worker([0])  # the coordinator wants it, which is no reason to hurry
            pool.update()
        return now[0] - crashed

    return crash


def test_a_worker_that_crashed_starts_again_at_once_and_if_it_crashes_early_again_after_growing_delays(crash):
    waited = [crash(1.0) for _ in range(9)]
    expected = [0, *(min(RESTART_S * 2**k, MOST_RESTART_S) for k in range(8))]
    assert waited == pytest.approx(expected, abs=RESTART_S / 2)


def test_a_worker_that_ran_for_a_while_starts_again_at_once(crash):
    assert [crash(1.0) > 0 for _ in range(3)] == [False, True, True]
    assert [crash(MOST_RESTART_S) for _ in range(3)] == [0, 0, 0]
    assert crash(1.0) == 0


def test_a_worker_that_waits_leaves_its_place_to_others(now):
    launcher = Crashing()
    pool = WorkerPool(launcher, 2, PoolLimits(1, 1, 9, True), report=lambda text: None, on_lost=lambda client: None)
    pool.start_worker([0])
    pool.update()
    for _ in range(2):
        pool.ended(0)
        pool.update()
    pool.start_worker([1])
    pool.update()
    assert launcher.starts == [0, 0, 1]


@pytest.mark.parametrize(("code", "restarted"), [(4, 2), (-9, 2), (2, 0), (3, 0)])
def test_a_worker_that_no_restart_helps_is_lost_and_is_not_started_again(now, code, restarted):
    launcher, lost = Crashing(code), list[int]()
    pool = WorkerPool(launcher, 2, PoolLimits(1, 2, 2, False), report=lambda text: None, on_lost=lost.append)
    pool.start_worker([1])
    pool.update()
    while not lost:
        pool.ended(1)
        now[0] += MOST_RESTART_S
        pool.update()
    pool.start_worker([1])  # the coordinator may not know it yet
    pool.update()
    assert launcher.starts == [1] * (1 + restarted)
    assert (lost, pool.lost(), pool.sentinels) == ([1], [1], [])


@pytest.mark.parametrize(("code", "restarted", "ends_with"), [(4, 1, 4), (-9, 1, 4), (2, 0, 2), (3, 0, 3)])
def test_a_worker_that_no_restart_helps_ends_a_run_that_needs_all(now, code, restarted, ends_with):
    reported = list[str]()
    pool = WorkerPool(Crashing(code), 2, PoolLimits(1, 2, 1, True), report=reported.append, on_lost=lambda client: None)
    pool.start_worker([1])
    pool.update()
    for _ in range(restarted):
        pool.ended(1)
        pool.update()
    said = f"client 1 {end_of_process(code)}: no space left on device (log: no log); "
    with pytest.raises(RunFailed, match=rf"^{re.escape(said)}runtime.quorum is 1, .*") as failed:
        pool.ended(1)
    assert failed.value.exit_code == ends_with
    assert reported == [f"{said}restarted (1 of at most 1 restarts)"] * restarted


def test_a_lost_process_of_several_clients_loses_those_that_exist(now):
    launcher, lost = Crashing(), list[int]()
    pool = WorkerPool(launcher, 5, PoolLimits(2, 1, 0, False), report=lambda text: None, on_lost=lost.append)
    pool.start_worker([4, 2])
    pool.update()
    pool.start_worker([3])
    pool.stop_worker([2, 0])
    assert (launcher.starts, launcher.commands) == ([4, 2], ["start 4", "start 2", "start 3", "stop 2"])
    pool.ended(4)
    pool.ended(2)
    assert lost == [4, 2, 3]


@pytest.mark.parametrize(("code", "starts"), [(70, 3), (3, 1)])
def test_a_client_that_no_restart_helps_is_lost_without_the_others_of_its_process(now, code, starts):
    launcher, lost, reported = Crashing(code), list[int](), list[str]()
    launcher.reason = "Traceback\nClientsFailed: clients 1-2, 9: ValueError: bad"  # 9 is of another process
    pool = WorkerPool(launcher, 8, PoolLimits(4, 9, 2, False), report=reported.append, on_lost=lost.append)
    pool.start_worker(range(4))
    for _ in range(starts):
        now[0] += MOST_RESTART_S
        pool.update()
        pool.ended(0)
    now[0] += MOST_RESTART_S
    launcher.commands.clear()
    pool.update()
    pool.start_worker([1, 3])  # the coordinator may not know it yet
    assert (lost, pool.lost(), launcher.commands) == ([1, 2], [1, 2], ["start 0", "start 3", "start 3"])
    assert reported[-1].endswith("; clients 1-2: lost for the rest of the run; the other clients of this process start again")
    launcher.reason = "MemoryError"
    for _ in range(3):
        pool.ended(0)
        now[0] += MOST_RESTART_S
        pool.update()
        if code == 3:
            break
    assert (lost, pool.lost(), pool.sentinels) == ([1, 2, 0, 3], [0, 1, 2, 3], [])


def pass_time(now: list[float], pool: WorkerPool, seconds: float) -> None:
    """Let time pass second by second: a jump would be a pause of the whole run."""
    for _ in range(int(seconds)):
        now[0] += 1
        pool.update()


def test_a_worker_that_is_wanted_again_before_it_has_left_is_neither_killed_nor_started_twice(now):
    launcher = Crashing()
    pool = WorkerPool(launcher, 2, PoolLimits(1, 2, 9, True), report=lambda text: None, on_lost=lambda client: None)
    pool.start_worker([1])
    pool.update()
    pool.stop_worker([1])
    pool.start_worker([1])
    pass_time(now, pool, 2 * EXIT_S)
    assert (launcher.commands, launcher.starts) == ([], [1])
    pool.stop_worker([1])
    pass_time(now, pool, 2 * EXIT_S)
    assert launcher.commands == ["signal 9"]


def test_a_worker_that_is_stopped_before_it_has_a_place_neither_starts_nor_is_killed(now):
    launcher, reported = Crashing(), list[str]()
    pool = WorkerPool(launcher, 3, PoolLimits(1, 1, 9, True), report=reported.append, on_lost=lambda client: None)
    for word in (b"start 0", b"start 1", b"start 2", b"stop 1"):
        pool.handle_command(word)
    pass_time(now, pool, EXIT_S - 1)
    pool.handle_command(b"stop 0")
    pass_time(now, pool, EXIT_S - 1)  # the time of client 1 has passed, that of client 0 has not
    assert (launcher.starts, launcher.commands) == ([0], [])
    pass_time(now, pool, 1)
    assert launcher.commands == ["signal 9"]
    pool.ended(0)
    pool.update()
    assert (launcher.starts, pool.sentinels, pool.lost()) == ([0, 2], [2], [])
    assert (launcher.closed, reported) == (1, ["client 0 was stopped and did not exit within 15 s: killed"])


@pytest.mark.parametrize(
    ("title", "code", "again"),
    [
        ("aggregator_0001", 4, True),  # its agent was ended by a signal, or that of a lost connection still holds the folder
        ("aggregator_0001", LOST, True), ("aggregator_0001", 2, False), ("aggregator_0001", 3, False),
        ("observer", 4, True), ("relay", 70, True), ("coordinator", 4, False), ("coordinator", -9, True),
    ],
)  # fmt: skip
def test_a_role_that_a_restart_may_help_starts_again(tmp_path, title, code, again):
    """The run failed with an aggregator whose host came back, where its workers started again."""
    run = FederationRun(tmp_path, configuration.load("quickstart"), LocalPlacement())
    run._pool = SimpleNamespace()
    run.children[title] = child = SimpleNamespace(
        title=title, wait=lambda: code, failure=lambda code: RunFailed(f"{title} ended with code {code}"), close=lambda: None
    )
    with nullcontext() if again else pytest.raises(RunFailed, match=f"{title} ended with code {code}$"):
        run._ended(child)
    assert run._restarts.scheduled == ({title} if again else set())
    run._warnings.close()
