"""`dpcfl doctor`: what it finds is what is there, and each failure comes with its fix."""

from __future__ import annotations

import errno
import resource
import shutil
import socket
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from api_runs import TINY
from conftest import dpcfl
from full_disk import files_do_not_grow

import dpcfl_net as package
from dpcfl_net.launch.cli import doctor
from dpcfl_net.training import nvidia_smi


def found(subject: str, clients: int = 8) -> doctor.Finding:
    return next(finding for finding in doctor.examine(clients) if finding.subject == subject)


def test_a_machine_that_runs_the_tests_can_run_a_federation():
    findings = list(doctor.examine(8))
    assert {"fails"} & {finding.verdict for finding in findings} == set()
    assert all(finding.fix for finding in findings if finding.verdict == "fails")
    assert {"encryption", "cores", "memory", "GPUs", "open files", "disk", "key files", "clock"} <= {
        f.subject for f in findings
    }


def test_limits_that_are_too_low_are_named_with_their_fix(monkeypatch):
    done = dpcfl("doctor", "--clients", 100, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 400)))
    assert done.returncode == 4, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("fails"))
    assert "open files: 400 allowed at most, about 528 needed for 100 workers" in line
    assert "fix: ask the administrator for a higher limit (ulimit -Hn)" in " ".join(done.stdout.split())
    monkeypatch.setattr(resource, "getrlimit", lambda _: (200, 4096))
    raised = found("open files", 100)
    assert raised.found == "200 allowed, about 528 needed for 100 workers; each process raises its limit itself"


@pytest.mark.parametrize(
    ("hard", "verdict", "words", "fix"),
    [
        (4096, "good", "up to 248 in one worker process, which may have 4096 open files; each has up to 16 open files there", ""),
        (1024, "note", "up to 56 in one worker process, which may have 1024 open files",
         "ask the administrator for a higher limit (ulimit -Hn), or set runtime.clients_per_worker to at most 56: its default for a large "
         "roster is 100 or more"),
        (100, "note", "up to 0 in one worker process", "ask the administrator for a higher limit (ulimit -Hn)"),
        (resource.RLIM_INFINITY, "good", "any number in one worker process", ""),
    ],
)  # fmt: skip
def test_the_clients_that_one_process_may_serve_are_said(hard, verdict, words, fix, monkeypatch):
    """A process with many clients met the limit in the middle of a run, although 21 processes with one client fit."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, hard))
    finding = found("clients per process")
    assert finding.verdict == verdict
    assert finding.found.startswith(words)
    assert finding.fix == fix


@pytest.mark.parametrize(("clients", "verdict"), [(8, "good"), (10**7, "fails")])
def test_memory_is_held_against_the_number_of_workers(clients, verdict):
    assert found("memory", clients).verdict == verdict


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("DPCFL_DATA", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    by_name = {finding.subject: finding for finding in doctor.examine(8)}
    assert by_name["torchvision"].verdict == "note"
    assert "mnist" in by_name["data sets"].found.partition("missing")[2]
    assert "DPCFL_DATA" in by_name["data sets"].fix
    assert by_name["other hosts"].found.startswith("found: none")
    assert by_name["GPUs"].verdict == "good"


@pytest.mark.parametrize(
    ("built", "hidden", "verdict", "fix"),
    [
        (None, False, "note", "install a CUDA build of torch"),
        ("12.8", True, "note", "unset CUDA_VISIBLE_DEVICES"),
        ("12.8", False, "fails", "runtime.device=cpu"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_found_with_its_fix(built, hidden, verdict, fix, monkeypatch, tmp_path):
    """All three were notes with the first fix; in the third, a run with `runtime.device: auto` fails."""
    (tmp_path / "nvidia-smi").write_text("""#!/bin/sh
case "$1" in
  -L) echo "GPU 0: NVIDIA H100 (UUID: GPU-aaaa)" ;;
  *) echo "GPU-aaaa, 81559, 40000, NVIDIA H100" ;;
esac
""")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", built)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = doctor.gpus()
    assert (finding.verdict, "GPU 0: NVIDIA H100" in finding.found, fix in finding.fix) == (verdict, True, True)


def test_a_driver_that_does_not_answer_is_a_failure_with_its_fix(tmp_path, monkeypatch):
    """The command ended with a traceback."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(nvidia_smi, "_PATIENCE_S", 0.2)
    finding = found("GPUs")
    assert (finding.verdict, "nvidia-smi -L gave no answer" in finding.found) == ("fails", True)
    assert "runtime.device=cpu" in finding.fix


@pytest.mark.parametrize("folder", ["/proc", "full"])
def test_a_folder_that_cannot_be_written_is_a_finding_among_the_others(folder, monkeypatch, tmp_path):
    """It ended the command with the name of a temporary file."""
    monkeypatch.chdir(tmp_path if folder == "full" else folder)
    with files_do_not_grow() if folder == "full" else nullcontext():
        by_name = {finding.subject: finding for finding in doctor.examine(8)}
    assert by_name["disk"].verdict == "fails"
    assert by_name["disk"].found.startswith(f"cannot write in {Path.cwd()}: ")
    assert by_name["disk"].fix == "start commands in another folder, or give --out DIR"
    assert by_name["key files"].verdict == ("good" if folder == "full" else "note")
    assert by_name["data sets"].found.startswith("digits")


def test_a_loopback_interface_that_is_down_is_said_before_processes_start(tmp_path, monkeypatch):
    """Processes listened, and restarted every minute, since no other could connect."""

    def unreachable(*_, **__):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    assert found("loopback").verdict == "fails"
    with pytest.raises(
        package.RunFailed, match=r"no process of this machine can connect over 127\.0\.0\.1 \(network is unreachable\): "
    ):
        package.run({**TINY, "runtime": {"federation": "network"}}, tmp_path / "out", progress=False)
    assert not list((tmp_path / "out").glob("*"))
