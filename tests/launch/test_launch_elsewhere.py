"""Workers behind agents: keys made where they run, the same bits as here, hosts that fail, strangers, hostile lines."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml
from cli_cases import Done, call
from conftest import DPCFL, ROOT, SMALL, assert_nothing_left, dpcfl, only_run, processes_of, write_config
from hypothesis import given
from hypothesis import strategies as st

from dpcfl_net import __version__
from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError, DpcflError, Refused, RunFailed
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.config import load
from dpcfl_net.experiment.config_schema import RuntimeSettings
from dpcfl_net.launch.cli import commands
from dpcfl_net.launch.drafts import remove_left_drafts
from dpcfl_net.launch.new_run import new_folder
from dpcfl_net.launch.placement import connection, slurm
from dpcfl_net.launch.placement.base import LOST, ClientRange
from dpcfl_net.launch.placement.connection import CommandConnection
from dpcfl_net.launch.placement.messages import (
    LONGEST,
    AgentError,
    AgentHello,
    GroupCommand,
    LedgerUpdate,
    PrepareKeys,
    SetJob,
    WorkerEnded,
    read_command,
    read_report,
)
from dpcfl_net.launch.placement.remote import Host, HostAgent
from dpcfl_net.launch.placement.shares import assign_processes
from dpcfl_net.launch.placement.ssh import read_hosts
from dpcfl_net.results.verify import verify_run
from dpcfl_net.runtime.checkpoint import Checkpoints

AT = ["--address", "127.0.0.1"]


def hosts_file(folder: Path, *entries: dict, **more) -> Path:
    """Hosts whose agents run on this machine; the commands that reach them are `env` unless an entry says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "hosts.yaml"
    hosts = [{"name": name, "through": ["env"]} | entry for name, entry in zip("ab", entries or ({}, {}), strict=False)]
    path.write_text(yaml.safe_dump({"python": sys.executable, "root": str(folder / "root"), "hosts": hosts, **more}))
    return path


def launch(config: Path, hosts: Path, out: Path, *more, **kwargs) -> subprocess.CompletedProcess:
    return dpcfl("launch", config, "--on", "ssh", "--hosts", hosts, *AT, "--out", out, *more, **kwargs)


def assert_verified_from_copies(run: Path) -> None:
    """Every check holds, but for that of the answers, which are on the hosts of the clients; it was left out without a word."""
    *checks, answers = verify_run(run, None)
    assert len(checks) > 5
    assert all(check.holds for check in checks), checks
    assert (answers.what, answers.holds) == ("messages: releases are those that the clients answered", None)
    assert answers.detail == "not checked: the ledgers here are copies, and the answers are on the hosts of the clients"


def dry_run(capsys: pytest.CaptureFixture[str], config: Path, hosts: Path, out: Path, *more: object) -> Done:
    """Run `dpcfl launch --dry-run` in this process; it starts nothing of the run."""
    return call(capsys, "launch", config, "--on", "ssh", "--hosts", hosts, *AT, "--out", out, "--dry-run", *more)


def refusal(*words: object) -> DpcflError:
    """What the command line stops with, without a process of its own for it."""
    with pytest.raises(DpcflError) as found:
        commands.app(list(map(str, words)), standalone_mode=False)
    return found.value


def started(config: Path, hosts: Path, out: Path) -> tuple[subprocess.Popen, Path]:
    """A run that has finished its first round, and its folder."""
    out.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [*DPCFL, "launch", str(config), "--on", "ssh", "--hosts", str(hosts), *AT, "--out", str(out)], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        folders = [path for path in out.iterdir() if (path / "protocol.json").exists()]
        if folders and done_rounds(folders[0]) >= 1:
            return process, folders[0]
        time.sleep(0.05)
    process.kill()
    raise AssertionError(process.communicate()[0])


def done_rounds(folder: Path) -> int:
    return max((line["round"] for line in runlog.read(folder / "metrics.jsonl") if "bytes_up" in line), default=0)


def agent_of(root: Path, node: str) -> psutil.Process:
    """The agent of a host, by its arguments."""
    (found,) = [
        process
        for process in psutil.process_iter(["cmdline"])
        if (words := process.info["cmdline"] or [])
        and "dpcfl_net.launch.placement.agent" in words
        and str(root) in words
        and node in words
    ]
    return found


def words_of(process: psutil.Process) -> list[str]:
    """Its arguments, and what is in its environment; nothing of one that has just ended."""
    try:
        return [*process.cmdline(), *process.environ().values()]
    except psutil.NoSuchProcess:
        return []


def last_state(folder: Path):
    _, state = Checkpoints(folder / "checkpoints", 2).newest()
    return state


def assert_same_bits(one: Path, other: Path) -> None:
    first, second = last_state(one), last_state(other)
    np.testing.assert_array_equal(first.models, second.models)
    assert first.assignment == second.assignment


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory) -> tuple[Path, Path]:
    """A finished run of 8 clients on two hosts, the same job as `finished_run`; (its folder, the hosts' root).

    One host is reached by `ssh`, here a program that notes its words and gives the last one to a shell, as ssh does.
    """
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "tools").mkdir()
    stub = folder / "tools" / "ssh"
    stub.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {folder}/words\neval "exec sh -c \\"\\${{$#}}\\""\n')
    stub.chmod(0o755)
    root = folder / "a 'root' of $odd name"
    over_ssh = {"through": [], "address": "me@there", "options": ["-p", "99"]}
    hosts = hosts_file(folder, over_ssh, {}, root=str(root))
    environment = os.environ | {"PATH": f"{folder / 'tools'}:{os.environ['PATH']}"}
    done = launch(write_config(folder / "c"), hosts, folder / "out", env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a (" in done.stdout
    run = only_run(folder / "out")
    assert_nothing_left(folder)
    return run, root


def test_the_same_bits_as_with_workers_here(elsewhere, finished_run):
    run, _ = elsewhere
    assert_same_bits(run, finished_run)
    one, other = (json.loads((folder / "run.json").read_text()) for folder in (run, finished_run))
    assert one["final"] == other["final"]
    assert one["privacy"] == other["privacy"]


def test_everything_agrees_from_the_operators_copies(elsewhere):
    assert_verified_from_copies(elsewhere[0])


def test_secret_keys_and_releases_stay_where_their_client_is(elsewhere):
    run, root = elsewhere
    assert {path.name for path in (run / "keys").glob("client_*/*")} == {f"client_{c:04d}.public" for c in range(8)}
    assert {path.name for path in run.glob("ledgers/client_*/*")} == {"ledger.jsonl", "counter"}
    secrets = sorted(root.glob("*/*/keys/client_*/*.secret"))
    assert [path.stem for path in sorted(secrets, key=lambda path: path.name)] == [f"client_{c:04d}" for c in range(8)]
    assert {path.parents[2].name for path in secrets} == {"a", "b"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    assert {stat.S_IMODE(path.parent.stat().st_mode) for path in secrets} == {0o700}
    words = [path.read_text().strip() for path in secrets]
    for path in [*run.rglob("*"), *root.glob("*/*/logs/*")]:
        if path.is_file():
            content = path.read_bytes()
            assert not [word for word in words if word.encode() in content], path


@pytest.mark.slow
def test_a_host_that_is_lost_comes_back_with_its_ledgers(tmp_path, finished_run):
    process, run = started(write_config(tmp_path / "c"), hosts_file(tmp_path), tmp_path / "out")
    root = tmp_path / "root"
    agent_of(root, "b").kill()
    arguments = {word for process in processes_of(root) for word in words_of(process)}
    assert any("dpcfl_net.launch.placement.agent" in argument for argument in arguments)
    secrets = [path.read_text().strip() for path in root.glob("*/*/keys/*/*.secret")]
    assert len(secrets) == 8
    assert not [word for word in secrets if any(word in argument for argument in arguments)]
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert_same_bits(run, finished_run)
    told = [line["text"] for line in runlog.read(run / "warnings.jsonl") if line.get("view") == "launcher"]
    assert len(told) == 4
    assert all("restarted" in text and "host b" in text for text in told)
    assert "host b" in output
    assert_verified_from_copies(run)
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_a_run_whose_host_does_not_send_its_last_lines_says_so_and_leaves_nothing(tmp_path):
    process, run = started(write_config(tmp_path / "c"), hosts_file(tmp_path), tmp_path / "out")
    deadline = time.monotonic() + 60
    while len([*run.glob("ledgers/*/counter")]) < 8 and time.monotonic() < deadline:  # the first copies
        time.sleep(0.02)
    agent_of(tmp_path / "root", "b").suspend()  # not its workers
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    said = "host b did not end its workers within 20 s: copies of its ledgers may lack their last lines"
    assert [line["text"] for line in runlog.read(run / "warnings.jsonl") if line.get("view") == "launcher"] == [said]
    assert said in output
    assert_nothing_left(tmp_path)
    for ledger in (tmp_path / "root").glob("*/b/ledgers/*/ledger.jsonl"):  # as the how-to says
        shutil.copy(ledger, run / "ledgers" / ledger.parent.name)
    assert_verified_from_copies(run)


@pytest.mark.slow
def test_the_run_goes_on_without_a_host_that_never_comes_back(tmp_path):
    once = ["sh", "-c", f'test ! -e {tmp_path}/down || exit 7; exec "$@"', "once"]
    runtime = {"quorum": 0.5, "max_restarts": 0}
    config = write_config(tmp_path / "c", runtime=runtime)
    process, run = started(config, hosts_file(tmp_path, {}, {"through": once}), tmp_path / "out")
    (tmp_path / "down").touch()
    agent_of(tmp_path / "root", "b").kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    document = json.loads((run / "run.json").read_text())
    assert (document["state"], document["rounds_done"]) == ("finished", 6)
    told = [line["text"] for line in runlog.read(run / "warnings.jsonl") if line.get("view") == "launcher"]
    assert len([text for text in told if "lost for the rest of the run" in text]) == 4
    last = [line for line in runlog.read(run / "metrics.jsonl") if "bytes_up" in line][-1]
    assert len(last["missing"]) == 4
    assert document["wall_s"] < 300  # not one round waits its ten minutes for who cannot come
    assert_nothing_left(tmp_path)


@pytest.mark.slow  # a lost host that comes back: above
def test_an_interrupted_run_goes_on_where_its_ledgers_are_and_nowhere_else(tmp_path, finished_run):
    hosts = hosts_file(tmp_path)
    process, run = started(write_config(tmp_path / "c", runtime={"clients_per_worker": 3}), hosts, tmp_path / "out")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert_nothing_left(tmp_path)
    again = ["launch", "--resume", run, "--on", "ssh", "--hosts", hosts, *AT]

    there = next((tmp_path / "root").glob("*/b"))
    there.rename(there.with_name("elsewhere"))
    refused = refusal(*again)
    assert refused.exit_code == 4
    assert "cannot restart without its ledger" in str(refused)
    there.with_name("elsewhere").rename(there)

    assert "are on other hosts" in str(refusal("run", "--resume", run))
    done = dpcfl(*again)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((run / "placement.json").read_text())["placed"] == ["a", "b", "a"]
    assert_same_bits(run, finished_run)  # three clients to a process, too
    assert_nothing_left(tmp_path)


@pytest.mark.slow
def test_a_ledger_that_is_gone_from_its_host_is_refused(tmp_path):
    """The operator's copy tells that it had charges; a new ledger would allow them again. No worker starts there."""
    hosts, aside = hosts_file(tmp_path), tmp_path / "aside"
    process, run = started(write_config(tmp_path / "c", rounds=40), hosts, tmp_path / "out")
    ledger = next((tmp_path / "root").glob("*/b/ledgers/*"))
    copy = run / "ledgers" / ledger.name / "ledger.jsonl"
    while not copy.exists() and process.poll() is None:  # copies are made once a second
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    copied = copy.read_bytes()
    again = ["launch", "--resume", run, "--on", "ssh", "--hosts", hosts, *AT]

    ledger.rename(aside)
    refused = dpcfl(*again)
    assert refused.returncode == 3, refused.stdout + refused.stderr
    assert "ledger-rolled-back: the ledger of client" in refused.stderr
    assert copy.read_bytes() == copied
    assert not ledger.exists()
    assert_nothing_left(tmp_path)

    aside.rename(ledger)
    done = dpcfl(*again)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_verified_from_copies(run)
    assert_nothing_left(tmp_path)


def test_a_launcher_that_is_killed_leaves_no_worker_behind(tmp_path):
    process, _ = started(write_config(tmp_path / "c"), hosts_file(tmp_path), tmp_path / "out")
    process.kill()
    process.communicate()
    assert_nothing_left(tmp_path, seconds=15)


KILLED_IN_PREPARATION = """
import os, signal, sys
from dpcfl_net.launch import cli, new_run

def prepare(folder, config, placement, on_step, then=new_run.prepare):
    then(folder, config, placement, lambda step: os.kill(os.getpid(), signal.SIGKILL) if "noise" in step else None)

new_run.prepare = prepare
cli.main(sys.argv[1:])
"""


def test_the_keys_of_a_launch_that_was_killed_in_its_preparation_stay_until_the_next_run_only(tmp_path):
    config, out = write_config(tmp_path / "c"), tmp_path / "out"
    words = ["launch", config, "--on", "ssh", "--hosts", hosts_file(tmp_path), *AT, "--out", out]
    killed = subprocess.run([sys.executable, "-c", KILLED_IN_PREPARATION, *map(str, words)], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert_nothing_left(tmp_path, seconds=15)
    (left,) = out.iterdir()
    assert RunFolder(left).keys.is_dir()
    new = new_folder(load(config), out)
    assert [*out.iterdir()] == [new]


def test_a_dry_run_says_who_runs_where_and_leaves_nothing(tmp_path, capsys):
    hosts = hosts_file(tmp_path, {"workers": 3}, {"workers": 1})
    done = dry_run(capsys, write_config(tmp_path / "c"), hosts, tmp_path / "out")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "coordinator and observer: this machine"
    assert [line.partition(";")[2].strip() for line in lines[1:]] == ["clients 0, 1, 2, 4, 5, 6", "clients 3, 7"]
    assert not (tmp_path / "root").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("device", "answer"), [("cpu", "exec sleep 60"), ("auto", "echo 'GPU-1, 1000, 900, Fake'")])
def test_a_host_is_asked_for_its_gpus_only_if_a_worker_may_use_one(device, answer, tmp_path, capsys):
    """A driver that hangs ended runs on the CPU, too."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f"#!/bin/sh\n{answer}\n")
    smi.chmod(0o755)
    hosts = hosts_file(tmp_path, {"through": ["env", f"PATH={smi.parent}:{os.environ['PATH']}"]})
    done = dry_run(capsys, write_config(tmp_path / "c"), hosts, tmp_path / "out", f"runtime.device={device}")
    assert done.code == 0, done.err
    assert ("GPUs Fake GPU-1" in done.out) == (device == "auto")


def test_gpus_of_a_host_without_a_setting_that_uses_them_are_refused_before_a_host_is_reached(tmp_path, capsys):
    """They were refused once all hosts were connected."""
    hosts = hosts_file(tmp_path, {"gpus": ["GPU-1"], "through": ["touch", str(tmp_path / "reached")]})
    done = dry_run(capsys, write_config(tmp_path / "c"), hosts, tmp_path / "out", "runtime.device=cpu")
    assert (done.code, done.err) == (
        2, "error: gpus of host a is ['GPU-1']: runtime.device must be cuda or auto with it, got 'cpu'\n",
    )  # fmt: skip
    assert not (tmp_path / "reached").exists()


def test_ssh_is_called_with_the_agents_words_quoted_for_the_other_shell(elsewhere):
    words = (elsewhere[0].parents[1] / "words").read_text().splitlines()
    assert words[words.index("-p") : words.index("-p") + 3] == ["-p", "99", "me@there"]
    assert "BatchMode=yes" in words
    assert len(list(elsewhere[1].glob("*/a/keys/*/*.secret"))) == 4


# what is refused


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"through": ["no-such-command"]}, "host a: cannot run no-such-command: no such file or folder"),
        ({"through": ["sh", "-c", "echo no such luck >&2; exit 9"]}, "host a: exit code 9: no such luck"),
        ({"through": ["/no/such/program"]}, "host a:"),
        ({"through": ["sh", "-c", "echo good morning"]}, "host a: agent-line: 'good morning' is no message: only the agent"),
        ({"through": ["sh", "-c", """echo '{"say":"hello","version":"0.0.0","host":"h","cores":1,"memory":1,"gpus":[]}'; cat"""]},
         "host a: version: dpcfl_net 0.0.0 is installed there"),
        ({"through": ["sh", "-c", """echo '{"say":"hello","version":"9.0.0","more":[]}'; cat"""]},
         "host a: version: dpcfl_net 9.0.0 is installed there"),
        ({"python": "/no/such/python"}, "/no/such/python"),
    ],
)  # fmt: skip
def test_a_host_that_does_not_answer_well_is_named(tmp_path, entry, said):
    config, hosts = write_config(tmp_path / "c"), hosts_file(tmp_path, entry)
    refused = refusal("launch", config, "--on", "ssh", "--hosts", hosts, *AT, "--out", tmp_path / "out")
    assert refused.exit_code == 4
    assert said in str(refused)
    assert_nothing_left(tmp_path)


def test_the_next_run_removes_the_folder_of_a_launch_that_could_not_connect(tmp_path):
    config, hosts, out = write_config(tmp_path / "c"), hosts_file(tmp_path, {"through": ["false"]}), tmp_path / "out"
    refusal("launch", config, "--on", "ssh", "--hosts", hosts, *AT, "--out", out)
    (left,) = out.iterdir()
    assert (left / "logs").is_dir()  # until then they tell why
    remove_left_drafts(out)
    assert not list(out.iterdir())


LYING = """
import json, subprocess, sys
lie = json.loads(sys.argv[1])
agent = subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE)
for line in agent.stdout:
    report = json.loads(line)
    if report["say"] == "keys":
        keys = report["keys"]
        for client in lie["drop"]:
            del keys[client]
        keys |= {client: next(iter(keys.values())) for client in lie["add"]}
    print(json.dumps(report), flush=True)
"""


@pytest.mark.parametrize("lie", [{"add": ["0"], "drop": []}, {"add": ["99"], "drop": []}, {"add": [], "drop": ["7"]}])
def test_a_host_that_reports_keys_of_clients_of_other_hosts_is_refused(tmp_path, lie):
    """The last host's answer replaced the key of client 0, which runs on the first host, in the job that the operator signs."""
    (tmp_path / "lying.py").write_text(LYING)
    through = [sys.executable, str(tmp_path / "lying.py"), json.dumps(lie)]
    config, hosts = write_config(tmp_path / "c"), hosts_file(tmp_path, {}, {"through": through})
    refused = refusal("launch", config, "--on", "ssh", "--hosts", hosts, *AT, "--out", tmp_path / "out")
    assert "host b: keys: the host reported keys of other owners" in str(refused)
    assert not [*tmp_path.glob("out/*/protocol.json")]
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("hosts: []", "hosts"),
        ("hosts: [{name: a}]", "give either address (for ssh) or through"),
        ("hosts: [{name: a, address: x, through: [y]}]", "give either address (for ssh) or through"),
        ("hosts: [{name: a, address: '-oProxyCommand=x'}]", "must not begin with a dash"),
        (
            "hosts: [{name: a, through: [x], options: [-v]}]",
            "hosts.0: options are for ssh; append the options of another command",
        ),
        ("hosts: [{name: a, adress: x}]", "unknown key 'hosts.0.adress', did you mean 'address'?"),
        ("[]", "hosts.yaml must hold a mapping with the key hosts"),
        ("hosts: [{name: ../a, address: x}]", "hosts.0.name"),
        ("hosts: [{name: a, address: x}, {name: a, address: y}]", "hosts.yaml: two hosts have the name 'a'"),
        ("hosts: [{name: a, address: x, cores: 3}]", "hosts.0.cores"),
        ("hosts: [{name: a, address: x, workers: 0}]", "hosts.0.workers"),
        ("hosts: [{name: a, address: x, gpus: [cuda:0]}]", "hosts.0.gpus"),
        ("hosts: [{name: a, address: ''}]", "hosts.0.address is '': must have at least 1 character"),
        ("hosts: [{name: a, address: x, data_root: ''}]", "hosts.0.data_root is '': must have at least 1 character"),
        ("hosts: [{name: a, address: x}]\nroot: ''", "root is '': must have at least 1 character"),
        ("hosts: [{name: a, address: x}]\npython: ''", "python is '': must have at least 1 character"),
        ("hosts: [{name: a, address: x, python: ~/python}]", "hosts.0.python is '~/python': must be the whole path"),
        (":", "YAML"),
    ],
)
def test_a_hosts_file_that_does_not_fit_is_refused_by_field(tmp_path, hosts, said):
    path = tmp_path / "hosts.yaml"
    path.write_text(hosts)
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_hosts(path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--on", "moon"], "--on is 'moon'"),
        (["--on", "ssh"], "--hosts FILE"),
        (["--on", "local", "--address", "1.2.3.4"], "--address"),
        (["--on", "slurm"], "--on slurm works inside an allocation: salloc"),
        (["--on", "ssh", "--hosts", "HOSTS", "--ports", "12"], "--ports"),
        (["--on", "ssh", "--hosts", "HOSTS", "--ports", "5700,5700"], "must be two different ports, for example 5700,5701"),
        (["--on", "ssh", "--hosts", "HOSTS", "--address", "10.0.0.1", "runtime.transport.security=none"], "loopback only"),
        (["--on", "ssh", "--hosts", "HOSTS", *AT, "runtime.federation=in-process", "output.transcript=off"], "no workers"),
        (["--on", "slurm", "--sbatch", "OUT", "--time", "$(rm)"], "--time"),
        (["--on", "slurm", "--sbatch", "OUT", "--memory", "much"], "--memory is 'much'"),
        (["--on", "slurm", "--sbatch", "OUT", "--partition", "a b"], "--partition is 'a b'"),
        (["--on", "slurm", "--sbatch", "OUT", "--slurm", "array=0-3"], "dpcfl sets array"),
        (["--on", "slurm", "--sbatch", "OUT", "--slurm", "comment=a\nb"], "must be an option of sbatch"),
        (["--on", "slurm", "--account", "me"], "--account: only with --sbatch FILE"),
        (["--on", "slurm", "--nodes", "2", "--cpus", "4", "--time", "5"], "--nodes, --cpus, --time: only with --sbatch FILE"),
        (["--on", "ray", "--gpus", "1", "--slurm", "qos=x"], "--gpus, --slurm: only with --sbatch FILE"),
        (["--on", "slurm", "--sbatch", "OUT", "--dry-run"], "give one of them"),
        (["--on", "slurm", "--requeue"], "inside a batch job"),
        (["--on", "local", "--requeue"], "--requeue is for --on slurm"),
        (["--on", "slurm", "--requeue", "--resume", "OUT"], "--requeue is for a batch job that starts a run"),
        (["--on", "local", "--ray-wait", "9"], "--ray-wait is for --on ray"),
        (["--on", "ray", "--ray-wait", "0"], "must be from 1 to 86,400 seconds"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, monkeypatch, arguments, said):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    hosts = str(hosts_file(tmp_path))
    words = [{"HOSTS": hosts, "OUT": str(tmp_path / "job.sh")}.get(word, word) for word in arguments]
    config = [] if "--resume" in arguments else [write_config(tmp_path / "c")]
    refused = refusal("launch", *config, *words, "--out", tmp_path / "out")
    assert refused.exit_code == 2
    assert said in str(refused)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 60))
def test_workers_are_dealt_in_proportion(shares, postings):
    where = assign_processes(postings, shares)
    for k, share in enumerate(shares):
        exact = postings * share / sum(shares)
        assert abs(where.count(k) - exact) < len(shares)
    assert assign_processes(6, [3, 2, 1]) == [0, 1, 0, 0, 1, 2]


def test_lines_of_another_version_are_refused():
    assert read_command(PrepareKeys(clients=[1], existing=False).line()) == PrepareKeys(clients=[1], existing=False)
    for line in (b"", b"{}", b"[]", b'{"do":"prepare-keys","clients":[-1],"existing":true}', b'{"do":"group-command","first":1,"word":"x","more":1}',
                 b'{"do":"signal","first":1,"number":"9"}', b"\xff", b'{"do":"run"}', GroupCommand(first=1, word="end").line()[:-3]):  # fmt: skip
        with pytest.raises(Refused, match="agent-line"):
            read_command(line)
    with pytest.raises(Refused, match="agent-line: 'good morning' is no command: only the launcher may write to an agent"):
        read_command(b"good morning")
    with pytest.raises(Refused, match="agent-line"):
        read_report(b'{"say":"ledger","client":1,"at":-1,"lines":"","counter":""}')


def hello_of(host: str) -> AgentHello:
    return AgentHello.model_construct(say="hello", version=__version__, host=host, cores=1, memory=1, gpus=[])


def lines_of_agent(*reports) -> str:
    """A shell command that answers as an agent: the first report at once, the others after a command."""
    first, *others = (f"printf '%s\\n' '{report.line().decode().strip()}'" for report in reports)
    return "; ".join([first, "read -r command", *others, "cat > /dev/null"])


@pytest.mark.timeout(60)
def test_the_end_of_a_worker_elsewhere_is_heard_though_its_log_cannot_be_written_here(tmp_path):
    """On a full disk the launcher did not hear of it, and waited for a worker that had ended; nor was any other ended then."""
    words = lines_of_agent(hello_of("a"), WorkerEnded(first=0, code=4, log="RunFailed: why it ended\n"))
    agent = HostAgent(Host("a", lambda: CommandConnection(["sh", "-c", words], tmp_path / "log")))
    agent.open()
    full = Path("/dev/full")
    agent.wait_for(agent.has_answered, 30)
    ended = agent.start(ClientRange(range(1)), full)  # first: the agent reports its end after one command
    other = agent.start(ClientRange(range(1, 2)), full)
    try:
        assert wait([ended.sentinel], 20)
        assert (ended.wait(), ended.reason.strip(), other.wait(0)) == (4, "RunFailed: why it ended", None)
        agent.hang_up()
        assert wait([other.sentinel], 20)
        assert other.wait() == LOST
    finally:
        agent.hang_up()
        agent.join(20)
        for handle in (ended, other):
            handle.close()


def test_a_host_that_reads_nothing_is_lost_and_does_not_hold_up_the_launcher(tmp_path, monkeypatch):
    """As where its agent is stopped: the launcher waited in the middle of a long command for ever, and heard no Ctrl-C."""
    monkeypatch.setattr(connection, "SEND_S", 0.5, raising=False)
    words = ["sh", "-c", f"printf '%s\\n' '{hello_of('a').line().decode().strip()}'; exec sleep 60"]
    agent = HostAgent(Host("a", lambda: CommandConnection(words, tmp_path / "log")))
    agent.open()
    agent.wait_for(agent.has_answered, 30)
    job = SetJob(files={"experiment.json": "x" * 2**20}, operator_key="", connect="", observer="", runtime=RuntimeSettings(),
                 data_root=None, firsts=[0])  # fmt: skip
    sending = threading.Thread(target=agent.send, args=(job,), daemon=True)
    sending.start()
    sending.join(10)
    assert not sending.is_alive()
    with pytest.raises(RunFailed, match=r"host a: it has read no command for 0\.5 s"):
        agent.wait_for(agent.has_keys, 30)
    agent.join(10)


@pytest.mark.timeout(120)
def test_a_host_that_sends_a_long_line_byte_by_byte_does_not_occupy_the_launcher(tmp_path):
    """With each byte the whole line was copied and searched again, and no other thread of the launcher ran meanwhile."""
    program = "import os\nos.write(1, b'x' * 2**25)\nfor _ in range(2000): os.write(1, b'y')\nos.write(1, b'\\nend\\n')"
    channel = CommandConnection([sys.executable, "-c", program], tmp_path / "log")
    try:
        started = time.thread_time()
        assert [len(line) for line in channel.reports()] == [2**25 + 2000, 3]
        assert time.thread_time() - started < 2
    finally:
        channel.close(10)


def test_the_lines_of_a_stream_do_not_depend_on_its_parts():
    for parts in ([b"a\n\nbc\nrest"], [b"a", b"\n\n", b"b", b"c\nrest"], [b"a\n", b"\nbc\n", b"rest"]):
        assert list(connection.complete_lines(parts)) == [b"a", b"", b"bc"]
    assert list(connection.complete_lines([b"a\n" + bytes(LONGEST), b"x", b"\n"])) == [b"a"]


def test_a_host_cannot_write_control_characters_to_the_operators_terminal(tmp_path, capsys):
    """Its name is printed with the clients that run there."""
    line = hello_of("\x1b]0;title\x07\x1b[2J").line().decode().strip()
    hosts = hosts_file(tmp_path, {"through": ["sh", "-c", f"printf '%s\\n' '{line}'; cat"]}, {})
    done = dry_run(capsys, write_config(tmp_path / "c"), hosts, tmp_path / "out")
    assert "\x1b" not in done.out + done.err
    assert (done.code, done.err[:45]) == (4, "error: host a: agent-line: not a message of t")


def test_no_process_executes_a_file_of_the_current_folder_instead_of_a_library(tmp_path):
    """Agents ran as `python -m`: a torch.py in a shared folder, where another user may write, was executed on each host."""
    shared = tmp_path / "shared"
    shared.mkdir()
    for name in ("numpy", "psutil", "torch", "yaml"):
        (shared / f"{name}.py").write_text(f"raise SystemExit('{name}.py was executed')\n")
    hosts, config = hosts_file(tmp_path), write_config(tmp_path / "c")
    command = [sys.executable, "-P", *DPCFL[1:], "launch", str(config), *AT]
    for words in (["--on", "ssh", "--hosts", str(hosts), "--dry-run"], ["--on", "slurm", "--sbatch", str(tmp_path / "job.sh")]):
        done = subprocess.run([*command, *words], cwd=shared, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert f"exec {sys.executable} -P -m dpcfl_net launch" in (tmp_path / "job.sh").read_text()


@pytest.mark.parametrize(
    "report",
    [
        hello_of("h" * 257),
        hello_of("\x9b2J"),
        WorkerEnded.model_construct(say="ended", first=0, code=1, log="x" * 20_000),
        AgentError.model_construct(say="error", reason="x" * 20_000, code=1),
        AgentError.model_construct(say="error", reason="its workers would count as ended in order", code=0),
        LedgerUpdate.model_construct(say="ledger", client=0, at=0, lines="", counter="nonsense"),
    ],
)
def test_reports_are_of_bounded_length_and_form(report):
    with pytest.raises(Refused, match="agent-line"):
        read_report(report.line())


# SLURM's own words


def test_slurms_counts_of_cpus():
    assert slurm.cpus_of("4(x2),2", 3) == [4, 4, 2]
    with pytest.raises(ConfigError, match="names 1 nodes, the allocation has 2"):
        slurm.cpus_of("4", 2)


def test_the_batch_script_runs_the_command_that_it_was_made_from(tmp_path, capsys):
    config = write_config(tmp_path / "a b")
    path = tmp_path / "the job.sh"
    done = call(capsys, "launch", config, "--on", "slurm", "--sbatch", path, "--nodes", 2, "--cpus", 4, "--gpus", 1, "--time", "2:00:00",
                "--address", "10.0.0.1", "--out", tmp_path / "out", "seed=3")  # fmt: skip
    assert done.code == 0, done.err
    assert done.out == f"wrote {path}; submit it with: sbatch '{path}'\n"
    script = path.read_text()
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    assert {
        "#SBATCH --nodes=2",
        "#SBATCH --cpus-per-task=4",
        "#SBATCH --gres=gpu:1",
        "#SBATCH --time=2:00:00",
        "#SBATCH --requeue",
    } <= set(script.splitlines())
    assert f"launch '{config}' seed=3 --on slurm --requeue --address 10.0.0.1 --out {tmp_path / 'out'}" in script


@pytest.mark.parametrize(("override", "mode"), [("seed=3", 0o644), (f"privacy.noise_seed={'5eed' * 16}", 0o600)])
def test_a_batch_script_with_the_secret_of_the_noise_is_for_its_owner_only(tmp_path, override, mode):
    script = tmp_path / "job.sh"
    script.touch()
    script.chmod(0o644)
    config = write_config(tmp_path / "c")
    commands.app(["launch", str(config), override, "--on", "slurm", "--sbatch", str(script)], standalone_mode=False)
    assert stat.S_IMODE(script.stat().st_mode) == mode
    assert override in script.read_text()


assert SMALL["privacy"]["noise"] == "seeded"  # what makes bits comparable between the runs above
