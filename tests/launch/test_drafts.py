"""The next run removes the folder of a run that was killed in its preparation, and no other folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from api_runs import TINY
from conftest import ROOT

from dpcfl_net.core.locks import is_running, locked
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment import config
from dpcfl_net.launch.cells.run_cell import _draft
from dpcfl_net.launch.drafts import remove_left_drafts
from dpcfl_net.launch.new_run import new_folder

KILLED = """
import os, signal, sys
from pathlib import Path
from dpcfl_net.experiment import config
from dpcfl_net.launch import running
from dpcfl_net.launch.new_run import new_folder

class Killed(running.Quiet):
    def prepare(self, step):
        if step.startswith("noise multiplier"):
            os.kill(os.getpid(), signal.SIGKILL)

settings = config.load(Path(sys.argv[1]), ["runtime.federation=in-process", "output.transcript=off"])
running.run_in(new_folder(settings, Path(sys.argv[2])), settings, Killed())
"""


@pytest.fixture
def path(tmp_path) -> Path:
    found = tmp_path / "config.yaml"
    found.write_text(yaml.safe_dump(TINY))
    return found


def test_the_keys_of_a_run_that_was_killed_in_its_preparation_stay_until_the_next_run_only(path, tmp_path):
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", KILLED, path, out], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = out.iterdir()
    assert RunFolder(left).keys.is_dir()
    new = new_folder(config.load(path), out)
    assert list(out.iterdir()) == [new]


def test_folders_that_are_complete_or_may_belong_to_a_living_process_stay(path, tmp_path):
    out = tmp_path / "out"
    running, finished, unlocked, other = (RunFolder(out / name) for name in ("running", "finished", "unlocked", "other"))
    for files in (running, finished, unlocked, other):
        files.path.mkdir(parents=True)
    for files in (running, finished, unlocked):
        files.preparing.touch()
    for files in (running, finished, other):
        files.lock.touch()
    finished.run.write_text("{}")
    (out / f".notes.{'a' * 16}.draft").mkdir()  # without a lock: not ours
    before = sorted(out.iterdir())
    with locked(running.lock):
        new = new_folder(config.load(path), out)
    assert sorted(out.iterdir()) == sorted([*before, new])
    os.rmdir(new)
    new = new_folder(config.load(path), out)  # its process has ended
    assert sorted(out.iterdir()) == sorted({*before, new} - {running.path})


def test_a_run_that_began_is_not_marked_as_incomplete(in_process):
    assert RunFolder(in_process.path).lock.exists()
    assert not RunFolder(in_process.path).preparing.exists()


def test_a_draft_that_another_command_takes_for_a_left_one_is_made_again(tmp_path):
    """A command may remove a draft after its folder is made and before its lock is taken."""
    ended = threading.Event()

    def remove():
        while not ended.is_set():
            remove_left_drafts(tmp_path)

    removers = [threading.Thread(target=remove) for _ in range(2)]
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for remover in removers:
        remover.start()
    try:
        for _ in range(500):
            with _draft(tmp_path / "run") as draft:
                assert is_running(draft)
    finally:
        ended.set()
        for remover in removers:
            remover.join()
        sys.setswitchinterval(usual)
    assert not [*tmp_path.iterdir()]
