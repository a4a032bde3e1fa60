"""A parent process that is stopped holds up neither the start of a process nor the end of the launcher."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

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
