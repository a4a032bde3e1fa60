"""The output is a full pipe that nobody reads, as with a pager. The run continues, and a signal ends it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, assert_nothing_left, write_config

from dpcfl_net.core import runlog

F_SETPIPE_SZ = 1031  # fcntl.F_SETPIPE_SZ where Python has it
ROUNDS = 120


@pytest.fixture
def unread(tmp_path):
    """Starts a run whose standard output is a pipe of one page; returns the process, its run folder and the end to read from."""
    started, ends = [], []

    def start(rounds: int):
        data = {"dataset": "digits", "clients": [1, 1], "train_per_client": 60, "test_per_client": 20}
        config = write_config(
            tmp_path,
            data=data,
            rounds=rounds,
            model={"name": "linear"},
            algorithm={"name": "global"},
            output={"transcript": "off"},
        )
        read, write = os.pipe()
        fcntl.fcntl(write, F_SETPIPE_SZ, 4096)
        words = [sys.executable, "-m", "dpcfl_net", "run", config, "--out", tmp_path / "runs", "runtime.durable=false"]
        started.append(subprocess.Popen(words, stdout=write, cwd=ROOT))
        os.close(write)
        ends.append(read)
        while not (found := [*(tmp_path / "runs").glob("*/metrics.jsonl")]):
            assert started[-1].poll() is None
            time.sleep(0.05)
        return started[-1], found[0].parent, read

    yield start
    for process in started:
        process.kill()
        process.wait()
    for end in ends:
        os.close(end)


def rounds_of(folder) -> int:
    # As commands read it: while two processes write, the last line may not be whole, or be followed by an empty one.
    return max((line["round"] for line in runlog.each(folder / "metrics.jsonl")), default=0)


def state_of(folder) -> str:
    return json.loads((folder / "run.json").read_text())["state"]


@pytest.mark.timeout(120)
def test_a_run_ends_without_a_reader_and_shows_all_to_a_late_one(unread):
    run, folder, read = unread(ROUNDS)
    while not (folder / "report.html").exists():
        time.sleep(0.1)
    assert state_of(folder) == "finished"
    assert run.poll() is None  # its result waits for the reader
    shown = b""
    while part := os.read(read, 65536):
        shown += part
    assert run.wait(20) == 0
    lines = shown.decode().splitlines()
    assert sum(line.startswith("round ") for line in lines) == ROUNDS
    assert "Privacy" in shown.decode()
    assert lines[-1].startswith("models:")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rounds", [pytest.param(ROUNDS, marks=pytest.mark.slow), 100_000])
def test_a_signal_ends_a_command_whose_output_nobody_reads(unread, rounds):
    run, folder, _ = unread(rounds)
    while rounds_of(folder) < ROUNDS or (rounds == ROUNDS and not (folder / "report.html").exists()):
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    assert run.wait(30) == 130
    assert state_of(folder) == ("finished" if rounds == ROUNDS else "interrupted")
    assert_nothing_left(folder)
