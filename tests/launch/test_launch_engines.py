"""`dpcfl launch` through real engines on this machine: sshd, SLURM, Ray, and two network namespaces with a cable between them.

Wherever the workers run, the same seeded job gives the bits that it gives without any engine (`finished_run`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import engines
import pytest
import yaml
from conftest import DPCFL, ROOT, SMALL, assert_nothing_left, dpcfl, only_run, write_config
from run_results import assert_bits_of_one_process, last_models

from dpcfl_net.core import runlog
from dpcfl_net.transport.transcript import messages, read

pytestmark = pytest.mark.timeout(600)
LOOPBACK = ["--address", "127.0.0.1"]
CLIENTS = range(8)
ROUND_S, RUN_S = 120, 240

needs_sshd = pytest.mark.skipif(bool(engines.missing("sshd", "ssh", "ssh-keygen")), reason="no sshd")
needs_slurm = pytest.mark.skipif(
    not engines.ROOT_USER or bool(engines.missing("slurmctld", "slurmd", "munged", "salloc", "sbatch", "srun")),
    reason="SLURM and munge, and root to run them",
)


def netns_works() -> bool:
    if not engines.ROOT_USER or engines.missing("ip", "tcpdump"):
        return False
    name = f"dpcfl-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    return made and subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False).returncode == 0


needs_netns = pytest.mark.skipif(not netns_works(), reason="root, ip netns and tcpdump")


@pytest.fixture
def config(tmp_path) -> Path:
    """The configuration of `finished_run`, for a run below tmp_path, after which no process of it is left anywhere."""
    yield write_config(tmp_path / "config")
    assert_nothing_left(tmp_path, 20)
    engines.assert_gone(tmp_path)


def hosts_file(path: Path, root: Path, *hosts: dict) -> Path:
    path.write_text(yaml.safe_dump({"python": sys.executable, "root": str(root), "hosts": [*hosts]}))
    return path


def outcome(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def placed(folder: Path) -> Counter:
    """How many worker processes each host got."""
    return Counter(json.loads((folder / "placement.json").read_text())["placed"])


def warnings_of(folder: Path) -> list[str]:
    path = folder / "warnings.jsonl"
    return [line["text"] for line in runlog.read(path)] if path.exists() else []


def assert_same_run(folder: Path, reference: Path) -> None:
    """Finished, with the reference's figures and its models, bit for bit."""
    assert outcome(folder)["state"] == "finished"
    assert outcome(folder)["final"] == outcome(reference)["final"]
    assert last_models(folder) == last_models(reference)


def assert_keys_are_there_alone(folder: Path, root: Path) -> None:
    """Every client's secret key is in one host's folder, readable by its owner alone; the run folder has public halves."""
    here = {path.name for path in (folder / "keys").glob("*/*")}
    assert {f"client_{c:04d}.public" for c in CLIENTS} <= here, here
    assert not [name for name in here if name.startswith("client") and name.endswith(".secret")]
    there = [*root.rglob("client*.secret")]
    assert sorted(path.name for path in there) == [f"client_{c:04d}.secret" for c in CLIENTS]
    assert {path.stat().st_mode & 0o777 for path in there} == {0o600}


def wait_for_round(out: Path, t: int, run: subprocess.Popen) -> None:
    """Wait until the checkpoint of round t is there."""

    def there() -> bool:
        assert run.poll() is None, f"ended with {run.returncode} before round {t}"
        return any(out.glob(f"*/checkpoints/round_{t:05d}"))

    engines.until(there, ROUND_S, f"round {t} was not reached")


@contextmanager
def in_background(command: list[object], log: Path, environment: dict[str, str]):
    """A command that is watched while it works; interrupted, then ended, if it still runs at the end."""
    with log.open("w") as file:
        run = subprocess.Popen([*map(str, command)], cwd=ROOT, env=environment, stdout=file, stderr=file)
    try:
        yield run
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGTERM)
        try:
            run.wait(30)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()


# ssh


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    with engines.sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.mark.slow
@needs_sshd
def test_over_ssh_the_same_bits_and_keys_that_stay_on_their_hosts(sshd, config, tmp_path, finished_run):
    root = tmp_path / "there"
    hosts = hosts_file(
        tmp_path / "hosts.yaml", root,
        {"name": "one", "address": "127.0.0.1", "options": sshd.options, "workers": 5},
        {"name": "two", "address": "localhost", "options": sshd.options, "workers": 3},
    )  # fmt: skip
    done = dpcfl("launch", config, "--on", "ssh", "--hosts", hosts, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr + done.stdout
    folder = only_run(tmp_path / "out")
    assert_same_run(folder, finished_run)
    assert placed(folder) == {"one": 5, "two": 3}
    assert_keys_are_there_alone(folder, root)
    assert sorted(path.name for path in root.glob("*/*/") if path.name != "slots") == ["one", "two"]


@pytest.mark.slow
@needs_sshd
def test_over_ssh_with_an_aggregator_on_each_host_the_bits_of_one_process(sshd, tmp_path):
    root = tmp_path / "there"
    hosts = hosts_file(
        tmp_path / "hosts.yaml", root,
        {"name": "one", "address": "127.0.0.1", "options": sshd.options, "workers": 5},
        {"name": "two", "address": "localhost", "options": sshd.options, "workers": 3},
    )  # fmt: skip
    config = write_config(tmp_path / "config", output={})
    done = dpcfl("launch", config, "--on", "ssh", "--hosts", hosts, "--tree", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr + done.stdout
    folder = only_run(tmp_path / "out")
    assert placed(folder) == {"one": 5, "two": 3}
    assert_keys_are_there_alone(folder, root)
    assert_bits_of_one_process(folder, tmp_path / "again")
    assert_nothing_left(tmp_path, 20)


@pytest.mark.slow
@needs_sshd
def test_over_ssh_the_relay_delays_the_workers_connections_by_their_links(sshd, config, tmp_path, finished_run):
    slow = {"latency_ms": 400, "up_mbps": 0.5, "down_mbps": 0.5}
    hosts = hosts_file(
        tmp_path / "hosts.yaml", tmp_path / "there",
        {"name": "one", "address": "127.0.0.1", "options": sshd.options, "workers": 5},
        {"name": "two", "address": "localhost", "options": sshd.options, "workers": 3},
    )  # fmt: skip
    first = max(engines.free_ports(1)[0], 20_000)
    network = {"how": "relay", "default": "fiber", "clients": {"2": slow, "6": slow}}
    done = dpcfl(
        "launch", write_config(tmp_path / "relay", network=network), "--on", "ssh", "--hosts", hosts, "--ports",
        f"{first},{first + 1}", "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    folder = only_run(tmp_path / "out")
    assert_same_run(folder, finished_run)
    addresses = json.loads((folder / "addresses" / "relay").read_text())
    assert [int(address.rpartition(":")[2]) for address in addresses.values()] == [first + 2 + client for client in CLIENTS]
    totals = {line["client"]: line for line in runlog.read(folder / "links.jsonl")}
    rounds = [line for line in runlog.read(folder / "metrics.jsonl") if "bytes_up" in line]
    for way in ("bytes_up", "bytes_down"):
        assert min(totals[client][way] for client in CLIENTS) > 0
        counted = sum(line[way] for line in rounds)
        # The relay also sees handshakes, heartbeats and the overhead of CURVE.
        assert counted < sum(totals[client][way] for client in CLIENTS) < 1.5 * counted
    # Virtual time states what the links cost, by the same formula.
    virtual = {"how": "off", "clock": "virtual", "default": "fiber", "clients": {"2": slow, "6": slow}}
    alone = write_config(tmp_path / "v", network=virtual, runtime={"federation": "in-process"}, output={})
    stated = dpcfl("run", alone, "--out", tmp_path / "runs")
    assert stated.returncode == 0, stated.stderr
    expected = [
        line["seconds"] for line in runlog.read(only_run(tmp_path / "runs") / "metrics.jsonl") if line.get("clock") == "virtual"
    ]
    taken = [line["seconds"] for line in rounds]
    print("relay", [round(s, 2) for s in taken], "virtual", [round(s, 2) for s in expected])
    assert all(real > 0.9 * virtual for real, virtual in zip(taken, expected, strict=True))
    assert min(real / virtual for real, virtual in zip(taken, expected, strict=True)) < 1.5


@pytest.mark.slow
@needs_sshd
def test_a_host_that_ssh_does_not_reach_is_named_with_what_ssh_said(sshd, config, tmp_path):
    (nobody,) = engines.free_ports(1)
    strange = tmp_path / "known_hosts"
    strange.write_text(f"[127.0.0.1]:{sshd.port} {engines.ssh_key(tmp_path / 'other_host_key')}\n")
    for what, options in {
        "Connection refused": sshd.options_to(nobody, sshd.known),
        "Host key verification failed": sshd.options_to(sshd.port, strange),
    }.items():
        hosts = hosts_file(
            tmp_path / "hosts.yaml", tmp_path / "there",
            {"name": "good", "address": "127.0.0.1", "options": sshd.options},
            {"name": "bad", "address": "127.0.0.1", "options": options},
        )  # fmt: skip
        done = dpcfl("launch", config, "--on", "ssh", "--hosts", hosts, "--out", tmp_path / "out")
        assert done.returncode == 4, done.stderr + done.stdout
        assert "host bad" in done.stderr
        assert what in done.stderr
    assert not [*tmp_path.rglob("*.secret")]


def test_a_wire_without_curve_is_refused_between_hosts(config, tmp_path):
    hosts = hosts_file(tmp_path / "hosts.yaml", tmp_path / "there", {"name": "one", "through": ["false"]})
    done = dpcfl(
        "launch", config, "runtime.transport.security=none", "--on", "ssh", "--hosts", hosts, "--address", "10.77.0.1",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 2
    assert "runtime.transport.security" in done.stderr
    assert not (tmp_path / "out").exists()


# SLURM


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with engines.slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def on_slurm(config: Path, folder: Path) -> list[object]:
    """The arguments of `dpcfl` for a run below the folder."""
    return ["launch", config, "--on", "slurm", *LOOPBACK, "--root", folder / "there", "--out", folder / "out"]


SALLOC = ["salloc", "--nodes=2", "--ntasks-per-node=1", f"--cpus-per-task={engines.SLURM_CPUS}"]


@needs_slurm
@pytest.mark.slow
def test_in_a_slurm_allocation_the_same_bits(slurm, config, tmp_path, finished_run):
    done = subprocess.run(
        [*map(str, [*SALLOC, *DPCFL, *on_slurm(config, tmp_path)])], env=slurm, cwd=ROOT, capture_output=True, text=True,
        timeout=RUN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    folder = only_run(tmp_path / "out")
    assert_same_run(folder, finished_run)
    assert placed(folder) == {"node-0": 4, "node-1": 4}
    assert_keys_are_there_alone(folder, tmp_path / "there")


@needs_slurm
@pytest.mark.slow
def test_in_a_slurm_allocation_with_an_aggregator_on_each_node_the_bits_of_one_process(slurm, tmp_path):
    config = write_config(tmp_path / "config", output={})
    done = subprocess.run(
        [*map(str, [*SALLOC, *DPCFL, *on_slurm(config, tmp_path), "--tree"])], env=slurm, cwd=ROOT, capture_output=True, text=True,
        timeout=RUN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    folder = only_run(tmp_path / "out")
    assert json.loads((folder / "placement.json").read_text())["placed"] == ["node-0"] * 4 + ["node-1"] * 4
    assert_bits_of_one_process(folder, tmp_path / "again")
    assert_nothing_left(tmp_path, 20)


@needs_slurm
@pytest.mark.slow
def test_the_batch_script_runs_to_the_same_bits(slurm, config, tmp_path, finished_run):
    script = tmp_path / "job.sh"
    written = dpcfl(*on_slurm(config, tmp_path), "--sbatch", script, "--nodes", 2, "--cpus", engines.SLURM_CPUS)
    assert written.returncode == 0, written.stderr
    assert not (tmp_path / "out").exists()
    done = subprocess.run(
        ["sbatch", "--wait", str(script)], env=slurm, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    (log,) = tmp_path.glob("dpcfl-*.log")
    assert done.returncode == 0, done.stderr + log.read_text()
    folder = only_run(tmp_path / "out")
    assert_same_run(folder, finished_run)
    assert placed(folder) == {"node-0": 4, "node-1": 4}


@needs_slurm
@pytest.mark.slow
def test_a_cancelled_step_is_started_again_on_its_node_with_the_same_bits(slurm, config, tmp_path, finished_run):
    log = tmp_path / "launch.log"
    with in_background([*SALLOC, *DPCFL, *on_slurm(config, tmp_path)], log, slurm) as run:
        wait_for_round(tmp_path / "out", 1, run)
        steps = dict(
            reversed(line.split()) for line in engines.said("squeue", "--steps", "-h", "-o", "%i %N", env=slurm).splitlines()
        )
        assert set(steps) == {"n1", "n2"}
        engines.said("scancel", steps["n2"], env=slurm)
        assert run.wait(RUN_S) == 0, log.read_text()
    folder = only_run(tmp_path / "out")
    assert_same_run(folder, finished_run)
    again = [text for text in warnings_of(folder) if "restarted" in text]
    assert len(again) == 4
    assert all("host node-1" in text for text in again), again
    assert_keys_are_there_alone(folder, tmp_path / "there")


# Ray


@pytest.fixture
def cluster():
    pytest.importorskip("ray")
    with engines.ray_cluster(nodes=3, cpus=3) as made:
        yield made


def on_ray(config: Path, folder: Path, *overrides: str) -> list[object]:
    """The arguments of `dpcfl` for a run below the folder."""
    return ["launch", config, *overrides, "--on", "ray", *LOOPBACK, "--root", folder / "there", "--out", folder / "out"]


def by_node(output: str) -> dict[str, set[int]]:
    """The clients of each of Ray's nodes, from what launch prints."""
    found: dict[str, set[int]] = {}
    for node, clients in re.findall(r"^bundle-\d+ \(\S+ (\w+)\): .*; clients ([\d, ]+)$", output, re.MULTILINE):
        assert node not in found, "two bundles on one node"
        found[node] = {int(client) for client in clients.split(", ")}
    return found


@pytest.mark.slow
def test_on_a_ray_cluster_the_same_bits(cluster, config, tmp_path, finished_run):
    done = dpcfl(*on_ray(config, tmp_path), timeout=RUN_S, env=cluster.environment)
    assert done.returncode == 0, done.stderr + done.stdout
    folder = only_run(tmp_path / "out")
    assert_same_run(folder, finished_run)
    assert_keys_are_there_alone(folder, tmp_path / "there")
    assert sorted(map(len, by_node(done.stdout).values())) == [2, 3, 3]


@pytest.mark.slow
def test_when_a_node_of_ray_is_lost_the_run_goes_on_without_its_clients(cluster, config, tmp_path):
    log = tmp_path / "launch.log"
    settings = ["runtime.quorum=0.5", "runtime.max_restarts=1", "rounds=8"]
    with in_background([*DPCFL, *on_ray(config, tmp_path, *settings)], log, cluster.environment) as run:
        wait_for_round(tmp_path / "out", 1, run)
        node, lost = min(by_node(log.read_text()).items(), key=lambda found: len(found[1]))
        cluster.lose(node)  # the one with two clients: the other two nodes have no room for them
        assert run.wait(RUN_S) == 0, log.read_text()
    folder = only_run(tmp_path / "out")
    assert (outcome(folder)["state"], outcome(folder)["rounds_done"]) == ("finished", 8)
    named = {
        int(client)
        for text in warnings_of(folder)
        for client in re.findall(r"^client (\d+) .*lost for the rest of the run", text)
    }
    assert named == lost
    assert len(lost) == 2
    rounds = {line["round"]: line["missing"] for line in runlog.read(folder / "metrics.jsonl") if "missing" in line}
    assert set(rounds) == set(range(1, 9))
    assert rounds[1] == []
    assert set(rounds[8]) == lost


# two hosts, and every packet between them


@pytest.fixture
def cable():
    with engines.namespaces() as made:
        yield made


SENDER = "import socket, sys; c = socket.create_connection((sys.argv[1], int(sys.argv[2]))); c.sendall(open(sys.argv[3], 'rb').read())"
RECEIVER = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    while connection.recv(65536):
        pass
"""


def send_in_clear(cable: engines.Namespaces, path: Path) -> None:
    """The file over the cable, from b to a, by a plain socket."""
    receiver = [*cable.within(cable.a), sys.executable, "-c", RECEIVER, cable.addresses[0]]
    with subprocess.Popen(receiver, stdout=subprocess.PIPE, text=True) as server:
        port = server.stdout.readline().strip()
        engines.said(*cable.within(cable.b), sys.executable, "-c", SENDER, cable.addresses[0], port, path)
        assert server.wait(30) == 0


@needs_netns
@pytest.mark.slow
def test_between_two_hosts_no_packet_holds_a_piece_of_an_update_or_a_model(cable, config, tmp_path, finished_run):
    hosts = hosts_file(tmp_path / "hosts.yaml", tmp_path / "there", {"name": "b", "through": cable.within(cable.b)})
    seen, plain = tmp_path / "seen.pcap", tmp_path / "plain.pcap"
    launch = ["launch", config, "--on", "ssh", "--hosts", hosts, "--address", cable.addresses[0], "--out", tmp_path / "out"]
    with cable.captured(seen):
        done = subprocess.run(
            [*map(str, [*cable.within(cable.a), *DPCFL, *launch])],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr + done.stdout
    folder = only_run(tmp_path / "out")
    assert_same_run(folder, finished_run)
    assert_keys_are_there_alone(folder, tmp_path / "there")

    transcript, capture = folder / "transcript.msgpack", seen.read_bytes()
    payloads = sum(len(record.payload or b"") for record in read(transcript))
    assert len(capture) >= payloads > 0
    crossed = [array for _, _, tensors in messages(transcript) for array in (tensors or {}).values() if array.dtype == "<f4"]
    assert len(crossed) >= 2 * len(CLIENTS) * SMALL["rounds"]  # models down, updates up
    found, looked_for = engines.blocks_in(capture, crossed)
    assert looked_for * engines.BLOCK > 0.5 * sum({array.tobytes(): array.nbytes for array in crossed}.values())
    assert found == 0

    update = max(crossed, key=lambda array: array.nbytes)
    (tmp_path / "update").write_bytes(update.tobytes())
    with cable.captured(plain):
        send_in_clear(cable, tmp_path / "update")
    found, looked_for = engines.blocks_in(plain.read_bytes(), [update])
    assert found > 0.9 * looked_for > 0


@needs_netns
@pytest.mark.slow
def test_between_two_hosts_only_the_aggregator_connects_to_the_coordinator(cable, tmp_path):
    config = write_config(tmp_path / "config", output={})
    hosts = hosts_file(tmp_path / "hosts.yaml", tmp_path / "there", {"name": "b", "through": cable.within(cable.b)})
    port = max(engines.free_ports(1)[0], 20_000)
    launch = ["launch", config, "--on", "ssh", "--hosts", hosts, "--address", cable.addresses[0], "--ports", f"{port},{port + 1}",
              "--tree", "--out", tmp_path / "out"]  # fmt: skip
    seen = tmp_path / "seen.pcap"
    with cable.captured(seen):
        done = subprocess.run(
            [*map(str, [*cable.within(cable.a), *DPCFL, *launch])], cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False
        )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert_bits_of_one_process(only_run(tmp_path / "out"), tmp_path / "again")
    opened = engines.said("tcpdump", "-n", "-r", seen, f"tcp[tcpflags] == tcp-syn and dst port {port}").splitlines()
    assert len(opened) == 1, opened
    assert_nothing_left(tmp_path, 20)
