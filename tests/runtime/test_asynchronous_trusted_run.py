"""An asynchronous run of a trusted server whose processes are killed with signal 9, and its order in one process."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from conftest import assert_nothing_left, dpcfl, only_run, write_config
from run_results import last_models
from test_asynchronous_run import job_of, process, started, wait_for_version

from dpcfl_net.algorithms.one_model import PARTICIPATION
from dpcfl_net.core import runlog
from dpcfl_net.federation.central_dp import CENTRAL_SERVER
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.slots import slot_of
from dpcfl_net.results.verify import verify_run
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.runtime.coordinator import drive
from dpcfl_net.runtime.one_process import federation

CLIENTS, ROUNDS, BUFFER, MOST = 4, 24, 2, 20
SETTINGS = {
    "data": {"dataset": "digits", "clients": [CLIENTS], "train_per_client": 60, "test_per_client": 20},
    "local": {"batch_size": 20, "lr": 0.2, "clip": 0.5}, "rounds": ROUNDS,
    "privacy": {
        "epsilon": 8, "delta": 1e-2, "unit": "client", "trust": "trusted-server", "noise": "seeded", "noise_seed": "5eed" * 16,
    },
    "algorithm": {"name": "dp-fedavg", "asynchronous": {"buffer": BUFFER, "participations": MOST}},
}  # fmt: skip


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory) -> Path:
    """A run that lost a worker, twice its coordinator with the trusted server, then all processes, and was resumed to its end."""
    out = tmp_path_factory.mktemp("trusted")
    run, folder = started(out, SETTINGS)
    wait_for_version(folder, 1, run)
    process(run, "client 3").kill()
    for t in (3, 8):
        wait_for_version(folder, t, run)
        process(run, "coordinator").kill()
    wait_for_version(folder, 12, run)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate(timeout=20)
    assert_nothing_left(folder)
    assert max(Checkpoints(folder / "checkpoints").rounds()) < ROUNDS
    again = dpcfl("run", "--resume", folder)
    assert again.returncode == 0, again.stderr + again.stdout
    return folder


def published(folder: Path) -> dict[int, list[int]]:
    """Clients of each version, by the trusted server's ledger."""
    lines = [line for line in read_ledger(folder / "ledgers" / CENTRAL_SERVER) if line.type == "debit"]
    return {line.round: [c for c in range(CLIENTS) if slot_of(PARTICIPATION, c) in line.slots] for line in lines}


@pytest.mark.slow
def test_each_version_is_charged_once_to_the_clients_that_it_holds(killed_run):
    charged = published(killed_run)
    assert [line.type for line in read_ledger(killed_run / "ledgers" / CENTRAL_SERVER)] == ["header", *["debit"] * ROUNDS]
    assert [*charged] == list(range(1, ROUNDS + 1))
    assert {len(clients) for clients in charged.values()} == {BUFFER}
    counts = Counter(client for clients in charged.values() for client in clients)
    for client in range(CLIENTS):
        numbers = [line.round for line in read_ledger(killed_run / f"ledgers/client_{client:04d}") if line.type == "debit"]
        assert numbers == list(range(1, len(numbers) + 1))
        assert counts[client] <= len(numbers) <= counts[client] + 1 <= MOST + 1
    assert [check for check in verify_run(killed_run) if check.holds is not True] == []
    report = (killed_run / "report.html").read_text()
    assert f"at most {MOST} of each client" in report
    assert "staleness" in report
    warned = [line for line in runlog.read(killed_run / "warnings.jsonl") if "unmeasured" not in line]
    assert all("restarted" in line["text"] for line in warned)


@pytest.mark.slow
def test_the_same_order_in_one_process_gives_the_same_bits(killed_run, tmp_path):
    job, order = job_of(killed_run), published(killed_run)
    with federation(job, tmp_path / "ledgers") as fed:
        arrived = fed.next_outcome
        fed.next_outcome = lambda among=None: arrived(order[fed.round])
        state = drive(job.algorithm, fed, Checkpoints(tmp_path / "checkpoints"), lambda t, state: None)
    assert published(tmp_path) == order
    assert state.models.tobytes() == last_models(killed_run)


@pytest.mark.slow
def test_clients_that_are_started_when_they_are_asked(tmp_path):
    settings = {**SETTINGS, "runtime": {"max_live_workers": 2}}
    done = dpcfl("run", write_config(tmp_path / "c", **settings), "--out", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    folder = only_run(tmp_path / "runs")
    assert [*published(folder)] == list(range(1, ROUNDS + 1))
    assert [check for check in verify_run(folder) if check.holds is not True] == []
    served = [line for line in runlog.read(folder / "metrics.jsonl") if "live" in line]
    assert max(line["live"] for line in served) <= 2
    assert sum(line["started"] for line in served) > CLIENTS
