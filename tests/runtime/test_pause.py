"""A run whose quorum is lost for a while: it pauses, says so, and ends with the bits of an undisturbed run, or can be resumed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import suppress

import psutil
import pytest
from conftest import DPCFL, ROOT, SMALL, assert_nothing_left, command_line, dpcfl, only_run, write_config
from run_results import job_of, last_models
from simulate import simulate

from dpcfl_net.core import runlog
from dpcfl_net.launch.cli.progress import ProgressTail
from dpcfl_net.privacy.ledger.chain import read_ledger

ROUNDS = 8
SETTINGS = {
    "data": {"dataset": "digits", "clients": [1, 1, 1], "train_per_client": 200, "test_per_client": 40},
    "model": {"name": "linear"}, "rounds": ROUNDS, "algorithm": {"name": "global"},
    "privacy": {**SMALL["privacy"], "accountant": "rdp"},
}  # fmt: skip


def start(out, **runtime):
    config = write_config(out / "c", **SETTINGS, runtime=runtime)
    return subprocess.Popen(
        [*DPCFL, "run", str(config), "--out", str(out / "runs")], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job of a shell ignores it
    )  # fmt: skip


def until(what, process, limit_s=60):
    deadline = time.monotonic() + limit_s
    while not (found := what()):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def stop_one_worker(run, out):
    """Stop a worker (SIGSTOP) as soon as it exists; return it."""
    until(lambda: (out / "runs").is_dir() and [*(out / "runs").glob("*/messages.jsonl")], run)

    def stopped():
        for process in psutil.Process(run.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended: with few live workers others take its place
                if re.search(r"\bclient 1\b", command_line(process)):
                    process.suspend()
                    return process
        return None

    return until(stopped, run)


def pauses(folder):
    return [line for line in runlog.read(folder / "warnings.jsonl") if line.get("view") == "pause"]


@pytest.mark.slow
@pytest.mark.parametrize("live", [3, 2])
def test_a_stopped_client_pauses_the_run_and_its_return_continues_it_with_the_same_bits(tmp_path, live):
    run = start(tmp_path, round_timeout_s=2, join_timeout_s=3 if live == 3 else 20, pause_s=120, max_live_workers=live)
    try:
        worker = stop_one_worker(run, tmp_path)
        folder = only_run(tmp_path / "runs")
        until(lambda: pauses(folder), run)
        assert "paused, waiting up to 120 s" in ProgressTail(folder).view().pause
        worker.resume()
        said, _ = run.communicate(timeout=90)
    finally:
        run.poll() is None and os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 0, said
    assert "the quorum is 3: paused, waiting up to 120 s" in said
    assert "the pause ended after" in said
    began, ended = pauses(folder)
    assert (began["seconds"], ended["seconds"]) == (120, 0)
    assert [span["end"] > span["start"] for span in runlog.read(folder / "spans.jsonl") if span["what"] == "pause"] == [True]
    job = job_of(folder)
    state = simulate(job, tmp_path / "undisturbed")
    assert last_models(folder) == state.models.tobytes()
    for client in range(3):
        rounds = [e.round for e in read_ledger(folder / f"ledgers/client_{client:04d}") if e.type == "debit"]
        assert rounds == [*range(1, ROUNDS + 1)]  # one charge for each round
    assert_nothing_left(folder)


@pytest.mark.parametrize("ended", ["time", "ctrl-c"])
@pytest.mark.slow
def test_a_pause_ends_in_a_run_that_can_be_resumed(tmp_path, ended):
    run = start(tmp_path, round_timeout_s=2, join_timeout_s=2, pause_s=3 if ended == "time" else 300)
    try:
        worker = stop_one_worker(run, tmp_path)
        folder = only_run(tmp_path / "runs")
        until(lambda: pauses(folder), run)
        if ended == "ctrl-c":
            pressed = time.monotonic()
            os.kill(run.pid, signal.SIGINT)
        said, _ = run.communicate(timeout=90)
    finally:
        run.poll() is None and os.killpg(run.pid, signal.SIGKILL)
    assert not worker.is_running()
    assert f"resume with: dpcfl run --resume {folder}" in said
    if ended == "ctrl-c":
        assert run.returncode == 130
        assert time.monotonic() - pressed < 60
    else:
        assert run.returncode == 4
        assert "the quorum is 3" in said or "did not join" in said
    resumed = dpcfl("run", "--resume", folder)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    job = job_of(folder)
    state = simulate(job, tmp_path / "undisturbed")
    assert last_models(folder) == state.models.tobytes()


@pytest.mark.slow
def test_a_client_that_missed_rounds_takes_part_again_and_its_late_answers_are_set_aside(tmp_path):
    """A worker stopped for some rounds: at most the task that it had begun is late, replaced tasks are not charged."""
    run = start(tmp_path, quorum=0.6, round_timeout_s=1.5, join_timeout_s=20)
    try:
        until(lambda: [*(tmp_path / "runs").glob("*/checkpoints/round_00001")], run)
        worker = stop_one_worker(run, tmp_path)
        folder = only_run(tmp_path / "runs")

        def missed():
            return [line for line in runlog.read(folder / "metrics.jsonl") if 1 in line.get("missing", [])]

        until(lambda: len(missed()) >= 3, run)
        worker.resume()
        said, _ = run.communicate(timeout=90)
    finally:
        run.poll() is None and os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 0, said
    lines = [line for line in runlog.read(folder / "metrics.jsonl") if "bytes_up" in line]
    late = [(line["round"], client) for line in lines for client in line["late"]]
    charged = {e.round for e in read_ledger(folder / "ledgers/client_0001") if e.type == "debit"}
    away = {line["round"] for line in lines if 1 in line["missing"]}
    assert (
        len(charged & away) <= len(late) + 1
    )  # what it was charged for in vain arrived late, at most one after the last round
    assert len(away - charged) >= 1  # replaced before they began
    assert {client for _, client in late} <= {1}
    warned = [line["text"] for line in runlog.read(folder / "warnings.jsonl") if "set aside" in line["text"]]
    assert len(warned) >= len(late)
    assert dpcfl("verify", folder).returncode == 0
