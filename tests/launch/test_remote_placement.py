"""Placement on other hosts: addresses to listen on, shares of the hosts, and what each host is told."""

from __future__ import annotations

import queue
import shlex
import socket
import time

import pytest

from dpcfl_net import __version__
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.config_schema import RuntimeSettings
from dpcfl_net.launch.placement.base import Addresses
from dpcfl_net.launch.placement.messages import FILES, AgentHello, PrepareKeys, PublicKeys, SetJob, read_command
from dpcfl_net.launch.placement.placements import KeyOwners
from dpcfl_net.launch.placement.remote import Host
from dpcfl_net.launch.placement.remote_placement import ListenAddress, RemotePlacement
from dpcfl_net.launch.placement.ssh import HostsFile
from dpcfl_net.transport.identities import identity_path
from dpcfl_net.transport.keys import aggregator_key, client_key, public_path

LOOPBACK = ListenAddress("127.0.0.1")


class Connection:
    """A host of some cores that answers, reports keys, and starts nothing."""

    def __init__(self, cores: int, ahead: float = 0.0):
        self.sent, self._cores, self._ahead, self._reports = [], cores, ahead, queue.SimpleQueue()

    def send(self, data):
        self.sent.append(command := read_command(data.rstrip()))
        if isinstance(command, PrepareKeys) and not command.existing:
            self._reports.put(PublicKeys(
                keys={client: f"key {client}" for client in command.clients},
                identities={client: f"identity {client}" for client in command.clients if command.identities},
                aggregator=None if command.aggregator is None else f"key of aggregator {command.aggregator}",
            ))  # fmt: skip

    def reports(self):
        clock = time.time() + self._ahead
        yield AgentHello(version=__version__, host="far", cores=self._cores, memory=1, gpus=[], clock=clock).line().rstrip()
        while (report := self._reports.get(timeout=60)) is not None:
            yield report.line().rstrip()

    def failure(self):
        return "the connection was lost"

    def hang_up(self):
        self._reports.put(None)

    def close(self, patience_s):
        self._reports.put(None)


@pytest.fixture
def opened():
    """Opens a placement of hosts, and closes it after the test."""
    made = []

    def opens(*hosts: Host) -> RemotePlacement:
        made.append(RemotePlacement(hosts, LOOPBACK))
        made[-1].open()
        return made[-1]

    yield opens
    for placement in made:
        assert placement.close() == []


@pytest.mark.parametrize(
    ("listening", "coordinator", "observer", "reachable", "relay"),
    [
        (LOOPBACK, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "tcp://127.0.0.1:4711", None),
        (ListenAddress("10.0.0.5", "0.0.0.0", (5700, 5701)), "tcp://0.0.0.0:5700", "tcp://0.0.0.0:5701", "tcp://10.0.0.5:4711", 5702),
        (ListenAddress("fd00::5", None, (5701, 5700)), "tcp://[fd00::5]:5701", "tcp://[fd00::5]:5700", "tcp://[fd00::5]:4711", 5702),
        (ListenAddress("10.0.0.5", "::", (5700, 0)), "tcp://[::]:5700", "tcp://[::]:*", "tcp://10.0.0.5:4711", None),
    ],
)  # fmt: skip
def test_addresses_to_listen_on_and_to_connect_to(listening, coordinator, observer, reachable, relay):
    placement = RemotePlacement([], listening)
    assert (placement.bind("coordinator"), placement.bind("observer")) == (coordinator, observer)
    assert placement.reachable_address("tcp://0.0.0.0:4711") == reachable
    assert placement.first_relay_port() == relay


def test_a_host_without_workers_has_a_share_for_each_core(opened):
    placement = opened(Host("a", lambda: Connection(6)), Host("b", lambda: Connection(8), workers=2))
    assert [node.cores for node in placement.capacity()] == [6, 8]
    assert sorted(placement.assign_hosts(8, 1)) == ["a"] * 6 + ["b"] * 2
    assert placement.group_sizes(16, 2) == [12, 4]


def test_each_host_is_told_its_processes_its_gpus_and_where_its_data_sets_are(opened, tmp_path):
    for name in FILES:
        (tmp_path / name).write_text(f"of {name}")
    hosts = {"a": Connection(1), "b": Connection(1)}
    placement = opened(Host("a", lambda: hosts["a"], data_root="/there", gpus=("GPU-a",)), Host("b", lambda: hosts["b"]))
    config = configuration.load("quickstart", ["data.root=/here", "runtime.clients_per_worker=3", "runtime.gpus=[GPU-b]"])
    assert placement.assign_hosts(config.data.client_count, 3) == ["a", "b", "a"]
    placement.launcher(tmp_path, config, "key", Addresses("tcp://c:1", "tcp://o:1", {4: "tcp://r:1"}))
    jobs = {name: next(one for one in host.sent if isinstance(one, SetJob)) for name, host in hosts.items()}
    assert {name: (job.data_root, job.firsts) for name, job in jobs.items()} == {"a": ("/there", [0, 6]), "b": ("/here", [3])}
    assert {name: job.runtime.gpus for name, job in jobs.items()} == {"a": ["GPU-a"], "b": ["GPU-b"]}
    assert {(job.connect, job.observer, job.operator_key) for job in jobs.values()} == {("tcp://c:1", "tcp://o:1", "key")}
    assert all((job.files, job.relayed) == ({name: f"of {name}" for name in FILES}, {4: "tcp://r:1"}) for job in jobs.values())


@pytest.mark.parametrize(("identities", "groups"), [(False, ()), (True, ()), (False, (range(2), range(2, 3)))])
def test_the_keys_of_each_host_are_those_of_its_clients_and_its_aggregator(opened, tmp_path, identities, groups):
    hosts = {"a": Connection(1), "b": Connection(1)}
    placement = opened(Host("a", lambda: hosts["a"], gpus=("GPU-a",)), Host("b", lambda: hosts["b"]))
    placement.make_keys(tmp_path, KeyOwners(3, 1, identities, groups, RuntimeSettings(gpus=["GPU-b"])))
    clients = {"a": [0, 1], "b": [2]} if groups else {"a": [0, 2], "b": [1]}
    for number, (name, host) in enumerate(hosts.items()):
        asked = {"clients": clients[name], "identities": identities, "aggregator": number if groups else None}
        assert host.sent == [PrepareKeys(existing=False, runtime=RuntimeSettings(gpus=[f"GPU-{name}"]), **asked)]
    written = {public_path(tmp_path, client_key(client)): f"key {client}\n" for client in range(3)}
    if identities:
        written |= {identity_path(tmp_path, client_key(client)): f"identity {client}\n" for client in range(3)}
    for number in range(len(groups)):
        written[public_path(tmp_path, aggregator_key(number))] = f"key of aggregator {number}\n"
    assert {path: path.read_text() for path in tmp_path.glob("*/*")} == written
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o700}


def test_an_agent_is_reached_by_ssh_or_by_another_command_with_the_interpreter_of_its_host():
    entries = [
        {"name": "a", "address": "me@far", "options": ["-p", "99"], "python": "/opt/my py"},
        {"name": "b", "through": ["kubectl", "exec", "-i", "pod", "--"]},
    ]
    a, b = (entry.command("py", "~/r", "run-1", cpu=True) for entry in HostsFile.model_validate({"hosts": entries}).hosts)
    agent = "-P -m dpcfl_net.launch.placement.agent --root {} --run run-1 --node {} --cpu"
    assert (a[0], a[-4:]) == ("ssh", ["-p", "99", "me@far", f"exec '/opt/my py' {agent.format(shlex.quote('~/r'), 'a')}"])
    assert b == ["kubectl", "exec", "-i", "pod", "--", "py", *agent.format("~/r", "b").split()]


def test_the_gpus_of_a_host_are_in_its_hosts_file_and_need_settings_that_use_them(tmp_path):
    entries = [{"name": "a", "address": "a", "gpus": ["GPU-1", "MIG-2"]}, {"name": "b", "address": "b"}]
    a, b = HostsFile.model_validate({"hosts": entries}).make_hosts("run", tmp_path, cpu=False)
    auto, cuda, cpu = (configuration.load("quickstart", [f"runtime.device={name}"]).runtime for name in ("auto", "cuda", "cpu"))
    assert a.runtime(auto).gpus == a.runtime(cuda).gpus == ["GPU-1", "MIG-2"]
    assert (b.runtime(auto), b.runtime(cpu)) == (auto, cpu)
    with pytest.raises(
        ConfigError, match=r"gpus of host a is \['GPU-1', 'MIG-2'\]: runtime.device must be cuda or auto with it"
    ):
        a.runtime(cpu)


@pytest.mark.parametrize(
    ("listening", "said"),
    [
        (ListenAddress("192.0.2.1"), "cannot listen on tcp://192.0.2.1:*: Cannot assign requested address; --address takes"),
        (ListenAddress("[::1]"), "an address must look like tcp://host:port"),
        (ListenAddress("127.0.0.1:5700"), "cannot listen on tcp://[127.0.0.1:5700]:*: no address of this name or form"),
    ],
)
def test_an_address_of_no_use_here_is_refused_before_a_host_is_contacted(listening, said):
    """It was found once the job was signed, and the error named no option."""
    placement = RemotePlacement([Host("a", lambda: pytest.fail("contacted"))], listening)
    with pytest.raises(ConfigError) as refused:
        placement.open()
    assert str(refused.value).startswith(said)
    assert "--bind" in str(refused.value)


def test_a_port_that_is_taken_is_refused_before_a_host_is_contacted():
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        placement = RemotePlacement([Host("a", lambda: pytest.fail("contacted"))], ListenAddress("127.0.0.1", ports=(0, taken)))
        with pytest.raises(ConfigError, match=f"cannot listen on tcp://127.0.0.1:{taken}: Address already in use; .*--ports"):
            placement.open()


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        (90.0, ("is 90 s ahead of this", "traces")),
        (-4000.0, ("is 4,000 s behind this", "(unless only its first message was late)")),
        (1.0, None),
    ],
)
def test_a_clock_that_differs_is_named(ahead, said, monkeypatch):
    """The timeline of the report spanned the difference, in silence."""
    monkeypatch.setattr(time, "time", lambda: 1.8e9)  # a pause before the report is read would count as a difference
    host = Connection(2, ahead)
    placement = RemotePlacement([Host("a", lambda: host)], LOOPBACK)
    placement.open()
    warnings = placement.clock_warnings()
    placement.close()
    assert len(warnings) == (said is not None)
    assert all(warning.startswith(f"the clock of host a {said[0]}") and warning.endswith(said[1]) for warning in warnings)
