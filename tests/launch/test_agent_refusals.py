"""Messages that an agent and its launcher refuse: the host of an agent may be hostile."""

from __future__ import annotations

import errno
import stat
import subprocess
import sys
import threading

import pytest
from agent_reports import reports_of

from dpcfl_net import __version__
from dpcfl_net.core.errors import ConfigError, Refused, RunFailed
from dpcfl_net.experiment.config_schema import RuntimeSettings
from dpcfl_net.launch.placement import agent as agent_module
from dpcfl_net.launch.placement.base import LOST, ClientRange
from dpcfl_net.launch.placement.messages import (
    FILES,
    AgentError,
    AgentHello,
    AggregatorListens,
    LedgerUpdate,
    Message,
    PrepareKeys,
    PublicKeys,
    SetJob,
    StartWorker,
    read_report,
)
from dpcfl_net.launch.placement.placements import KeyOwners
from dpcfl_net.launch.placement.remote import Host, HostAgent
from dpcfl_net.launch.placement.remote_placement import ListenAddress, RemotePlacement
from dpcfl_net.transport.keys import client_key, public_path

COUNTER = f"0 {64 * '0'}\n"


# an agent


def job(files: set[str]) -> SetJob:
    return SetJob(
        files=dict.fromkeys(files, "{}"), operator_key="k", connect="tcp://127.0.0.1:9", observer="tcp://127.0.0.1:9",
        runtime=RuntimeSettings(), data_root=None, firsts=[3],
    )  # fmt: skip


@pytest.mark.parametrize("files", [FILES - {min(FILES)}, FILES | {"../outside"}])
def test_a_job_of_other_files_is_refused_and_not_stored(tmp_path, files):
    keys = PrepareKeys(clients=[3], existing=False)
    with pytest.raises(Refused, match="agent-line: a job must hold"):
        reports_of(tmp_path / "run", keys, job(files))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"keys", ".lock"}
    assert [*tmp_path.iterdir()] == [tmp_path / "run"]


def test_a_worker_of_no_job_is_refused(tmp_path):
    with pytest.raises(Refused, match="agent-line: a worker was started before the job was set"):
        reports_of(tmp_path / "run", PrepareKeys(clients=[3], existing=False), StartWorker(first=3, count=1, group=False))


def test_a_client_that_ran_elsewhere_gets_no_new_keys(tmp_path):
    """With them it could start with an empty ledger, and spend its budget a second time."""
    reports_of(tmp_path / "run", PrepareKeys(clients=[3], existing=False))
    with pytest.raises(Refused, match="stranger: no keys and ledger of client 4"):
        reports_of(tmp_path / "run", PrepareKeys(clients=[3, 4], existing=True))
    assert not [*tmp_path.rglob("client_0004*")]


@pytest.mark.parametrize(("run", "node"), [("../r", "a"), ("r", "a/b")])
def test_a_name_that_leaves_the_root_is_refused(tmp_path, run, node):
    words = [sys.executable, "-P", "-m", "dpcfl_net.launch.placement.agent"]
    line = PrepareKeys(clients=[0], existing=False).line()
    done = subprocess.run(
        [*words, "--root", tmp_path / "root", "--run", run, "--node", node],
        input=line,
        capture_output=True,
        timeout=120,
        check=False,
    )
    report = read_report(done.stdout.splitlines()[-1])
    assert isinstance(report, AgentError)
    assert "is not a valid name" in report.reason
    assert report.code == done.returncode == 2
    assert not [*tmp_path.iterdir()]


def test_a_command_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_module, "LONGEST", 100)
    with pytest.raises(Refused, match="agent-line: a command is longer than 100 bytes"):
        reports_of(tmp_path / "run", job(FILES))


def test_a_host_without_a_place_for_compute_slots_makes_no_keys(tmp_path, monkeypatch):
    """Each of its workers failed, one restart after another, after the job had been signed."""
    (tmp_path / "dpcfl_net").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(RunFailed, match=r"the folder of compute slots .* cannot be created"):
        reports_of(tmp_path / "run", PrepareKeys(clients=[3], existing=False))
    assert not (tmp_path / "run").exists()


def test_the_folder_of_a_host_is_for_its_owner_only(tmp_path):
    reports_of(tmp_path / "run", PrepareKeys(clients=[3], existing=False))
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_a_file_that_the_host_does_not_give_is_a_line_and_a_bug_is_none(tmp_path):
    (tmp_path / "root").touch()
    words = ["--root", str(tmp_path / "root"), "--run", "r", "--node", "a"]
    line = PrepareKeys(clients=[0], existing=False).line()
    command = [sys.executable, "-P", "-m", "dpcfl_net.launch.placement.agent", *words]
    done = subprocess.run(command, input=line, capture_output=True, timeout=120, check=False)
    report = read_report(done.stdout.splitlines()[-1])
    assert isinstance(report, AgentError)
    assert report.reason == f"{tmp_path}/root/r/a: a part of this path is a file, not a folder"
    assert report.code == done.returncode == 2
    full = agent_module._problem(OSError(errno.ENOSPC, "full"))
    assert (str(full), full.exit_code) == ("output: no space left on the device", 4)
    with pytest.raises(OSError, match="bad"):
        agent_module._problem(OSError(errno.EBADF, "bad"))


# a launcher


class Connection:
    """A connection to an agent that says hello at once, and more once it has been sent a command."""

    def __init__(self, *reports: Message) -> None:
        self._reports, self._asked, self._ends = reports, threading.Event(), threading.Event()

    def send(self, data):
        self._asked.set()

    def reports(self):
        yield AgentHello(version=__version__, host="far", cores=1, memory=1, gpus=[]).line()
        self._asked.wait(60)
        yield from (report.line() for report in self._reports)
        self._ends.wait(60)

    def failure(self):
        return "the connection was lost"

    def hang_up(self):
        self._ends.set()
        self._asked.set()

    def close(self, patience_s):
        self.hang_up()


def connected(*reports: Message) -> HostAgent:
    """A host with client 3, which reports this once it has a command."""
    agent = HostAgent(Host("far", lambda: Connection(*reports)))
    agent.keys = {3: "k"}
    agent.open()
    agent.wait_for(agent.has_answered, 60)
    return agent


def refused(agent: HostAgent, command: Message) -> str:
    """Why the launcher ends the connection after the reports."""
    agent.send(command)
    with pytest.raises(RunFailed) as found:
        agent.wait_for(lambda: False, 60)
    agent.join(60)
    return str(found.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"keys": {3: "other"}}, "the keys on the host differ from those in the job"),
        ({"identities": {3: "other"}}, "the keys on the host differ from those in the job"),
        ({"aggregator": "other"}, "the keys on the host differ from those in the job"),
        ({"keys": {3: "k", 4: "k"}}, "keys of other owners"),
        ({"keys": {}}, "keys of other owners"),
        ({"identities": {}}, "keys of other owners"),
        ({"identities": {3: "i", 4: "i"}}, "keys of other owners"),
        ({"aggregator": None}, "keys of other owners"),
    ],
)
def test_other_keys_than_those_of_the_job_are_refused(change, said):
    known = {"keys": {3: "k"}, "identities": {3: "i"}, "aggregator": "a"}
    agent = connected(PublicKeys(**known | change))
    agent.identities, agent.aggregator, agent.aggregator_key = {3: "i"}, 0, "a"
    agent.begin()
    assert said in refused(agent, StartWorker(first=3, count=1, group=False))
    assert {"keys": agent.keys, "identities": agent.identities, "aggregator": agent.aggregator_key} == known


@pytest.mark.parametrize(("client", "copies"), [(4, "ledgers"), (3, None)])
def test_a_ledger_of_a_client_of_another_host_or_before_there_is_a_run_is_not_copied(tmp_path, client, copies):
    """Its host would be refused afterwards: its ledger would lack the lines of the copy."""
    agent = connected(LedgerUpdate(client=client, at=0, lines="{}\n", counter=COUNTER))
    agent.ledgers = None if copies is None else tmp_path / copies
    handle = agent.start(ClientRange(range(3, 4)), tmp_path / "log")
    assert handle.wait(60) == LOST, "after which it starts again"
    assert f"a ledger of client {client}, which is not on this host" in handle.log_path.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    handle.close()


def test_a_worker_whose_ledger_lacks_copied_lines_ends_with_a_code_after_which_none_starts(tmp_path):
    agent = connected(LedgerUpdate(client=3, at=0, lines="{}\n", counter=COUNTER))
    agent.ledgers = tmp_path / "ledgers"
    copy = agent.ledgers / client_key(3) / "ledger.jsonl"
    copy.parent.mkdir(parents=True)
    copy.write_text('{"copied": 1}\n')
    handle = agent.start(ClientRange(range(3, 4)), tmp_path / "log")
    assert handle.wait(60) == 3
    assert "ledger-rolled-back: the ledger of client 3" in handle.log_path.read_text()
    assert copy.read_text() == '{"copied": 1}\n'
    handle.close()


def test_an_aggregator_that_was_not_started_does_not_listen():
    agent = connected(AggregatorListens(address="tcp://127.0.0.1:9"))
    assert "a report of an aggregator that was not started" in refused(agent, StartWorker(first=3, count=1, group=False))


# a resumed run

OWNERS = KeyOwners(clients=2, size=1, identities=False, groups=(), runtime=RuntimeSettings())


def test_a_resumed_run_needs_its_hosts(tmp_path):
    placement = RemotePlacement([Host("a", lambda: pytest.fail("contacted"))], ListenAddress("127.0.0.1"), assigned=["a", "b"])
    with pytest.raises(ConfigError, match="this run has clients on b: these hosts are not in the current list"):
        placement.make_keys(tmp_path, OWNERS)


def test_a_resumed_run_keeps_the_keys_of_its_job(tmp_path):
    keys = {client: public_path(tmp_path, client_key(client)) for client in range(2)}
    for path in keys.values():
        path.parent.mkdir()
        path.write_text("k\n")
    host = Host("a", lambda: Connection(PublicKeys(keys={0: "k", 1: "other"})))
    placement = RemotePlacement([host], ListenAddress("127.0.0.1"), assigned=["a", "a"])
    placement.open()
    try:
        with pytest.raises(Refused, match=r"client_0001.public on a differs from the key in the job"):
            placement.make_keys(tmp_path, OWNERS)
    finally:
        placement.close()
    assert [path.read_text() for path in keys.values()] == ["k\n", "k\n"]
