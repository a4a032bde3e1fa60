"""Connections to hosts that are lost: what their processes count as, and what the next connection begins with."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from signal import SIGUSR1

import psutil
import pytest
from agent_reports import reports_of

from dpcfl_net import __version__
from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.locks import locked
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.config_schema import RuntimeSettings
from dpcfl_net.launch.placement import agent as agent_module
from dpcfl_net.launch.placement import remote
from dpcfl_net.launch.placement.base import LOST, ClientRange
from dpcfl_net.launch.placement.connection import CommandConnection
from dpcfl_net.launch.placement.messages import (
    AgentError,
    AgentHello,
    AggregatorEnded,
    AggregatorListens,
    AggregatorRecords,
    GroupCommand,
    PrepareKeys,
    PublicKeys,
    SendSignal,
    SetJob,
    SignalAggregator,
    StartAggregator,
    StartWorker,
    WorkerEnded,
    read_command,
)
from dpcfl_net.launch.placement.remote import Host, HostAgent


class Connection:
    """A connection to an agent that answers, if the test lets it, starts nothing, and says `last` before it ends."""

    def __init__(self, *last):
        self.last = last
        self.sent, self.ends, self.opened, self.answers = [], threading.Event(), threading.Event(), threading.Event()
        self.answers.set()

    def send(self, data):
        self.sent.append(read_command(data.rstrip()))

    def reports(self):
        self.opened.set()
        self.answers.wait(120)
        yield AgentHello(version=__version__, host="far", cores=1, memory=1, gpus=[]).line().rstrip()
        self.ends.wait(120)
        for report in self.last:
            yield report.line().rstrip()

    def failure(self):
        return "the connection was lost"

    def hang_up(self):
        self.ends.set()

    def close(self, patience_s):
        self.ends.set()


def connecting(*answers: Connection | Exception) -> Callable[[], Connection]:
    """Connects with each answer in turn, or raises it."""
    left = iter(answers)

    def connect() -> Connection:
        if isinstance(answer := next(left), Exception):
            raise answer
        return answer

    return connect


def test_a_worker_that_starts_while_its_host_is_lost_runs_once_and_is_known(tmp_path, monkeypatch):
    """It counted as ended, was started all the same after the reconnection, and a second time as a restart."""
    connections = [Connection(), Connection()]
    agent = HostAgent(Host("far", connecting(*connections)))
    agent.open()
    agent.wait_for(agent.has_answered, 60)

    def lost_meanwhile(**fields):
        connections[0].ends.set()
        agent.join(60)
        return StartWorker(**fields)

    monkeypatch.setattr(remote, "StartWorker", lost_meanwhile)
    handle = agent.start(ClientRange(range(1), group=False), tmp_path / "log")
    until(lambda: connections[1].sent)
    assert [command.first for command in connections[1].sent] == [0]
    assert handle.wait(0) is None
    agent.hang_up()
    agent.join(60)
    assert handle.wait(0) is not None
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


def test_a_lost_host_is_told_its_clients_and_its_job_before_it_starts_a_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "RETRY_S", 0.01)
    job = SetJob(files={}, operator_key="k", connect="", observer="", runtime=RuntimeSettings(), data_root=None, firsts=[3])
    connections = [Connection() for _ in range(3)]
    gone = ConnectionRefusedError(111, "connection refused")  # at the first try to reach it again
    agent = HostAgent(Host("far", connecting(connections[0], gone, *connections[1:])))
    agent.keys = agent.identities = {3: "k", 4: "k"}
    agent.aggregator = 1
    agent.open()
    agent.wait_for(agent.has_answered, 60)
    agent.set_job(job)
    connections[0].ends.set()
    agent.join(60)
    connections[1].answers.clear()
    handle = agent.start(ClientRange(range(3, 5), group=True), tmp_path / "log")
    connections[1].opened.wait(60)
    handle.send_command("start 3")
    assert connections[1].sent == [], "before it has answered"
    connections[1].answers.set()
    until(lambda: len(connections[1].sent) == 4)
    assert connections[1].sent == [
        PrepareKeys(clients=[3, 4], existing=True, identities=True, aggregator=1),
        job,
        StartWorker(first=3, count=2, group=True),
        GroupCommand(first=3, word="start 3"),
    ]
    other = agent.start(ClientRange(range(5, 6)), tmp_path / "log of another")
    for one in (handle, other):
        one.signal(SIGUSR1)
        one.finish()
    assert connections[1].sent[4:] == [
        StartWorker(first=5, count=1, group=False),
        SendSignal(first=3, number=SIGUSR1),
        GroupCommand(first=3, word="end"),
        SendSignal(first=5, number=SIGUSR1),
    ]
    assert not connections[2].opened.is_set()
    agent.hang_up()
    agent.join(60)
    for one in (handle, other):
        one.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "no such file", "ssh"), "host far: cannot run ssh: no such file or folder"),
        (RuntimeError("the cluster is gone"), "host far: RuntimeError: the cluster is gone"),
    ],
)
def test_a_host_that_cannot_be_reached_again_ends_its_workers_with_the_reason_and_forgets_their_commands(
    tmp_path, monkeypatch, error, said
):
    """A command that was kept for it would start a worker whose end has been told."""
    monkeypatch.setattr(remote, "RECONNECT_S", 0.0)
    later = Connection()
    agent = HostAgent(Host("far", connecting(error, later)))
    lost = agent.start(ClientRange(range(3, 4)), tmp_path / "lost.log")
    assert lost.wait(60) == LOST
    assert lost.log_path.read_text() == f"{said}\n"
    agent.join(60)
    handle = agent.start(ClientRange(range(4, 5)), tmp_path / "log")
    until(lambda: later.sent)
    assert [command.first for command in later.sent] == [4]
    agent.hang_up()
    agent.join(60)
    for one in (lost, handle):
        one.close()


def test_workers_of_an_agent_that_fails_end_with_its_code_and_its_reason(tmp_path):
    connection = Connection(WorkerEnded(first=4, code=1, log="its own"), AgentError(reason="it has no GPU 7", code=2))
    agent, opened = HostAgent(Host("far", lambda: connection)), psutil.Process().num_fds()
    agent.open()
    agent.wait_for(agent.has_answered, 60)
    handles = [agent.start(ClientRange(range(first, first + 1)), tmp_path / f"{first}.log") for first in (3, 4)]
    assert not wait([handle.sentinel for handle in handles], 0)
    connection.ends.set()
    assert [handle.wait(60) for handle in handles] == [2, 1]  # after 2 no worker starts again
    assert all(wait([handle.sentinel], 60) for handle in handles), "by which the launcher sees that they have ended"
    assert [handle.log_path.read_text() for handle in handles] == ["host far: it has no GPU 7\n", "its own\n"]
    assert [handle.reason for handle in handles] == ["host far: it has no GPU 7", "its own"]  # it names the clients that failed
    for handle in handles:
        handle.close()
    assert agent.join(60)
    assert psutil.Process().num_fds() == opened


def test_what_an_aggregator_reports_is_in_the_run_folder_and_it_ends_once(tmp_path):
    files, address = RunFolder(tmp_path), "tcp://127.0.0.1:4711"
    for folder in (files.addresses, files.logs):
        folder.mkdir()
    ended = AggregatorEnded(code=4, log="error: the coordinator is silent")
    records = [AggregatorRecords(file=file, lines=[{"text": file}]) for file in ("warnings", "messages")]
    connection = Connection(AggregatorListens(address=address), *records, ended, ended)
    agent = HostAgent(Host("far", lambda: connection))
    agent.open()
    agent.wait_for(agent.has_answered, 60)
    command = StartAggregator(
        files={}, operator_key="k", connect="", round_timeout_s=1, join_timeout_s=1, orphan_timeout_s=1
    )  # fmt: skip
    handle = agent.start_aggregator(command, "aggregator_0001", files)
    handle.signal(SIGUSR1)
    connection.ends.set()
    assert handle.wait(60) == 4
    agent.join(60)
    assert connection.sent == [command, SignalAggregator(number=SIGUSR1)]
    assert agent.error_text == "agent-line: a report of an aggregator that was not started"
    assert files.address("aggregator_0001").read_text() == address
    assert [files.warnings.read_text(), files.messages.read_text()] == ['{"text":"warnings"}\n', '{"text":"messages"}\n']
    assert files.log("aggregator_0001").read_text() == "error: the coordinator is silent\n"
    assert re.match(r"aggregator_0001 ended with code 4: error: the coordinator is silent \(log: ", str(handle.failure(4)))
    handle.close()
    handle.close()


def test_a_run_that_ends_does_not_wait_for_a_host_that_it_tries_to_reach(monkeypatch):
    tried = threading.Event()

    def connect():
        tried.set()
        raise ConnectionRefusedError(111, "connection refused")

    monkeypatch.setattr(remote, "RETRY_S", 0.05)
    agent = HostAgent(Host("far", connect))
    agent.open(reconnect=True)
    thread = agent._thread
    assert tried.wait(60)
    agent.hang_up()
    thread.join(remote.RECONNECT_S / 2)
    assert not thread.is_alive()
    reached = Connection()

    def connect_at_the_end() -> Connection:
        late.hang_up()
        return reached

    late = HostAgent(Host("far", connect_at_the_end))
    late.open()
    assert reached.ends.wait(60)
    assert late.join(60)


def test_a_host_that_does_not_answer_in_time_is_named():
    connection = Connection()
    connection.answers.clear()
    agent = HostAgent(Host("far", lambda: connection))
    agent.open()
    with pytest.raises(RunFailed, match=r"^host far did not answer within 0\.1 s$"):
        agent.wait_for(agent.has_answered, 0.1)
    connection.answers.set()
    agent.wait_for(agent.has_answered, 60)
    connection.ends.set()
    with pytest.raises(RunFailed, match=r"^host far: the connection was lost$"):
        agent.wait_for(agent.has_keys, 60)
    agent.wait_for(agent.has_answered, 60)  # what it has reported stays


def test_a_host_that_does_not_end_is_cut_off_and_told(tmp_path, monkeypatch):
    """Its command stayed for ever, and a run whose copies of ledgers are incomplete ended without a word."""
    hello = AgentHello(version=__version__, host="far", cores=1, memory=1, gpus=[]).line().decode().strip()
    agents, pids = [], [tmp_path / "stopped", tmp_path / "usual"]
    for pid, then in zip(pids, ("exec sleep 600", "exec cat > /dev/null"), strict=True):
        words = ["sh", "-c", f"echo $$ > {pid}; printf '%s\\n' '{hello}'; {then}"]
        agents.append(HostAgent(Host(pid.name, partial(CommandConnection, words, tmp_path / "log"))))
        agents[-1].open()
        agents[-1].wait_for(agents[-1].has_answered, 60)
    patience = iter([0.2])  # of 20 s, for the one that never ends
    monkeypatch.setattr(agents[0], "join", lambda seconds: HostAgent.join(agents[0], next(patience, seconds)))
    assert remote.close_all(agents) == [
        "host stopped did not end its workers within 20 s: copies of its ledgers may lack their last lines"
    ]
    assert not [pid for pid in pids if psutil.pid_exists(int(pid.read_text()))]
    assert all(agent.join(0) for agent in agents)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 255", "the connection was lost"),
        ("echo a route >&2; echo is gone >&2; exit 255", "exit code 255: a route; is gone"),
        ("exit 7", "exit code 7: no message"),
    ],
)
def test_the_end_of_the_command_that_reaches_a_host_is_told_as_ssh_means_it(tmp_path, script, said):
    connection = CommandConnection(["sh", "-c", script], tmp_path / "log")
    assert [*connection.reports()] == []
    assert connection.failure() == said
    connection.send(b"late")  # the launcher may not know yet that it has ended
    connection.close(10)
    connection.send(b"later")


def test_a_host_that_reads_late_gets_a_command_that_is_longer_than_a_pipe(tmp_path):
    connection = CommandConnection(["sh", "-c", "sleep 0.2; wc -c"], tmp_path / "log")
    connection.send(bytes(1 << 20))
    connection.hang_up()
    assert [int(line) for line in connection.reports()] == [1 << 20]
    connection.close(10)


def test_ctrl_c_in_a_terminal_does_not_reach_the_command_that_reaches_a_host(tmp_path):
    """The launcher ends all processes in order; a terminal signals those of its session only."""
    connection = CommandConnection([sys.executable, "-c", "import os; print(os.getsid(0))"], tmp_path / "log")
    assert [int(line) for line in connection.reports()] != [os.getsid(0)]
    connection.close(10)


def until(condition: Callable[[], object]) -> None:
    """Wait for a thread."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
