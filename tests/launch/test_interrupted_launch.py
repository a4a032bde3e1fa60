"""Signals while `dpcfl launch` still waits for its hosts or prepares the job, also in a batch job of SLURM."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import engines
import fake_slurm
import pytest
import yaml
from conftest import DPCFL, ROOT, assert_nothing_left, write_config

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def waiting(tmp_path):
    """A host whose agent never answers, and ends with its input; its program says that it was asked."""
    program = tmp_path / "agent"
    program.write_text(f"#!/bin/sh\ntouch '{tmp_path}/asked'\nwhile read -r line; do :; done\n")
    program.chmod(0o755)
    yield program
    assert_nothing_left(tmp_path)


def ended_by(number: int, tmp_path: Path, *words: object, **more) -> tuple[int, str]:
    """Exit code and output of a launch that gets a signal while it waits for a host."""
    command = [*DPCFL, "launch", write_config(tmp_path / "c"), "--address", "127.0.0.1", "--out", tmp_path / "out", *words]
    with subprocess.Popen(
        [*map(str, command)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **more,
    ) as launch:  # fmt: skip
        engines.until((tmp_path / "asked").exists, 60, "the host was not asked")
        launch.send_signal(number)
        output = launch.communicate(timeout=60)[0]
    return launch.returncode, output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launch_that_is_interrupted_before_its_run_leaves_nothing(tmp_path, waiting, number):
    """SIGTERM ended it at once, with its folder and the keys in it."""
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text(yaml.safe_dump({"hosts": [{"name": "a", "through": [str(waiting)]}]}))
    code, output = ended_by(number, tmp_path, "--on", "ssh", "--hosts", hosts)
    assert (code, output) == (130, "stopped before the run began; the new run folder was removed\n")
    assert not [*(tmp_path / "out").iterdir()]


def test_a_batch_job_whose_time_is_up_before_its_run_says_so(tmp_path, waiting):
    """It ended with code 143 and without a word."""
    environment = fake_slurm.install(tmp_path / "bin") | {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    }  # fmt: skip
    (tmp_path / "bin" / "srun").unlink()
    (tmp_path / "bin" / "srun").symlink_to(waiting)
    code, output = ended_by(signal.SIGUSR1, tmp_path, "--on", "slurm", "--requeue", env=os.environ | environment)
    assert code == 4
    assert output.splitlines()[-1] == "error: no round finished within the time limit of this job: raise --time"
    assert not [*(tmp_path / "out").iterdir()]
