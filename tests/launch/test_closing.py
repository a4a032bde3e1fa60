"""Closing several things: if one raises, the others are closed too."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.launch import drafts
from dpcfl_net.launch.placement import ray
from dpcfl_net.launch.placement.agent import Agent
from dpcfl_net.launch.placement.connection import CommandConnection
from dpcfl_net.launch.placement.remote import Host, HostAgent, close_all


def descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")


class Broken:
    """A connection that cannot hang up."""

    def __init__(self):
        self.closed = 0

    def reports(self):
        yield from ()

    def failure(self):
        return "failed"

    def hang_up(self):
        raise OSError("no input to close")

    def close(self, patience_s):
        self.closed += 1


def test_a_draft_that_cannot_be_looked_at_leaves_no_descriptor(tmp_path, monkeypatch):
    files = RunFolder(tmp_path / "run")
    files.path.mkdir()
    files.lock.touch()
    looks = []

    def is_draft(folder):
        looks.append(folder)
        if len(looks) == 2:
            raise PermissionError("closed to this user")
        return True

    monkeypatch.setattr(drafts, "_is_draft", is_draft)
    before = len(descriptors())
    drafts.remove_left_drafts(tmp_path)
    assert len(looks) == 2
    assert len(descriptors()) == before


def test_a_connection_that_cannot_hang_up_is_closed():
    connection = Broken()
    agent = HostAgent(Host("far", lambda: connection))
    agent.hang_up()  # before it is connected
    agent.open()
    thread = agent._thread
    if thread is not None:
        thread.join(10)
    assert connection.closed == 1


def test_a_host_that_cannot_hang_up_leaves_no_other_connected():
    asked = []
    agents = [HostAgent(Host(name, Broken)) for name in "abc"]
    for agent in agents:
        agent._connection = SimpleNamespace(hang_up=lambda name=agent.host.name: asked.append(name) or 1 / (name != "b"))
    with pytest.raises(ZeroDivisionError):
        close_all(agents)
    assert sorted(asked) == ["a", "b", "c"]


def test_a_command_that_reads_nothing_leaves_no_descriptor(tmp_path):
    before = len(descriptors())
    connection = CommandConnection(["sleep", "600"], tmp_path / "log")
    sending = threading.Thread(target=connection.send, args=(bytes(1 << 22),))
    sending.start()
    while not connection._lock.locked():
        time.sleep(0.001)
    connection.close(0.1)
    sending.join(10)
    assert len(descriptors()) == before


def test_an_agent_whose_aggregator_does_not_close_ends_its_workers_and_removes_their_slots(tmp_path):
    closed = []
    commands, theirs = os.pipe()
    agent = Agent(tmp_path, commands, os.open(os.devnull, os.O_WRONLY))
    agent._aggregator = SimpleNamespace(
        close=lambda: closed.append("aggregator") or 1 / 0, sentinels=(), starting=False, listens=False, news=list
    )
    agent._launcher = SimpleNamespace(close=lambda: closed.append("workers"))
    agent._slots = SimpleNamespace(close=lambda: closed.append("slots"))
    os.close(theirs)
    with pytest.raises(ZeroDivisionError):
        agent.serve()
    os.close(commands)
    os.close(agent._reports)
    assert closed == ["aggregator", "workers", "slots"]


def test_a_placement_group_that_ray_does_not_remove_leaves_no_other(monkeypatch):
    removed = []

    def remove(group):
        removed.append(group)
        if group == 2:
            raise RuntimeError("no such group")

    module = ModuleType("ray.util.placement_group")
    module.remove_placement_group = remove
    for name, made in {"ray": ModuleType("ray"), "ray.util": ModuleType("ray.util"), module.__name__: module}.items():
        monkeypatch.setitem(sys.modules, name, made)
    cluster = object.__new__(ray.Cluster)
    cluster.ray, cluster._own, cluster._groups = SimpleNamespace(shutdown=lambda: removed.append("ray")), True, [1, 2, 3]
    with pytest.raises(RuntimeError):
        cluster.close()
    assert sorted(map(str, removed)) == ["1", "2", "3", "ray"]
    assert removed[-1] == "ray"
