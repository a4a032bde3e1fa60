"""Commands for workers and an aggregator, as the agent of a host executes them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL, SIGTERM, SIGUSR1
from types import SimpleNamespace
from typing import Any

import pytest
from agent_reports import reports_of

from dpcfl_net.core.errors import Refused
from dpcfl_net.experiment.config_schema import RuntimeSettings
from dpcfl_net.launch.placement import agent as agent_module
from dpcfl_net.launch.placement.messages import (
    FILES,
    PUBLIC_FILES,
    AggregatorEnded,
    AggregatorListens,
    GroupCommand,
    LoseClient,
    Message,
    PrepareKeys,
    PublicKeys,
    SendSignal,
    SetJob,
    SignalAggregator,
    StartAggregator,
    StartWorker,
    WorkerEnded,
)

KEYS = PrepareKeys(clients=[3, 4, 5, 6], existing=False)
JOB = SetJob(
    files=dict.fromkeys(FILES, "{}"), operator_key="k", connect="tcp://127.0.0.1:9", observer="tcp://127.0.0.1:9",
    runtime=RuntimeSettings(), data_root=None, firsts=[3, 5],
)  # fmt: skip
AGGREGATOR = StartAggregator(
    files=dict.fromkeys(PUBLIC_FILES, "{}"), operator_key="k", connect="tcp://127.0.0.1:9", round_timeout_s=1.0, join_timeout_s=1.0,
    orphan_timeout_s=1.0,
)  # fmt: skip
ADDRESS = "tcp://127.0.0.1:4711"


@pytest.fixture
def done(monkeypatch) -> list[tuple[Any, ...]]:
    """What an agent does with stand-ins of its workers and of its aggregator, which listens as soon as it has started."""
    done: list[tuple[Any, ...]] = []

    class Workers:
        def __init__(self, *_: Any) -> None:
            self._pipes: list[tuple[int, int]] = []

        def connect_to(self, address: str) -> None:
            done.append(("connect", address))

        def start(self, process: Any) -> SimpleNamespace:
            first = process.clients[0]
            done.append((first, "starts", len(process.clients), process.group))
            self._pipes.append(os.pipe())
            tell = [lambda word, what=what: done.append((first, what, word)) for what in ("signal", "command")]
            finish = lambda: done.append((first, "finish"))  # noqa: E731
            return SimpleNamespace(sentinel=self._pipes[-1][0], signal=tell[0], send_command=tell[1], finish=finish)

        def close(self) -> None:
            for end in (end for pipe in self._pipes for end in pipe):
                os.close(end)

    class Aggregator:
        looks = 1  # of the agent until it listens

        def __init__(self, folder: Path, number: int) -> None:
            self.address, self.listens, self.starting, self.sentinels = None, False, False, []

        def prepare_key(self, *, existing: bool) -> str:
            return "key of an aggregator"

        def start(self, command: StartAggregator) -> None:
            done.append(("aggregator", "starts"))
            self.starting = True

        def lose(self, client: int) -> None:
            done.append(("aggregator", "lose", client))

        def signal(self, number: int) -> None:
            done.append(("aggregator", "signal", number))
            if number == SIGKILL:
                read, write = os.pipe()
                os.close(write)
                self.sentinels.append(read)

        def ended(self) -> list[Message]:
            done.append(("aggregator", "ended"))
            os.close(self.sentinels.pop())
            return [AggregatorEnded(code=-SIGKILL, log="")]

        def news(self) -> list[Message]:
            self.looks -= self.starting
            if not self.starting or self.looks:
                return []
            self.starting, self.listens, self.address = False, True, ADDRESS
            return [AggregatorListens(address=ADDRESS)]

        def close(self) -> None:
            done.append(("aggregator", "ends"))

    monkeypatch.setattr(agent_module, "LocalLauncher", Workers)
    monkeypatch.setattr(agent_module, "HostAggregator", Aggregator)
    return done


def test_a_command_reaches_the_worker_that_it_names(tmp_path, done, monkeypatch):
    (host := tmp_path / "host").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(host))
    job = JOB.model_copy(update={"runtime": RuntimeSettings(slots=2)})
    commands = [
        GroupCommand(first=3, word="start 4"), GroupCommand(first=5, word="stop 6"), SendSignal(first=5, number=SIGUSR1),
        GroupCommand(first=3, word="end"), GroupCommand(first=7, word="start 7"), SendSignal(first=7, number=SIGKILL),
    ]  # fmt: skip
    workers = [StartWorker(first=3, count=2, group=True), StartWorker(first=5, count=1, group=False)]
    reports = reports_of(tmp_path / "run", KEYS, job, *workers, *commands)
    assert not [report for report in reports if isinstance(report, WorkerEnded)]
    assert not [*host.rglob("run-*")], "compute slots of the run"
    assert done == [
        (3, "starts", 2, True), (5, "starts", 1, False),
        (3, "command", "start 4"), (5, "command", "stop 6"), (5, "signal", SIGUSR1), (3, "finish"),
    ]  # fmt: skip


def test_workers_and_their_commands_wait_for_the_aggregator_unless_they_are_ended(tmp_path, done):
    keys = KEYS.model_copy(update={"aggregator": 0})
    commands = [
        StartWorker(first=3, count=2, group=True), GroupCommand(first=3, word="start 4"), SendSignal(first=3, number=SIGUSR1),
        StartWorker(first=5, count=1, group=False), StartWorker(first=6, count=1, group=False),
        SendSignal(first=5, number=SIGTERM), SendSignal(first=6, number=SIGKILL),
        AGGREGATOR, LoseClient(client=5), SignalAggregator(number=SIGUSR1),
    ]  # fmt: skip
    reports = reports_of(tmp_path, keys, JOB, *commands)
    assert [report.aggregator for report in reports if isinstance(report, PublicKeys)] == ["key of an aggregator"]
    assert [report for report in reports if isinstance(report, WorkerEnded | AggregatorListens)] == [
        WorkerEnded(first=5, code=-SIGTERM, log=""), WorkerEnded(first=6, code=-SIGKILL, log=""), AggregatorListens(address=ADDRESS),
    ]  # fmt: skip
    assert done == [
        ("aggregator", "starts"), ("aggregator", "lose", 5), ("aggregator", "signal", SIGUSR1),
        ("connect", ADDRESS), (3, "starts", 2, True), (3, "command", "start 4"), (3, "signal", SIGUSR1),
        ("aggregator", "ends"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "seen"),
    [([], (3, "starts", 2, True)), ([SignalAggregator(number=SIGKILL)], ("aggregator", "ended"))],
    ids=["listens", "has ended"],
)
def test_an_agent_that_gets_no_more_commands_sees_that_its_aggregator(tmp_path, done, monkeypatch, more, seen):
    monkeypatch.setattr(agent_module.HostAggregator, "looks", 4)

    def ends(close: Callable[[], None]) -> None:
        def wait() -> None:
            deadline = time.monotonic() + 30
            while seen not in done and time.monotonic() < deadline:
                time.sleep(0.01)
            close()

        threading.Thread(target=wait).start()

    keys = KEYS.model_copy(update={"aggregator": 0})
    reports = reports_of(tmp_path, keys, JOB, StartWorker(first=3, count=2, group=True), AGGREGATOR, *more, ends=ends)
    assert seen in done
    assert [report.code for report in reports if isinstance(report, AggregatorEnded)] == [-SIGKILL] * len(more)


@pytest.mark.parametrize("commands", [[], [AGGREGATOR]], ids=["never", "at the end"])
def test_no_worker_starts_once_the_input_has_ended(tmp_path, done, monkeypatch, commands):
    monkeypatch.setattr(agent_module.HostAggregator, "looks", 2)
    keys = KEYS.model_copy(update={"aggregator": 0})
    reports = reports_of(tmp_path, keys, JOB, StartWorker(first=3, count=2, group=True), *commands)
    assert [isinstance(report, AggregatorListens) for report in reports[3:]] == [True] * len(commands)
    assert done == [*([("aggregator", "starts")] if commands else []), ("aggregator", "ends")]


@pytest.mark.parametrize("command", [AGGREGATOR, LoseClient(client=3), SignalAggregator(number=SIGUSR1)])
def test_a_host_without_an_aggregator_refuses_its_commands(tmp_path, done, command):
    with pytest.raises(Refused, match="agent-line: a command for an aggregator, which this host does not have"):
        reports_of(tmp_path, KEYS, JOB, command)
    assert done == []
