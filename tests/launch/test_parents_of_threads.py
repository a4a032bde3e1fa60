"""The parents of all processes: shared by threads that run experiments at the same time, and replaced where one was killed."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from signal import SIGKILL

import psutil
import pytest

from dpcfl_net.launch.caller import restored
from dpcfl_net.launch.placement import parents
from dpcfl_net.launch.placement.child import Child, ForkServer, start_of, worker_environment


@pytest.fixture(autouse=True)
def without_parents():
    """No parent runs before and after the test."""
    parents.close()
    yield
    parents.close()


def test_threads_that_begin_at_once_start_one_parent(monkeypatch):
    started = []

    class Slow(ForkServer):
        def __init__(self) -> None:
            started.append(self)
            time.sleep(0.1)
            super().__init__()

    monkeypatch.setattr(parents, "ForkServer", Slow)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: parents.warm(), range(4)))
    assert (len(started), len(set(found))) == (1, 1)


def test_a_thread_that_ends_leaves_the_parents_to_another_one():
    with ExitStack() as one, ExitStack() as other:
        one.enter_context(restored())
        parent = parents.warm()
        other.enter_context(restored())
        one.close()
        assert parent.alive()
        assert parents.warm() is parent
        other.close()
        assert not parent.alive(1)


def test_parents_that_ran_before_stay():
    parent = parents.warm()
    with restored():
        assert parents.warm() is parent
    assert parent.alive()


def test_parents_that_were_killed_are_replaced_and_leave_no_file_open(tmp_path):
    """As by the system, for lack of memory: a worker that crashed afterwards could not start again."""

    def killed(parent: ForkServer) -> int:
        os.kill(parent.pid, SIGKILL)
        assert not parent.alive(60)
        return parent.pid

    def fork() -> Child:
        return parents.fork_worker(
            "client 0", start_of("test_ended_processes:rest", 600, worker_environment()), tmp_path / "log"
        )

    ended = {killed(parents.warm())}
    fork().close()
    opened = psutil.Process().num_fds()
    ended.add(killed(parents.preload()))
    fork().close()
    assert (len(parents.pids()), parents.pids() & ended, psutil.Process().num_fds()) == (2, set(), opened)
