"""A configuration that asks for a GPU which this machine lacks: refused before anything is written, here; not for other hosts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from api_runs import TINY
from cli_cases import call

import dpcfl_net as dpcfl
from dpcfl_net.launch import new_run
from dpcfl_net.launch.placement import parents

SAID = "error: runtime.device is 'cuda': no such GPU here; visible: none"


@pytest.fixture(autouse=True)
def no_gpus(tmp_path, monkeypatch):
    """A machine without nvidia-smi, where a command that starts the parent of all processes fails."""
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))

    def refuse() -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(parents, "warm", refuse)


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


@pytest.mark.parametrize(
    "command",
    [
        ["run", "--dry-run"],
        ["launch", "--on", "local"],
        ["launch", "--on", "local", "--dry-run"],
        ["sweep", "seed=0:2"],
        ["tune", "--grid", "local.lr=0.1,0.2"],
    ],
)
def test_a_command_says_it_and_writes_nothing(command, config, tmp_path, capsys):
    out = ["--out", tmp_path / "out"]
    done = call(capsys, command[0], config, "runtime.device=cuda", *command[1:], *out)
    assert done.code == 2
    assert done.err.startswith(SAID)
    assert not (tmp_path / "out").exists()


def test_run_says_it_and_writes_nothing(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(parents, "warm", lambda: None)  # it loads libraries while the configuration is read
    done = call(capsys, "run", config, "runtime.device=cuda", "--out", tmp_path / "out")
    assert (done.code, done.err.startswith(SAID)) == (2, True)
    assert not (tmp_path / "out").exists()


def test_the_python_function_says_it_and_writes_nothing(config, tmp_path):
    settings = dpcfl.load(config, runtime__device="cuda:1")
    with pytest.raises(dpcfl.ConfigError, match=r"runtime\.device is 'cuda:1': no such GPU here") as refused:
        dpcfl.run(settings, tmp_path / "out", progress=False)
    assert not hasattr(refused.value, "__notes__")  # such as the advice to resume
    assert not (tmp_path / "out").exists()


def test_a_resumed_run_is_left_as_it_is(config, tmp_path):
    run = dpcfl.run(config, tmp_path / "out", "in-process", callbacks=[lambda _: False], progress=False)
    saved, document = run.path / "config.yaml", (run.path / "run.json").read_bytes()
    settings = yaml.safe_load(saved.read_text())
    settings["runtime"] |= {"federation": "network", "device": "cuda"}
    saved.write_text(yaml.safe_dump(settings))
    with pytest.raises(dpcfl.ConfigError, match="no such GPU here"):
        dpcfl.resume(run.path, progress=False)
    assert json.loads(document)["state"] == "interrupted"
    assert (run.path / "run.json").read_bytes() == document


def test_a_host_that_only_starts_workers_elsewhere_needs_none(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    hosts = tmp_path / "hosts.yaml"
    host = {"name": "a", "through": ["env"]}
    hosts.write_text(yaml.safe_dump({"python": sys.executable, "root": str(tmp_path / "root"), "hosts": [host]}))
    elsewhere = ["--on", "ssh", "--hosts", hosts, "--address", "127.0.0.1"]
    done = call(capsys, "launch", config, "runtime.device=auto", *elsewhere, "--dry-run")
    assert (done.code, done.err) == (0, "")
    assert call(capsys, "job", config, "runtime.device=cuda", "--out", tmp_path / "job").code == 0


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["run", "dry run"])
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_a_host_without_the_gpu_says_it_before_a_job_is_signed(device, dry_run, config, tmp_path, capsys, monkeypatch):
    """A dry run placed the workers on it without a word."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(new_run, "make_job", lambda *_: pytest.fail("a job was made"))
    hosts = tmp_path / "hosts.yaml"
    host = {"name": "far", "through": ["env"]}
    hosts.write_text(yaml.safe_dump({"python": sys.executable, "root": str(tmp_path / "root"), "hosts": [host]}))
    elsewhere = ["--on", "ssh", "--hosts", hosts, "--address", "127.0.0.1", "--out", tmp_path / "out"]
    done = call(capsys, "launch", config, f"runtime.device={device}", "runtime.federation=network", *elsewhere, *dry_run)
    assert done.code == 4
    assert done.err.startswith(f"error: host far: runtime.device is {device!r}: no such GPU here; visible: none")
    assert not (tmp_path / "root").exists()
