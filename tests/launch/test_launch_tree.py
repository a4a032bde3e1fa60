"""Workers on other hosts with an aggregator on each host: equal bits, few connections, failures, keys, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import yaml
from agent_reports import reports_of
from conftest import DPCFL, ROOT, SMALL, assert_nothing_left, command_line, dpcfl, only_run, write_config
from run_results import assert_bits_of_one_process, job_of, server_lines, warnings_of

from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.job_reader import read_signed_protocol
from dpcfl_net.core.run_folder import EXPERIMENT, RunFolder
from dpcfl_net.core.signing import read_operator_key
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.config_schema import RuntimeSettings
from dpcfl_net.launch.aggregators import RemoteAggregators
from dpcfl_net.launch.cli import commands
from dpcfl_net.launch.placement import parents
from dpcfl_net.launch.placement.host_aggregator import HostAggregator
from dpcfl_net.launch.placement.messages import (
    FILES,
    PUBLIC_FILES,
    AggregatorEnded,
    AggregatorListens,
    AggregatorRecords,
    LoseClient,
    PrepareKeys,
    PublicKeys,
    SendSignal,
    SetJob,
    StartAggregator,
    StartWorker,
    WorkerEnded,
    read_report,
)
from dpcfl_net.launch.placement.remote import Host
from dpcfl_net.launch.placement.remote_placement import ListenAddress, RemotePlacement
from dpcfl_net.launch.placement.shares import share_processes
from dpcfl_net.results.verify import verify_run
from dpcfl_net.runtime.checkpoint import Checkpoints

AT = ["--address", "127.0.0.1"]
SETTINGS = {
    "data": {"dataset": "digits", "clients": [1, 2, 2], "train_per_client": 100, "test_per_client": 40},
    "model": {"name": "linear"}, "rounds": 6, "privacy": {**SMALL["privacy"], "accountant": "rdp"}, "output": {},
    "algorithm": {"name": "r-dpcfl", "clusters": 2},
}  # fmt: skip
LONG = {"rounds": 60, "local": {"batch_size": 8, "lr": 0.5, "epochs": 4}}


def placement_of(*workers: int) -> RemotePlacement:
    """A placement whose hosts were not contacted."""
    hosts = [Host(name, lambda: pytest.fail("contacted"), count) for name, count in zip("abc", workers, strict=False)]
    return RemotePlacement(hosts, ListenAddress("127.0.0.1"))


def groups_of(sizes: list[int] | int, clients: int) -> list[range]:
    config = configuration.resolve({"name": "tree", **SETTINGS, "data": {**SETTINGS["data"], "clients": [1, 1, clients - 2]},
                                    "runtime": {"aggregators": sizes}})  # fmt: skip
    return config.runtime.groups(clients)


# which client runs where


def test_each_host_gets_one_group_of_consecutive_clients_in_proportion_to_its_share():
    placement = placement_of(5, 3)
    sizes = placement.group_sizes(8, 1)
    assert sizes == [5, 3]
    assert placement.assign_hosts(8, 1, groups_of(sizes, 8)) == [*"aaaaabbb"]
    assert placement_of(2, 1).group_sizes(8, 3) == [6, 2]  # three clients to a worker process, on one host
    assert placement_of(2, 1).assign_hosts(8, 3, groups_of([6, 2], 8)) == [*"aab"]


@pytest.mark.parametrize(("processes", "shares"), [(8, [5, 3]), (8, [1, 1, 1]), (9, [12, 8, 40]), (3, [1, 100, 1])])
def test_every_host_takes_a_worker_process_and_exact_shares_are_kept(processes, shares):
    counts = share_processes(processes, shares)
    assert sum(counts) == processes
    assert min(counts) >= 1
    assert share_processes(sum(shares), shares) == shares


@pytest.mark.parametrize(
    ("sizes", "size", "said"),
    [
        (3, 1, "runtime.aggregators makes 3 groups of clients: must be one for each of the 2 hosts (a, b)"),
        ([4, 4], 3, "groups of 4, 4 clients: all but the last must be multiples of runtime.clients_per_worker, 3"),
    ],
)
def test_groups_that_do_not_fit_the_hosts_are_refused(sizes, size, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        placement_of(1, 1).assign_hosts(8, size, groups_of(sizes, 8))


def test_more_hosts_than_worker_processes_are_refused():
    with pytest.raises(ConfigError, match="3 hosts for 2 worker processes"):
        placement_of(1, 1, 1).group_sizes(8, 4)


@pytest.mark.parametrize("value", ["1001", "-1", "x", "[]", "[0, 5]", "[2.5, 2.5]", "true"])
def test_a_number_of_aggregators_that_is_none_is_named_with_what_is_allowed(value):
    with pytest.raises(ConfigError, match=r"runtime.aggregators is .*: must be a number from 0 to 1,000, or a list"):
        groups_of(yaml.safe_load(value), 5)


def test_groups_that_leave_clients_out_are_refused():
    with pytest.raises(
        ConfigError, match=re.escape("runtime.aggregators is [2, 2]: must add up to the number of clients, 5, got 4")
    ):
        groups_of([2, 2], 5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "local", "--tree"], "--tree is for other hosts"),
        (["--on", "ssh", "--hosts", "HOSTS", *AT, "--tree", "runtime.aggregators=2"], "must be 0 with --tree"),
        (["--on", "ssh", "--hosts", "HOSTS", *AT, "--tree", "privacy.trust=trusted-server", "privacy.unit=client",
          "algorithm={name: dp-fedavg, sampling_rate: 0.5}"], "an aggregator would read raw updates"),
        (["--on", "ssh", "--hosts", "HOSTS", *AT, "--tree", "output.transcript=full"], "output.transcript must be 'off'"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_with_a_tree_are_refused_before_a_host_is_contacted(tmp_path, words, said):
    hosts = hosts_file(tmp_path, {"through": ["touch", str(tmp_path / "contacted")]})
    words = [str(hosts) if word == "HOSTS" else word for word in words]
    with pytest.raises(ConfigError, match=re.escape(said)):
        commands.app(["launch", str(write_config(tmp_path / "c", **SETTINGS)), *words], standalone_mode=False)
    assert not (tmp_path / "contacted").exists()


# the agent


def test_the_aggregators_key_is_apart_from_those_of_the_clients(tmp_path):
    ask = PrepareKeys(clients=[3, 4], existing=False, aggregator=1)
    (made,) = [report for report in reports_of(tmp_path / "run", ask) if isinstance(report, PublicKeys)]
    secrets = sorted(path.relative_to(tmp_path / "run") for path in tmp_path.rglob("*.secret"))
    assert secrets == [
        Path("aggregator/keys/aggregator_0001/aggregator_0001.secret"),
        *(Path(f"keys/client_000{c}/client_000{c}.secret") for c in (3, 4)),
    ]
    assert {stat.S_IMODE((tmp_path / "run" / path).stat().st_mode) for path in secrets} == {0o600}
    (again,) = [
        report
        for report in reports_of(tmp_path / "run", ask.model_copy(update={"existing": True}))
        if isinstance(report, PublicKeys)
    ]
    assert again == made
    assert len(made.aggregator) == 40
    shutil.rmtree(tmp_path / "run" / "aggregator")
    with pytest.raises(Refused, match="no keys of aggregator_0001"):
        reports_of(tmp_path / "run", ask.model_copy(update={"existing": True}))


def test_an_aggregator_gets_the_public_part_of_the_job_and_nothing_else(tmp_path):
    start = {
        "operator_key": "k",
        "connect": "tcp://127.0.0.1:9",
        "round_timeout_s": 1,
        "join_timeout_s": 1,
        "orphan_timeout_s": 1,
    }
    assert EXPERIMENT in FILES - PUBLIC_FILES
    command = StartAggregator(files=dict.fromkeys(FILES, "{}"), **start)
    with pytest.raises(Refused, match=re.escape(f"got {', '.join(sorted(FILES))}")):
        reports_of(tmp_path / "run", PrepareKeys(clients=[3], existing=False, aggregator=0), command)
    assert not [*tmp_path.rglob(EXPERIMENT)]


@pytest.mark.parametrize("command", [LoseClient(client=3), StartAggregator(
    files={}, operator_key="", connect="", round_timeout_s=1, join_timeout_s=1, orphan_timeout_s=1)])  # fmt: skip
def test_a_host_without_an_aggregator_refuses_commands_for_one(tmp_path, command):
    with pytest.raises(Refused, match="which this host does not have"):
        reports_of(tmp_path / "run", command)


def test_new_records_of_an_aggregator_are_reported_without_lines_that_a_crash_has_cut_or_no_report_can_hold(tmp_path):
    (tmp_path / "messages.jsonl").write_text('{"of": "an earlier agent"}\n')
    aggregator = HostAggregator(tmp_path, 0)
    assert not [*aggregator.news()]
    with (tmp_path / "messages.jsonl").open("a") as file:
        deep = "".join(f'{{"deep": {"[" * depth}{"]" * depth}}}\n' for depth in (900, 100_000))
        file.write('{"round": 1}\n{"rou\n[2]\n' + deep + '{"round": 2}\n{"round":')
    (tmp_path / "warnings.jsonl").write_text('{"text": "late"}\n')
    messages = AggregatorRecords(file="messages", lines=[{"round": 1}, {"round": 2}])
    reports = [read_report(report.line().rstrip(b"\n")) for report in aggregator.news()]
    assert reports == [messages, AggregatorRecords(file="warnings", lines=[{"text": "late"}])]
    with (tmp_path / "messages.jsonl").open("a") as file:
        file.write(" 3}\n")
    assert [*aggregator.news()] == [AggregatorRecords(file="messages", lines=[{"round": 3}])]


def test_an_aggregator_that_restarts_listens_at_its_first_address_and_hears_of_lost_clients(tmp_path, monkeypatch):
    folder, signals, specs, pipes = RunFolder(tmp_path), [], [], []
    command = StartAggregator(
        files={name: f"text of {name}" for name in PUBLIC_FILES}, operator_key="k", connect="tcp://127.0.0.1:9", round_timeout_s=1,
        join_timeout_s=2, orphan_timeout_s=3,
    )  # fmt: skip

    def fork(title, start, log, descriptors):
        specs.append(json.loads(start.argument))
        pipes.append(Connection(os.dup(descriptors[0]), writable=False))
        log.open("a").write(f"log {len(specs)}\n")
        return SimpleNamespace(sentinel=77, log=log, reason="", signal=signals.append, wait=lambda *_: 4,
                               close=lambda: signals.append("closed"))  # fmt: skip

    monkeypatch.setattr(parents, "fork_role", fork)
    aggregator = HostAggregator(tmp_path, 1)
    aggregator.lose(3)  # before it has started: told again then
    aggregator.signal(signal.SIGUSR1)
    for run in (1, 2):
        assert (aggregator.sentinels, aggregator.starting, aggregator.listens) == ([], False, False)
        aggregator.start(command)
        assert (aggregator.sentinels, aggregator.starting, aggregator.listens) == ([77], True, False)
        assert {name: (tmp_path / name).read_text() for name in PUBLIC_FILES} == command.files
        assert [*aggregator.news()] == []  # the address file is that of the run before
        folder.address("aggregator_0001").parent.mkdir(exist_ok=True)
        folder.address("aggregator_0001").write_text("tcp://127.0.0.1:4711")
        assert [*aggregator.news()] == [AggregatorListens(address="tcp://127.0.0.1:4711")]
        assert (aggregator.starting, aggregator.listens, [*aggregator.news()]) == (False, True, [])
        aggregator.lose(3)
        assert pipes[-1].poll(60)
        assert pipes[-1].recv_bytes() == b"3"
        aggregator.signal(signal.SIGUSR1)
        folder.messages.open("a").write('{"round": 1}\n')
        records = AggregatorRecords(file="messages", lines=[{"round": 1}])
        assert [*aggregator.ended()] == [records, AggregatorEnded(code=4, log=f"log {run}\n")]
    assert [(spec["bind"], spec["number"], spec["connect"]) for spec in specs] == [
        ("tcp://127.0.0.1:*", 1, "tcp://127.0.0.1:9"), ("tcp://127.0.0.1:4711", 1, "tcp://127.0.0.1:9"),
    ]  # fmt: skip
    assert [specs[0][f"{limit}_timeout_s"] for limit in ("round", "join", "orphan")] == [1, 2, 3]
    aggregator.start(command)
    aggregator.close()
    assert signals == [signal.SIGUSR1, "closed", signal.SIGUSR1, "closed", signal.SIGTERM, signal.SIGCONT, "closed"]
    assert aggregator.sentinels == []
    for pipe in pipes:  # of each process: its launcher has closed it
        assert pipe.poll(60)
        with pipe, pytest.raises(EOFError):
            pipe.recv_bytes()


def test_each_aggregator_starts_on_the_host_of_its_clients_and_is_told_its_lost_clients_there(tmp_path):
    files, sent = RunFolder(tmp_path), []
    files.addresses.mkdir()
    files.address("coordinator").write_text("tcp://0.0.0.0:4700")
    files.operator_key.write_text("0" * 64)
    for name in FILES:
        (tmp_path / name).write_text(f"text of {name}")
    hosts = {
        first: SimpleNamespace(start_aggregator=lambda *said, at=first: sent.append((at, *said)),
                               send=lambda command, at=first: sent.append((at, command)))
        for first in (0, 3)
    }  # fmt: skip
    runtime = RuntimeSettings(round_timeout_s=11, join_timeout_s=12, orphan_timeout_s=13)
    reachable = ListenAddress("10.0.0.1")
    aggregators = RemoteAggregators(
        files, runtime, [range(3), range(3, 5)], hosts, RemotePlacement([], reachable).reachable_address
    )
    aggregators.start("aggregator_0001")
    aggregators.tell_again("aggregator_0001", {4, 0, 3})
    aggregators.tell(2)
    command = StartAggregator(
        files={name: f"text of {name}" for name in PUBLIC_FILES}, operator_key="0" * 64, connect="tcp://10.0.0.1:4700",
        round_timeout_s=11, join_timeout_s=12, orphan_timeout_s=13,
    )  # fmt: skip
    assert sent == [
        (3, command, "aggregator_0001", files), (3, LoseClient(client=3)), (3, LoseClient(client=4)), (0, LoseClient(client=2)),
    ]  # fmt: skip
    assert aggregators.addresses() == {}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -15), (signal.SIGKILL, -9), (signal.SIGSTOP, None)])
def test_a_worker_that_is_ended_before_its_aggregator_listens_does_not_start_and_its_end_is_told(tmp_path, number, code):
    """The launcher waits for the end of each worker that it has started."""
    job = SetJob(
        files=dict.fromkeys(FILES, "{}"), operator_key="k", connect="tcp://127.0.0.1:9", observer="tcp://127.0.0.1:9",
        runtime=RuntimeSettings(), data_root=None, firsts=[3, 4],
    )  # fmt: skip
    start = [StartWorker(first=first, count=1, group=False) for first in (3, 4)]
    keys = PrepareKeys(clients=[3, 4], existing=False, aggregator=0)
    found = reports_of(tmp_path / "run", keys, job, *start, SendSignal(first=3, number=number))
    ended = [report for report in found if isinstance(report, WorkerEnded)]
    assert ended == ([] if code is None else [WorkerEnded(first=3, code=code, log="")])
    assert not [*(tmp_path / "run" / "logs").iterdir()]


# complete runs


def hosts_file(folder: Path, *entries: dict) -> Path:
    """Two hosts whose agents run on this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "hosts.yaml"
    hosts = [{"name": name, "through": ["env"], "workers": workers} | entry
             for name, workers, entry in zip("ab", (3, 2), entries or ({}, {}), strict=False)]  # fmt: skip
    path.write_text(yaml.safe_dump({"python": sys.executable, "root": str(folder / "root"), "hosts": hosts}))
    return path


def command_of(folder: Path, hosts: Path, **changes) -> list[str]:
    config = write_config(folder / "c", **{**SETTINGS, **changes})
    return [*DPCFL, "launch", str(config), "--on", "ssh", "--hosts", str(hosts), *AT, "--tree", "--out", str(folder / "out")]


class Started:
    """A run with two hosts that continues while a test does something to its processes."""

    def __init__(self, folder: Path, hosts: Path | None = None, **changes) -> None:
        self.out, self.root = folder / "out", folder / "root"
        self.process = subprocess.Popen(
            command_of(folder, hosts or hosts_file(folder), **{**LONG, **changes}), cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def until_round(self, t: int) -> Path:
        """Wait until round t is done; return the run folder."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self.process.poll() is None:
            for folder in self.out.glob("*"):
                if any(line["round"] >= t for line in server_lines(folder)):
                    return folder
            time.sleep(0.02)
        self.process.kill()
        raise AssertionError(self.process.communicate()[0])

    def find(self, title: str) -> psutil.Process:
        """A process of the run, by its title."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            if title in command_line(process):
                return process
        raise AssertionError(f"there is no process {title}")

    def ends(self, code: int = 0) -> str:
        output, _ = self.process.communicate(timeout=200)
        assert self.process.returncode == code, output
        return output


def peers(coordinator: psutil.Process, folder: Path) -> int:
    """Number of connections to the coordinator."""
    port = int((folder / "addresses" / "coordinator").read_text().rpartition(":")[2])
    found = coordinator.net_connections("tcp")
    return sum(c.status == psutil.CONN_ESTABLISHED and c.laddr.port == port for c in found)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Path]:
    """A finished run of 5 clients on hosts with shares 3 and 2, and the hosts' root."""
    folder = tmp_path_factory.mktemp("tree")
    done = subprocess.run(
        command_of(folder, hosts_file(folder)), cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "clients 0, 1, 2; aggregator 0" in done.stdout
    return only_run(folder / "out"), folder / "root"


@pytest.mark.slow
def test_a_tree_across_hosts_has_the_bits_of_one_process_and_leaves_nothing(finished, tmp_path):
    run, root = finished
    assert [list(entry.clients) for entry in job_of(run).protocol.aggregators] == [[0, 1, 2], [3, 4]]
    assert json.loads((run / "placement.json").read_text())["placed"] == [*"aaabb"]
    assert_bits_of_one_process(run, tmp_path / "again")
    assert not [check for check in verify_run(run) if check.holds is False]
    assert_nothing_left(run.parents[1])
    assert_nothing_left(root)


@pytest.mark.slow
def test_the_resolved_configuration_gives_the_same_bits_on_one_machine(finished, tmp_path):
    run, _ = finished
    config = configuration.load(run / "config.yaml", [])
    assert config.runtime.aggregators == [3, 2]
    done = dpcfl("run", run / "config.yaml", "runtime.federation=in-process", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    one, other = (Checkpoints(folder / "checkpoints").newest()[1] for folder in (run, only_run(tmp_path)))
    assert np.array_equal(one.models.view("u4"), other.models.view("u4"))


@pytest.mark.slow
def test_aggregators_hold_no_secret_of_a_client_and_their_own_stays_on_their_host(finished):
    run, root = finished
    secrets = {path.stem: path.read_text().strip() for path in root.rglob("*.secret")}
    assert sorted(secrets) == ["aggregator_0000", "aggregator_0001", *(f"client_000{c}" for c in range(5))]
    assert {path.parents[4].name for path in root.rglob("aggregator_*.secret")} != {""}
    assert not [*(run / "keys").glob("aggregator_*/*.secret")]
    for folder in root.glob("*/*/aggregator"):
        assert not [*folder.rglob("client_*"), *folder.rglob(EXPERIMENT)]
        read_signed_protocol(folder / "protocol.json", read_operator_key(run / "operator.pub"))
    for path in [*run.rglob("*"), *root.rglob("*.log"), *root.rglob("*.jsonl")]:
        if path.is_file():
            content = path.read_bytes()
            assert not [name for name, secret in secrets.items() if secret.encode() in content], path


@pytest.mark.slow
def test_messages_of_all_clients_are_in_the_run_folder(finished):
    run, _ = finished
    results = [line for line in runlog.read(run / "messages.jsonl") if line["kind"] == "RESULT" and line["round"] == 6]
    assert sorted(line["peer"] for line in results) == [f"client {k}" for k in range(5)]
    p = job_of(run).protocol.model.parameters
    assert server_lines(run)[-1]["bytes_up"] < 2 * (2 * 8 * p + 4096)  # two aggregators, sums for two models


@pytest.mark.slow
def test_an_address_that_is_taken_is_named(finished, tmp_path):
    run, root = finished
    shutil.copytree(next(root.glob("*/a/aggregator")), tmp_path / "aggregator")
    aggregator = HostAggregator(tmp_path / "aggregator", 0)
    files = {name: (run / name).read_text() for name in PUBLIC_FILES}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        aggregator.address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        aggregator.start(StartAggregator(
            files=files, operator_key=read_operator_key(run / "operator.pub"), connect="tcp://127.0.0.1:9", round_timeout_s=1,
            join_timeout_s=1, orphan_timeout_s=1,
        ))  # fmt: skip
        assert wait(aggregator.sentinels, 60)
        (ended,) = [report for report in aggregator.ended() if isinstance(report, AggregatorEnded)]
    aggregator.close()
    parents.close()
    assert ended.code == ConfigError("").exit_code
    assert aggregator.address in ended.log
    assert "in use" in ended.log


@pytest.mark.slow
@pytest.mark.parametrize("title", ["aggregator_0000", "aggregator_0001", "coordinator", "client 3"])
def test_a_killed_process_starts_again_and_changes_no_bit(tmp_path, title):
    run = Started(tmp_path, runtime={"max_restarts": 5})
    for t in (1, 5):
        folder = run.until_round(t)
        assert peers(run.find("dpcfl coordinator"), folder) == 2
        run.find(f"dpcfl {title}").send_signal(signal.SIGKILL)
        time.sleep(2)
    run.ends()
    assert sum(title in text and "restarted" in text for text in warnings_of(folder)) >= 2
    assert_bits_of_one_process(folder, tmp_path / "again")
    assert not [check for check in verify_run(folder) if check.holds is False]
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_a_lost_host_comes_back_with_its_aggregator_and_its_ledgers(tmp_path):
    run = Started(tmp_path)
    folder = run.until_round(2)
    run.find("--node b").send_signal(signal.SIGKILL)
    run.ends()
    told = [text for text in warnings_of(folder) if "restarted" in text]
    assert sorted(re.match(r"aggregator_\d+|client \d+", text)[0] for text in told) == [
        "aggregator_0001",
        "client 3",
        "client 4",
    ]
    assert_bits_of_one_process(folder, tmp_path / "again")
    assert not [check for check in verify_run(folder) if check.holds is False]
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_the_run_continues_without_a_host_that_does_not_return(tmp_path):
    once = ["sh", "-c", f'test ! -e {tmp_path}/down || exit 7; exec "$@"', "once"]
    run = Started(tmp_path, hosts_file(tmp_path, {}, {"through": once}), runtime={"quorum": 0.5, "max_restarts": 0},
                  algorithm={"name": "global"})  # fmt: skip
    folder = run.until_round(2)
    (tmp_path / "down").touch()
    run.find("--node b").send_signal(signal.SIGKILL)
    run.ends()
    told = [text for text in warnings_of(folder) if "aggregator_0001" in text]
    assert any("lost for the rest of the run, with its clients 3 to 4" in text for text in told), told
    lines = server_lines(folder)
    assert (len(lines), lines[-1]["missing"], lines[-1]["answered"]) == (60, [3, 4], 3)
    assert_nothing_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_ends_leaves_nothing_and_the_run_can_be_resumed(tmp_path, number):
    run = Started(tmp_path)
    folder = run.until_round(3)
    run.process.send_signal(number)
    run.process.communicate(timeout=60)
    assert_nothing_left(tmp_path, seconds=15)
    done = dpcfl("launch", "--resume", folder, "--on", "ssh", "--hosts", tmp_path / "hosts.yaml", *AT, "--tree")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_bits_of_one_process(folder, tmp_path / "again")
    assert not [check for check in verify_run(folder) if check.holds is False]
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_groups_of_clients_in_one_process_have_the_same_bits(tmp_path):
    done = subprocess.run(
        command_of(tmp_path, hosts_file(tmp_path), runtime={"clients_per_worker": 2}), cwd=ROOT, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    folder = only_run(tmp_path / "out")
    assert [len(entry.clients) for entry in job_of(folder).protocol.aggregators] == [4, 1]
    assert_bits_of_one_process(folder, tmp_path / "again")
