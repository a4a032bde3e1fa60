"""A parent process that is stopped holds up neither the start of a process, nor its end, nor the end of the launcher."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from dpcfl_net.launch.placement import child as child_module
from dpcfl_net.launch.placement.base import LOST
from dpcfl_net.launch.placement.child import Child, ForkServer, role_environment, start_of
from dpcfl_net.launch.placement.fork_server import CHANNEL


@pytest.fixture
def libraries():
    """A fork server that has loaded its libraries."""
    server = ForkServer()
    server.wait_until_loaded(lambda: None)
    yield server
    server.close()


def forked(parent: ForkServer, main: str, argument: object, log) -> Child:
    return parent.fork("the child", start_of(main, argument, role_environment(), watches_launcher=False), log)


def stopped(pid: int) -> psutil.Process:
    os.kill(pid, signal.SIGSTOP)
    process = psutil.Process(pid)
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)
    return process


@pytest.mark.timeout(60)
def test_it_continues_when_a_process_is_needed_and_when_it_has_to_end(libraries, tmp_path):
    """Ends within the time limit: the fork waits 120 s for an answer, and the end of a first parent has no limit."""
    workers = forked(libraries, "dpcfl_net.launch.placement.fork_server:serve", CHANNEL, tmp_path / "log")
    second = ForkServer(workers)
    for parent, pid in ((second, workers.pid), (libraries, libraries._process.pid)):
        process = stopped(pid)
        child = forked(parent, "full_disk:fill", "/some/file", tmp_path / "log")
        assert child.wait(30) == 4
        child.close()
        stopped(pid)
        parent.close()
        assert not psutil.wait_procs([process], 10)[1]


def test_it_continues_when_a_process_that_was_killed_has_ended(libraries, tmp_path, monkeypatch):
    """Each such process of a run cost 5 seconds, also after Ctrl-C, and its exit code was unknown."""
    monkeypatch.setattr(child_module, "CODE_S", 30.0)
    workers = forked(libraries, "dpcfl_net.launch.placement.fork_server:serve", CHANNEL, tmp_path / "log")
    second = ForkServer(workers)
    child = forked(second, "dpcfl_net.launch.placement.fork_server:serve", CHANNEL, tmp_path / "log")
    for parent, process in ((workers.pid, child), (libraries._process.pid, workers)):
        stopped(parent)
        process.signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
    later = forked(libraries, "dpcfl_net.launch.placement.fork_server:serve", CHANNEL, tmp_path / "log")
    orphan = forked(ForkServer(later), "dpcfl_net.launch.placement.fork_server:serve", CHANNEL, tmp_path / "log")
    later.signal(signal.SIGKILL)
    later.close()  # as when its successor is started
    orphan.signal(signal.SIGKILL)
    assert orphan.wait(10) == LOST
    for process in (child, second, orphan):
        process.close()


def test_a_stopped_process_ends_by_sigterm_whatever_it_computes(libraries, tmp_path):
    """A stopped process receives SIGTERM only once it continues, and SIGKILL would follow. What it computes must not delay its end."""
    child = forked(libraries, "one_operation:compute", str(tmp_path / "begun"), tmp_path / "log")
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    stopped(child.pid)
    child_module.stop([child], 5)
    assert child.wait() == -signal.SIGTERM
