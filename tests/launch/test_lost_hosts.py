"""Connections to hosts that are lost: while a process is started there, and without the agent there seeing it."""

from __future__ import annotations

import threading
import time

import pytest
from agent_reports import reports_of

from dpcfl_net import __version__
from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.locks import locked
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.launch.placement import agent as agent_module
from dpcfl_net.launch.placement import remote
from dpcfl_net.launch.placement.base import ClientRange
from dpcfl_net.launch.placement.messages import AgentHello, PrepareKeys, PublicKeys, StartWorker, read_command
from dpcfl_net.launch.placement.remote import Host, HostAgent


class Connection:
    """A connection to an agent that answers and starts nothing."""

    def __init__(self):
        self.sent, self.ends = [], threading.Event()

    def send(self, data):
        self.sent.append(read_command(data.rstrip()))

    def reports(self):
        yield AgentHello(version=__version__, host="far", cores=1, memory=1, gpus=[]).line().rstrip()
        self.ends.wait(120)

    def failure(self):
        return "the connection was lost"

    def hang_up(self):
        self.ends.set()

    def close(self, patience_s):
        self.ends.set()


def test_a_worker_that_starts_while_its_host_is_lost_runs_once_and_is_known(tmp_path, monkeypatch):
    """It counted as ended, was started all the same after the reconnection, and a second time as a restart."""
    connections = [Connection(), Connection()]
    left = iter(connections)
    agent = HostAgent(Host("far", lambda: next(left)))
    agent.open()
    agent.wait_for(agent.has_answered, 60)

    def lost_meanwhile(**fields):
        connections[0].ends.set()
        agent.join(60)
        return StartWorker(**fields)

    monkeypatch.setattr(remote, "StartWorker", lost_meanwhile)
    handle = agent.start(ClientRange(range(1), group=False), tmp_path / "log")
    deadline = time.monotonic() + 60
    while not connections[1].sent and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [command.first for command in connections[1].sent] == [0]
    assert handle.poll() is None
    agent.hang_up()
    agent.join(60)
    assert handle.poll() is not None
    handle.close()


def test_a_host_whose_previous_agent_still_holds_the_folder_is_tried_again(tmp_path, monkeypatch):
    """The next agent ended with the code of a configuration that no restart helps, which ended the run."""
    monkeypatch.setattr(agent_module, "LOCK_S", 0.1)
    keys = PrepareKeys(clients=[3], existing=False)
    reports_of(tmp_path, keys)
    again = keys.model_copy(update={"existing": True})
    with locked(RunFolder(tmp_path).lock), pytest.raises(RunFailed, match="is in use by another agent") as refused:
        reports_of(tmp_path, again)
    assert refused.value.exit_code not in (2, 3)  # a worker pool starts no process again after these
    assert isinstance(reports_of(tmp_path, again)[-1], PublicKeys)
