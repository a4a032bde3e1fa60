"""`runtime.slots` as a number: the folder of a run's slots is removed with its run, also if the launcher was killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, dpcfl, only_run, processes_of, write_config

from dpcfl_net.launch.placement.slot_folder import SlotFolder
from dpcfl_net.training.compute_semaphore import ComputeSemaphore, host_folder

LAUNCHER = """
from dpcfl_net.launch.placement.slot_folder import SlotFolder
from dpcfl_net.training.compute_semaphore import ComputeSemaphore
slots = SlotFolder(1)
ComputeSemaphore(*slots.spec)
print(slots.spec[0], flush=True)
input()
"""


@pytest.fixture(autouse=True)
def own_host_folder(tmp_path, monkeypatch):
    (tmp_path / "host").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "host"))


def left() -> set[str]:
    return {found.name for found in host_folder().glob("run-*")}


def launcher() -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    return process, process.stdout.readline().strip().rpartition("/")[2]


def test_a_new_launcher_removes_the_slots_of_a_killed_one_and_of_no_other():
    (killed, gone), (alive, kept) = launcher(), launcher()
    try:
        assert left() == {gone, f"{gone}.owner", kept, f"{kept}.owner"}
        killed.kill()
        killed.wait()
        slots = SlotFolder(2)
        ComputeSemaphore(*slots.spec)
        own = slots.spec[0].name
        assert left() == {kept, f"{kept}.owner", own, f"{own}.owner"}
        slots.close()
        slots.close()
        assert left() == {kept, f"{kept}.owner"}
    finally:
        for process in (killed, alive):
            process.kill()
            process.communicate()


def test_a_run_leaves_no_slots_and_removes_those_of_a_killed_run(tmp_path):
    config = write_config(tmp_path, rounds=200, runtime={"slots": 1})
    killed = subprocess.Popen([sys.executable, "-m", "dpcfl_net", "run", config, "--out", tmp_path / "a"], cwd=ROOT)
    while len(left()) < 2:
        assert killed.poll() is None
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    for orphan in processes_of(tmp_path / "a"):
        orphan.kill()
    assert left()
    done = dpcfl("run", config, "--out", tmp_path / "b", "rounds=2")
    assert done.returncode == 0, done.stderr
    assert only_run(tmp_path / "b").exists()
    assert not left()


def test_a_run_whose_slots_cannot_be_made_ends_before_it_starts_a_process(tmp_path):
    """As after `su`, which keeps the XDG_RUNTIME_DIR of the other user: each worker failed, one restart after another."""
    (tmp_path / "dpcfl_net").write_text("")
    config = write_config(tmp_path / "c")
    done = dpcfl("run", config, "--out", tmp_path / "runs", env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)})
    assert done.returncode == 4
    assert re.fullmatch(
        r"error: the folder of compute slots .*dpcfl_net cannot be created: .*; set XDG_RUNTIME_DIR\n", done.stderr
    )
    assert not list((tmp_path / "runs").iterdir())
