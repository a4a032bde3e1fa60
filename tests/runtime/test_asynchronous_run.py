"""An asynchronous run over the network whose processes are killed: it ends, charges nothing twice, and its files can be read."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import DPCFL, ROOT, assert_nothing_left, command_line, dpcfl, only_run, write_config
from run_results import job_of

from dpcfl_net.core import runlog
from dpcfl_net.core.frozen import digest
from dpcfl_net.core.payload_hash import NOTHING
from dpcfl_net.federation.gate import request_id
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.results.split_models import given, split_models
from dpcfl_net.results.verify import verify_run
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.transport import transcript

CLIENTS, ROUNDS, MOST = 4, 24, 20
SETTINGS = {
    "data": {"dataset": "digits", "clients": [2, 2], "train_per_client": 200, "test_per_client": 40},
    "local": {"batch_size": 20, "lr": 0.3}, "rounds": ROUNDS, "privacy": {"epsilon": 5, "delta": 1e-4},
    "algorithm": {"name": "r-dpcfl", "clusters": 2, "asynchronous": {"buffer": 2, "participations": MOST}},
}  # fmt: skip
ORACLE = {"name": "oracle", "asynchronous": {"buffer": 2, "participations": MOST}}


def wait_for_version(folder: Path, t: int, run: subprocess.Popen) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and run.poll() is None:
        if max(Checkpoints(folder / "checkpoints").rounds(), default=0) >= t:
            return
        time.sleep(0.005)
    raise AssertionError(f"version {t} was not reached")


def process(run: subprocess.Popen, title: str) -> psutil.Process:
    (found,) = [child for child in psutil.Process(run.pid).children(recursive=True) if f"dpcfl {title}" in command_line(child)]
    return found


def started(out: Path, settings: dict[str, Any]) -> tuple[subprocess.Popen, Path]:
    """Start a run in its own process group and wait for a checkpoint; returns the process and the run folder."""
    run = subprocess.Popen(
        [*DPCFL, "run", str(write_config(out / "c", **settings)), "--out", str(out / "runs")],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not [*(out / "runs").glob("*/checkpoints")] and time.monotonic() < deadline:
        time.sleep(0.01)
    folder = only_run(out / "runs")
    return run, folder


@pytest.fixture(scope="module", params=["r-dpcfl", pytest.param("oracle", marks=pytest.mark.slow)])
def killed_run(request, tmp_path_factory) -> Path:
    """A run that lost a worker, its coordinator, then all processes, and was resumed to its end.

    The rounds of r-dpcfl are synchronous at first: its worker is killed in one of them, the other processes after them.
    """
    out = tmp_path_factory.mktemp("asynchronous")
    settings = {**SETTINGS, "algorithm": ORACLE} if request.param == "oracle" else SETTINGS
    first = 0 if request.param == "oracle" else 14  # most synchronous rounds
    run, folder = started(out, settings)
    wait_for_version(folder, 1, run)
    worker, coordinator = process(run, "client 3"), process(run, "coordinator")
    wait_for_version(folder, 3, run)
    worker.kill()
    wait_for_version(folder, first + 3, run)
    coordinator.kill()
    wait_for_version(folder, first + 6, run)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate(timeout=20)
    assert_nothing_left(folder)
    assert max(Checkpoints(folder / "checkpoints").rounds()) < ROUNDS
    again = dpcfl("run", "--resume", folder)
    assert again.returncode == 0, again.stderr + again.stdout
    return folder


def test_it_ends_with_every_version_and_every_participation_charged_once(killed_run):
    assert json.loads((killed_run / "run.json").read_text())["state"] == "finished"
    metrics = runlog.read(killed_run / "metrics.jsonl")
    assert {line["round"] for line in metrics if line["view"] == "server"} == set(range(1, ROUNDS + 1))
    lines = [line for line in runlog.read(killed_run / "clusters.jsonl") if line["view"] == "server"]
    counts = lines[-1]["diagnostics"]["participations"]
    for client in range(CLIENTS):
        debits = read_ledger(killed_run / "ledgers" / f"client_{client:04d}")
        numbers = [line.round for line in debits if line.type == "debit"]
        assert numbers == list(range(1, len(numbers) + 1))
        assert counts[client] - 1 <= len(numbers) <= counts[client] <= MOST  # the last task may find its client gone
    assert sum(counts) >= 2 * ROUNDS
    spent = next(line for line in reversed(metrics) if "epsilon_spent_by_client" in line)
    assert (spent["round"], max(spent["epsilon_spent_by_client"]) <= 5) == (ROUNDS, True)


def test_open_tasks_came_again_as_they_were(killed_run):
    """No answer was refused or lost, and all tasks of one participation have one request id: the charged one."""
    warned = [line for line in runlog.read(killed_run / "warnings.jsonl") if "unmeasured" not in line]
    assert all("restarted" in line["text"] for line in warned)
    job = digest(job_of(killed_run).protocol)
    charged = {
        (client, line.round): line.id
        for client in range(CLIENTS)
        for line in read_ledger(killed_run / "ledgers" / f"client_{client:04d}")
        if line.type == "debit"
    }
    sent = given(transcript.read(killed_run / "transcript.msgpack")).tasks
    ids = {}
    for client, task in sent:
        rows = [list(row) for row in task.tensors]
        request = request_id(job, client, task.round, task.task, rows, task.blake3 or NOTHING)
        ids.setdefault((client, task.round), set()).add(request)
    assert len(sent) > len(ids)  # some were sent again
    assert all(len(requests) == 1 for requests in ids.values())
    assert all(ids[key] == {request} for key, request in charged.items() if key in ids)
    assert len(ids.keys() & charged.keys()) >= 2 * ROUNDS


def test_verify_and_report_read_it(killed_run):
    assert [check for check in verify_run(killed_run) if check.holds is not True] == []
    assert "staleness" in (killed_run / "report.html").read_text()


def test_a_model_that_is_no_version_is_found(killed_run):
    protocol = job_of(killed_run).protocol
    found = given(transcript.read(killed_run / "transcript.msgpack"))
    clusters = killed_run / "clusters.jsonl"
    assert split_models(found, protocol, clusters) == []
    synchronous = max((task.round for _, task in found.tasks if task.task != "train"), default=0)
    assert (2 <= synchronous <= 14) == (protocol.algorithm == "r-dpcfl")

    def changed(number):
        client, task = next((client, task) for client, task in found.tasks if task.round == number)
        twice = [*found.tasks, (client, dataclasses.replace(task, blake3="5" * 64))]
        return f"{task.task}: client {client} was given 2 models", split_models(
            dataclasses.replace(found, tasks=twice), protocol, clusters
        )

    problem, problems = changed(synchronous + 1)
    assert f"participation {synchronous + 1} {problem}" in problems
    if synchronous:
        problem, problems = changed(2)
        assert f"round 2 {problem}" in problems
    client, task = found.tasks[-1]
    own = [(client, dataclasses.replace(task, blake3=f"{k:064x}", round=100 + k)) for k in range(ROUNDS)]
    problems = split_models(dataclasses.replace(found, tasks=[*found.tasks, *own]), protocol, clusters)
    assert any(f"different models, the run has {ROUNDS - synchronous} versions" in problem for problem in problems)


@pytest.mark.slow
def test_clients_that_are_started_when_they_are_asked(tmp_path):
    algorithm = {**SETTINGS["algorithm"], "asynchronous": {"buffer": 2, "participations": 16}}
    settings = {**SETTINGS, "rounds": 16, "algorithm": algorithm, "runtime": {"max_live_workers": 2}}
    done = dpcfl("run", write_config(tmp_path / "c", **settings), "--out", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    folder = only_run(tmp_path / "runs")
    assert runlog.read(folder / "warnings.jsonl") == []
    served = [line for line in runlog.read(folder / "metrics.jsonl") if "live" in line]
    assert max(line["live"] for line in served) <= 2
    assert sum(line["started"] for line in served) > CLIENTS
    assert [check for check in verify_run(folder) if check.holds is not True] == []
