"""The operator's copies of ledgers on other hosts: a host without the copied lines starts no worker."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from agent_reports import reports_of

from dpcfl_net import __version__
from dpcfl_net.core.errors import LedgerError, Refused, RunFailed
from dpcfl_net.experiment.config_schema import RuntimeSettings
from dpcfl_net.launch.placement import agent as agent_module
from dpcfl_net.launch.placement import ledger_copies
from dpcfl_net.launch.placement.ledger_copies import LedgerTail, check_counter, copied_counter, extend_copy
from dpcfl_net.launch.placement.messages import (
    FILES,
    AgentHello,
    JobAccepted,
    LedgerUpdate,
    Message,
    PrepareKeys,
    PublicKeys,
    SetJob,
    StartWorker,
    WorkerEnded,
    read_command,
)
from dpcfl_net.launch.placement.remote import Host, HostAgent
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.privacy.ledger.ledger import Ledger
from dpcfl_net.transport.keys import client_key

JOB = SetJob(
    files=dict.fromkeys(FILES, "{}"), operator_key="k", connect="tcp://127.0.0.1:9", observer="tcp://127.0.0.1:9",
    runtime=RuntimeSettings(), data_root=None, firsts=[3],
)  # fmt: skip


def charge(folder, *rounds):
    """Charge rounds in the ledger of client 3 on its host."""
    with Ledger(folder, owner={"run": "r1", "job": "j" * 64, "client": 3}, durable=False) as ledger:
        for number in rounds:
            ledger.debit(
                job="job", request=f"{number}", round=number, kind="train", slots=["train"], events=[SampledGaussian(1.25, 0.1, 7)],
                key=None,
            )  # fmt: skip


@pytest.fixture
def ledger(tmp_path):
    """A ledger of two charges on a host."""
    folder = tmp_path / "host" / "ledgers" / client_key(3)
    charge(folder, 1, 2)
    return folder


@pytest.fixture
def copy(tmp_path, ledger):
    """The operator's copy of it."""
    extend_copy(tmp_path / "run" / client_key(3), LedgerTail(3, ledger).new_lines())
    return tmp_path / "run" / client_key(3)


def test_a_ledger_that_has_grown_since_the_copy_is_accepted(tmp_path, ledger, copy):
    assert copied_counter(tmp_path / "nothing") is None
    counter = copied_counter(copy)
    assert counter == (copy / "counter").read_text()
    check_counter(3, ledger, counter)
    charge(ledger, 3)
    check_counter(3, ledger, counter)
    (copy / "counter").write_text(f"0 {64 * '0'}\n")  # a crash left it behind the lines
    assert copied_counter(copy) == counter


def test_a_line_is_reported_once_the_ledger_holds_it_and_not_while_the_journal_alone_does(ledger):
    path, tail = ledger / "ledger.jsonl", LedgerTail(3, ledger)
    *before, newest = path.read_text().splitlines(keepends=True)
    path.write_text("".join(before))
    assert tail.new_lines() is None
    path.write_text("".join([*before, newest, '{"half']))  # the next line is being written
    update = tail.new_lines()
    assert (update.at, update.lines, update.counter[:2]) == (0, "".join([*before, newest]), f"{len(before)} ")
    assert tail.new_lines() is None
    path.write_text("".join([*before, newest]))
    assert tail.new_lines() is None
    charge(ledger, 3)
    path.unlink()
    assert LedgerTail(3, ledger).new_lines() is tail.new_lines() is None
    path.write_text("".join([*before, newest]))
    (ledger / "journal").unlink()
    assert LedgerTail(3, ledger).new_lines() is tail.new_lines() is None


def test_a_ledger_that_has_not_grown_is_not_read_again(ledger, monkeypatch):
    """An agent looks at the ledgers of all its clients each second, and each time that one of its workers ends."""
    reads, last_counted = [], ledger_copies.last_counted
    monkeypatch.setattr(ledger_copies, "last_counted", lambda folder: reads.append(folder) or last_counted(folder))
    tail, copied = LedgerTail(3, ledger), ""
    for rounds in ((), (3,), (4, 5)):
        charge(ledger, *rounds)
        copied += tail.new_lines().lines
        assert copied == (ledger / "ledger.jsonl").read_text()
        reads.clear()
        assert [tail.new_lines() for _ in range(3)] == [None] * 3
        assert reads == []


def test_a_line_that_a_crash_left_in_the_journal_alone_counts(ledger, copy):
    """The journal is flushed for each charge, ledger.jsonl at times."""
    whole = (copy / "ledger.jsonl").read_bytes()
    charge(ledger, 3)
    newest = (ledger / "ledger.jsonl").read_bytes()
    journal = (ledger / "journal").read_bytes()
    extend_copy(copy, LedgerTail(3, ledger).new_lines())
    counter = copied_counter(copy)
    assert counter.startswith("3 ")
    shutil.rmtree(ledger)
    charge(ledger, 1, 2)
    unsynced = (ledger / "journal").read_bytes()[64:128]  # as before the flush of ledger.jsonl by the last close
    (ledger / "journal").write_bytes(journal[:64] + unsynced + journal[128:])
    (ledger / "ledger.jsonl").write_bytes(newest[: len(whole) + 20])
    check_counter(3, ledger, counter)


@pytest.mark.parametrize("kept", [0, 300, -1])
@pytest.mark.parametrize("zeros", [True, False])
def test_a_copy_whose_lines_a_power_failure_has_lost_names_them_and_gets_them_again(ledger, copy, kept, zeros):
    """A copy is not flushed. Without its lines any ledger passed; with zeros the ledger was said to be rolled back."""
    counter, whole = copied_counter(copy), (copy / "ledger.jsonl").read_bytes()
    (copy / "ledger.jsonl").write_bytes(whole[:kept] + bytes(zeros * len(whole[kept:])))
    assert copied_counter(copy) == counter
    extend_copy(copy, LedgerTail(3, ledger).new_lines())
    assert (copy / "ledger.jsonl").read_bytes() == whole


def gone(folder):
    shutil.rmtree(folder)


def older(folder):
    gone(folder)
    charge(folder, 1)


def other(folder):
    gone(folder)
    charge(folder, 1, 5, 6, 7)


@pytest.mark.parametrize("change", [gone, older, other])
def test_a_ledger_without_a_copied_line_is_refused(ledger, copy, change):
    counter, copied = copied_counter(copy), (copy / "ledger.jsonl").read_bytes()
    tail = LedgerTail(3, ledger)
    tail.new_lines()
    change(ledger)
    with pytest.raises(LedgerError, match="ledger-rolled-back: the ledger of client 3 lacks lines"):
        check_counter(3, ledger, counter)
    for again in (tail, LedgerTail(3, ledger)) if ledger.exists() else ():  # in the same connection, and after another one
        with pytest.raises(LedgerError, match="ledger-rolled-back: the ledger of client 3 lacks lines"):
            extend_copy(copy, again.new_lines())
    assert (copy / "ledger.jsonl").read_bytes() == copied


def test_an_edited_ledger_and_a_counter_of_nonsense_are_refused(ledger, copy):
    with pytest.raises(LedgerError, match="ledger-broken: 'nonsense' is not"):
        check_counter(3, ledger, "nonsense")
    (ledger / "ledger.jsonl").write_bytes((ledger / "ledger.jsonl").read_bytes().replace(b'"round":1', b'"round":2'))
    with pytest.raises(LedgerError, match="ledger-broken"):
        check_counter(3, ledger, copied_counter(copy))


def test_a_report_that_leaves_out_lines_is_refused(copy):
    size = (copy / "ledger.jsonl").stat().st_size
    with pytest.raises(Refused, match=f"continues at byte {size + 1}, but the copy has {size}"):
        extend_copy(copy, LedgerUpdate(client=3, at=size + 1, lines="{}\n", counter="0 " + 64 * "0" + "\n"))


def test_an_agent_refuses_the_job_before_a_worker_starts(tmp_path, ledger, copy):
    keys = PrepareKeys(clients=[3], existing=False)
    job = JOB.model_copy(update={"counters": {3: copied_counter(copy)}})
    assert isinstance(reports_of(tmp_path / "host", keys, job)[-1], JobAccepted)
    (tmp_path / "host" / "protocol.json").unlink()
    gone(ledger)
    again = keys.model_copy(update={"existing": True})
    with pytest.raises(LedgerError, match="ledger-rolled-back"):
        reports_of(tmp_path / "host", again, job, StartWorker(first=3, count=1, group=False))
    assert not (tmp_path / "host" / "protocol.json").exists()
    assert not ledger.exists()
    assert not [*(tmp_path / "host").glob("logs/client_*")]


@pytest.fixture
def no_end_by_a_signal():
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("no_end_by_a_signal")
@pytest.mark.parametrize("signalled", [False, True])
def test_what_a_worker_has_charged_before_it_is_ended_is_reported(tmp_path, ledger, monkeypatch, signalled):
    """Copies of an interrupted run lacked the charges of its last second, and told an epsilon that was too small.

    SLURM ends a job by a signal to all its processes: agents ended at once.
    """

    class Workers:
        """A worker that charges a round before it ends."""

        def __init__(self, *_):
            self._sentinels = os.pipe()

        def start(self, process):
            if signalled:
                signal.raise_signal(signal.SIGTERM)
            return SimpleNamespace(sentinel=self._sentinels[0])

        def close(self):
            charge(ledger, 3)
            for end in self._sentinels:
                os.close(end)

    monkeypatch.setattr(agent_module, "LocalLauncher", Workers)
    keys = PrepareKeys(clients=[3], existing=False)
    found: list[Message] = []
    with pytest.raises(RunFailed, match="ended by a signal") if signalled else nullcontext():
        reports_of(tmp_path / "host", keys, JOB, StartWorker(first=3, count=1, group=False), found=found)
    updates = [report for report in found if isinstance(report, LedgerUpdate)]
    assert "".join(update.lines for update in updates) == (ledger / "ledger.jsonl").read_text()
    assert updates[-1].counter.startswith("3 ")


def test_the_end_of_a_worker_is_reported_after_its_charges_with_its_part_of_the_log(tmp_path, ledger, monkeypatch):
    """The launcher restarts it at once: the copy of its ledger must hold the lines until then."""
    ends = []

    class Workers:
        """A worker that charges a round, writes to its log and ends; the input of the agent ends after it."""

        def __init__(self, *_):
            self._sentinel, self._alive = os.pipe()

        def start(self, process):
            charge(ledger, 3)
            log.open("a").write("begins\n")
            os.close(self._alive)
            return SimpleNamespace(
                sentinel=self._sentinel, wait=lambda: 70, close=self._end, log_path=log, reason="RunFailed: no room"
            )

        def _end(self):
            os.close(self._sentinel)
            ends[0]()

        def close(self):
            pass

    log = tmp_path / "host" / "logs" / "client_3.log"
    log.parent.mkdir()
    log.write_text("of an earlier process\n")
    monkeypatch.setattr(agent_module, "LocalLauncher", Workers)
    keys = PrepareKeys(clients=[3], existing=False)
    reports = reports_of(tmp_path / "host", keys, JOB, StartWorker(first=3, count=1, group=False), ends=ends.append)
    *_, update, end = reports
    assert isinstance(reports[0], AgentHello)
    assert (isinstance(update, LedgerUpdate), update.counter[:2]) == (True, "3 ")
    assert end == WorkerEnded(first=3, code=70, log="begins\nRunFailed: no room")


def test_a_job_with_a_counter_of_nonsense_is_not_a_command():
    line = JOB.model_copy(update={"counters": {3: "nonsense"}}).line()
    with pytest.raises(Refused, match=r"agent-line: .*counters\.3"):
        read_command(line)


@dataclass
class Recorded:
    """A connection to a host that says hello and ends when it has the job; the lines that it was sent."""

    sent: list[bytes] = field(default_factory=list)

    def send(self, data):
        self.sent.append(data)

    def reports(self):
        yield AgentHello(version=__version__, host="h", cores=1, memory=1, gpus=[]).line()
        yield PublicKeys(keys={3: "k", 4: "k"}, identities={}).line()

    def failure(self):
        return "the connection was lost"

    def hang_up(self):
        pass

    def close(self, patience_s):
        pass


def test_the_counters_are_those_at_the_time_of_each_connection(ledger, copy):
    connections = []

    def connect():
        connections.append(Recorded())
        return connections[-1]

    agent = HostAgent(Host("a", connect))
    agent.keys, agent.ledgers = {3: "k", 4: "k"}, copy.parent  # of client 4 no line was copied yet
    agent.set_job(JOB)
    for number in (3, 4):
        before = copied_counter(copy)
        agent.open()
        agent.join(10)
        jobs = [c for c in map(read_command, connections[-1].sent) if isinstance(c, SetJob)]
        assert [job.counters for job in jobs] == [{3: before}]  # once: a second one would make other compute slots
        charge(ledger, number)
        extend_copy(copy, LedgerTail(3, ledger).new_lines())
        assert copied_counter(copy) != before
