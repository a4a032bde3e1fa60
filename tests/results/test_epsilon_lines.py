"""Epsilon by round and client in metrics.jsonl, where clients are not charged in every round."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from full_disk import files_do_not_grow
from test_foreign_ledgers import TRUSTED

import dpcfl_net as dpcfl
from dpcfl_net.core import runlog
from dpcfl_net.launch.cli.run import report
from dpcfl_net.privacy.accounting.accountant import epsilon
from dpcfl_net.privacy.events.base import read_event
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.results import epsilon_spent
from dpcfl_net.results.epsilon_spent import epsilon_curves, write_epsilon_lines
from dpcfl_net.results.summary import read_run_job

ROUNDS = 4
SETTINGS = {
    "name": "uneven", "rounds": ROUNDS, "model": {"name": "linear"}, "local": {"batch_size": 32, "lr": 0.5},
    "data": {"dataset": "digits", "clients": [5], "train_per_client": 60, "test_per_client": 20, "validation": 0.2},
    "privacy": {"epsilon": 5, "delta": 1e-4},
}  # fmt: skip
DRAWN = {"algorithm": {"name": "em-fdro", "clients_per_round": 1}}
LEAVES = {"algorithm": {"name": "local"}, "availability": {"clients": {0: [[1, 2]]}}}
JOINS = {"algorithm": {"name": "global"}, "availability": {"clients": {3: [[ROUNDS, None]]}}}


def spent_by(folder, client: int, t: int) -> float:
    """Epsilon of the charges in a client's ledger up to round t; 0 without any."""
    path = folder / "ledgers" / f"client_{client:04d}" / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    events = [read_event(event) for line in lines if 1 <= line.get("round", 0) <= t for event in line["events"]]
    return epsilon(events, 1e-4)


@pytest.mark.parametrize("changes", [DRAWN, LEAVES, JOINS], ids=["not drawn", "leaves", "joins last"])
def test_every_round_has_the_epsilon_of_every_client_though_some_are_not_charged_in_it(changes, tmp_path) -> None:
    run = dpcfl.run({**SETTINGS, **changes}, tmp_path, "in-process", progress=False)
    lines = [line for line in runlog.read(run.path / "metrics.jsonl") if "epsilon_spent_by_client" in line]
    found = {line["round"]: line["epsilon_spent_by_client"] for line in lines}
    assert found == {t: [spent_by(run.path, client, t) for client in range(5)] for t in range(1, ROUNDS + 1)}
    assert max(found[ROUNDS]) == json.loads((run.path / "run.json").read_text())["privacy"]["epsilon_spent"]
    run.export(tmp_path / "export")
    rounds = next(path for path in (tmp_path / "export").rglob("*.csv") if "epsilon_spent" in path.read_text().split("\n")[0])
    assert all(row["epsilon_spent"] for row in csv.DictReader(rounds.open()))


def test_clients_with_unequal_plans_have_the_epsilon_of_every_third_round_and_of_the_last(tmp_path, monkeypatch) -> None:
    """A run of 200 clients of unequal size computed for minutes at its end: 200 epsilons for each round."""
    monkeypatch.setattr(epsilon_spent, "MOST_VALUES", 8)  # of 5 plans and 4 rounds
    data = {**SETTINGS["data"], "sizes": [40, 50, 60, 70, 80], "train_per_client": None}
    run = dpcfl.run({**SETTINGS, "data": data, "algorithm": {"name": "global"}}, tmp_path, "in-process", progress=False)
    lines = [line for line in runlog.read(run.path / "metrics.jsonl") if "epsilon_spent_by_client" in line]
    found = {line["round"]: line["epsilon_spent_by_client"] for line in lines}
    assert found == {t: [spent_by(run.path, client, t) for client in range(5)] for t in (3, ROUNDS)}
    assert len({*found[ROUNDS]}) == 5
    assert max(found[ROUNDS]) == json.loads((run.path / "run.json").read_text())["privacy"]["epsilon_spent"]


def test_lines_that_a_full_disk_does_not_take_leave_no_file_open(tmp_path) -> None:
    """In a notebook each run that ended on a full disk left a descriptor."""
    run = dpcfl.run({**SETTINGS, **JOINS}, tmp_path, "in-process", progress=False)
    metrics = run.path / "metrics.jsonl"
    kept = [line for line in metrics.read_text().splitlines(keepends=True) if "epsilon_spent_by_client" not in line]
    metrics.write_text("".join(kept))
    before = psutil.Process().num_fds()
    for _ in range(3):
        with files_do_not_grow(), pytest.raises(OSError, match=r"metrics\.jsonl"):
            write_epsilon_lines(run.path, read_run_job(run.path))
    assert psutil.Process().num_fds() == before
    assert metrics.read_text() == "".join(kept)


def most_memory(compute: Callable[[], object]) -> int:
    """Bytes of the objects of a computation, at most at a time; its second run, since the first one fills caches."""
    compute()
    tracemalloc.start()
    try:
        compute()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_the_lines_of_one_ledger_at_a_time_are_in_memory(tmp_path) -> None:
    """A launcher read all ledgers at once, again and again during a run: megabytes for each client of a long run."""
    settings = {
        **SETTINGS, "rounds": 20, "algorithm": {"name": "global"}, "privacy": {**SETTINGS["privacy"], "accountant": "rdp"},
        "data": {**SETTINGS["data"], "clients": [40], "train_per_client": 20}, "local": {"batch_size": 8},
    }  # fmt: skip
    run = dpcfl.run(settings, tmp_path, "in-process", progress=False)
    job = read_run_job(run.path)
    one = most_memory(lambda: read_ledger(run.path / "ledgers" / "client_0000"))
    assert most_memory(lambda: epsilon_curves(run.path, job)) < 1.3 * one


def as_a_copy(folder: Path, client: int, charges: int, last_task: int) -> None:
    """Leave a copy of a ledger with so many charges in the folder, of a client whose last task was of a later or the same round."""
    ledger = folder / "ledgers" / f"client_{client:04d}"
    lines = (ledger / "ledger.jsonl").read_bytes().splitlines(keepends=True)[: charges + 1]
    (ledger / "ledger.jsonl").write_bytes(b"".join(lines))
    (ledger / "journal").unlink()
    (ledger / "counter").write_text(f"{charges} {hashlib.sha256(lines[-1]).hexdigest()}\n")
    tasks = [{"kind": "TASK", "direction": "down", "peer": f"client {client}", "round": t} for t in range(1, last_task + 1)]
    (folder / "messages.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))


@pytest.mark.parametrize(("last_task", "rounds"), [(2, [1, 2, 3, 4]), (3, [1, 2])])
def test_a_round_waits_for_a_copy_of_a_ledger_that_lags_behind_the_tasks(last_task, rounds, tmp_path) -> None:
    folder = dpcfl.run({**SETTINGS, **LEAVES}, tmp_path, "in-process", progress=False).path
    as_a_copy(folder, 0, charges=2, last_task=last_task)
    metrics = folder / "metrics.jsonl"
    kept = [line for line in metrics.read_text().splitlines() if "epsilon_spent_by_client" not in line]
    metrics.write_text("\n".join(kept) + "\n")
    report(folder)
    assert [line["round"] for line in runlog.read(metrics) if "epsilon_spent_by_client" in line] == rounds


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A finished run in one process, whose ledgers are all in its folder."""
    settings = {**SETTINGS, "algorithm": {"name": "global"}}
    return dpcfl.run(settings, tmp_path_factory.mktemp("finished"), "in-process", progress=False).path


def lines_of(metrics: Path) -> list[tuple[int, list[float]]]:
    """Round and epsilon by client of each line."""
    found = [line for line in runlog.read(metrics) if "epsilon_spent_by_client" in line]
    return [(line["round"], line["epsilon_spent_by_client"]) for line in found]


@pytest.mark.parametrize("kept", [0, 2, ROUNDS])
def test_each_round_that_lacks_its_line_gets_one_once(finished, tmp_path, kept) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    metrics = folder / "metrics.jsonl"
    text, wanted = metrics.read_text().splitlines(keepends=True), lines_of(metrics)
    later = [line for line in text if "epsilon_spent_by_client" in line and json.loads(line)["round"] > kept]
    metrics.write_text("".join(line for line in text if line not in later))
    assert lines_of(metrics) == wanted[:kept]
    for _ in range(2):
        write_epsilon_lines(folder, read_run_job(folder))
        assert lines_of(metrics) == wanted


def spent_after_report(folder: Path) -> float | None:
    report(folder)
    return json.loads((folder / "run.json").read_text())["privacy"]["epsilon_spent"]


def test_a_run_whose_ledgers_are_elsewhere_does_not_say_that_nothing_was_spent(finished, tmp_path) -> None:
    whole, bare, part = (Path(shutil.copytree(finished, tmp_path / name)) for name in ("whole", "bare", "part"))
    shutil.rmtree(bare / "ledgers")
    shutil.rmtree(part / "ledgers" / "client_0003")
    assert 4.9 < spent_after_report(whole) <= 5
    assert (spent_after_report(bare), spent_after_report(part)) == (None, None)
    assert re.search("of which .* is spent|all of it spent", (whole / "report.html").read_text())
    assert not re.search("of which .* is spent|all of it spent", (bare / "report.html").read_text())


@pytest.mark.parametrize(("last", "known"), [(ROUNDS - 1, True), (ROUNDS, False)])
def test_a_copy_of_a_ledger_tells_what_was_spent_if_it_holds_the_last_task(finished, tmp_path, last, known) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    as_a_copy(folder, 1, charges=ROUNDS - 1, last_task=last)
    assert (spent_after_report(folder) is not None) == known


def test_what_the_client_of_a_damaged_ledger_has_spent_is_unknown_and_said_to_be(finished, tmp_path, capsys) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    ledger, metrics = folder / "ledgers" / "client_0001" / "ledger.jsonl", folder / "metrics.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"round":3', b'"round":2', 1))
    kept = [line for line in metrics.read_text().splitlines(keepends=True) if "epsilon_spent_by_client" not in line]
    metrics.write_text("".join(kept))
    assert spent_after_report(folder) is None
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert str(ledger) in warning
    assert warning.endswith(": the epsilon spent is unknown")
    lines = [line["epsilon_spent_by_client"] for line in runlog.read(metrics) if "epsilon_spent_by_client" in line]
    assert lines == [
        [None if client == 1 else spent_by(folder, client, t) for client in range(5)] for t in range(1, ROUNDS + 1)
    ]


def test_all_clients_of_a_trusted_server_have_spent_what_its_ledger_was_charged(tmp_path) -> None:
    run = dpcfl.run(TRUSTED, tmp_path, "in-process", progress=False)
    charges = [line for line in read_ledger(run.path / "ledgers" / "curator") if line.events]
    spent = [epsilon([event for line in charges if line.round <= t for event in line.events], 1e-2) for t in (1, 2)]
    assert 0 < spent[0] < spent[1] <= 8
    lines = [line for line in runlog.read(run.path / "metrics.jsonl") if "epsilon_spent_by_client" in line]
    assert [line["epsilon_spent_by_client"] for line in lines] == [[one] * 4 for one in spent]
    assert json.loads((run.path / "run.json").read_text())["privacy"]["epsilon_spent"] == spent[1]
    assert run.events(3) == run.events(3, "zero-out") == [event for line in charges for event in line.events]
