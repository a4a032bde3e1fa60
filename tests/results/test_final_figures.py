"""Final figures in run.json: those of the last round, or none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from run_folder import write_lines

import dpcfl_net as dpcfl
from dpcfl_net.experiment.job_files import Audit
from dpcfl_net.results.summary import add_not_covered, audited, read_document, run_document


def final(folder: Path, job: Any, state: str) -> dict[str, Any]:
    document = run_document(folder, job, state=state, wall_s=1.0, processes=1, replace_one=None, devices={})
    return dict(document["final"])


def test_a_finished_run_whose_last_round_was_not_measured_has_no_final_accuracy(tmp_path: Path, in_process: dpcfl.Run) -> None:
    folder, rounds = Path(shutil.copytree(in_process.path, tmp_path / "run")), in_process.rounds
    whole = final(folder, in_process.job, "finished")
    assert (whole["accuracy_mean"], whole["accuracy_by_cluster"]) == (rounds[2].accuracy, [*rounds[2].accuracy_by_cluster])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").unlink()
    write_lines(folder / "metrics.jsonl", [line for line in lines if (line["view"], line["round"]) != ("observer", 3)])
    found = final(folder, in_process.job, "finished")
    assert (found["accuracy_mean"], found["ari"], found["clusters"]) == (None, None, 2)
    assert final(folder, in_process.job, "interrupted")["accuracy_mean"] == rounds[1].accuracy


def test_totals_are_those_of_all_rounds_of_the_server(tmp_path: Path, in_process: dpcfl.Run) -> None:
    folder = Path(shutil.copytree(in_process.path, tmp_path / "run"))
    told = [
        {"round": 1, "bytes_up": 10, "bytes_down": 70, "seconds": 1.25, "clock": "virtual"},
        {"round": 3, "bytes_up": 20, "bytes_down": 90, "seconds": 2.5, "clock": "virtual"},
        {"round": 3, "bytes_up": 1, "bytes_down": 2, "seconds": 0.0625, "clock": "virtual"},  # of the resumption
        {"round": 2, "bytes_up": 5, "bytes_down": 6, "seconds": 1.0, "clock": "virtual"},
        {"round": 4, "epsilon_spent_by_client": [1.0, 1.0]},
    ]
    (folder / "metrics.jsonl").unlink()
    write_lines(folder / "metrics.jsonl", [{"view": "server", "time": 0.0, **line} for line in told])
    about: dict[str, Any] = {"state": "interrupted", "processes": 1, "replace_one": None, "devices": {}}
    found = run_document(folder, in_process.job, wall_s=1.23456, **about)
    keys = ("rounds_done", "bytes_up", "bytes_down", "wall_s", "clock", "virtual_s")
    assert [found[key] for key in keys] == [3, 36, 168, 1.235, "virtual", 4.812]
    (folder / "metrics.jsonl").unlink()
    none = run_document(folder, in_process.job, wall_s=0.0, **about)
    assert (none["rounds_done"], none["bytes_up"], "clock" in none) == (0, 0, False)


def test_the_number_of_clusters_is_that_of_the_last_round(tmp_path: Path, in_process: dpcfl.Run) -> None:
    folder = Path(shutil.copytree(in_process.path, tmp_path / "run"))
    write_lines(folder / "clusters.jsonl", [{"view": "server", "round": 3, "clusters": 7}])
    assert final(folder, in_process.job, "finished")["clusters"] == 7


def test_diagnostics_are_the_last_number_of_each_and_the_agreement_that_of_the_newest_round(
    tmp_path: Path, in_process: dpcfl.Run
) -> None:
    folder = Path(shutil.copytree(in_process.path, tmp_path / "run"))
    told = [
        {"view": "observer", "round": 3, "labels": ["a", "b"]},
        {"view": "server", "round": 2, "diagnostics": {"first": 1.5, "both": 2.5}, "clusters": 2},
        {"view": "server", "round": 3, "diagnostics": {"first": None, "both": 3.5, "by client": [1.0]}, "clusters": 2},
        {"view": "observer", "round": 3, "recovered": True, "minority_recovered": False, "ari": 0.75},
        {"view": "observer", "round": 2, "recovered": False, "minority_recovered": True, "ari": 0.5},
        {"view": "server", "round": 3, "assignment": [0, 1], "diagnostics": {"both": 4.5}},
    ]
    (folder / "clusters.jsonl").unlink()
    write_lines(folder / "clusters.jsonl", told)
    found = final(folder, in_process.job, "finished")
    assert found["diagnostics"] == {"first": 1.5, "both": 3.5}
    assert (found["clusters_recovered"], found["minority_recovered"], found["ari"]) == (True, False, 0.75)
    assert found["clusters"] == 2


def test_what_was_spent_is_not_told_while_a_run_goes_on(with_epsilon: dpcfl.Run) -> None:
    def spent(state: str) -> float | None:
        document = run_document(
            with_epsilon.path, with_epsilon.job, state=state, wall_s=1.0, processes=1, replace_one=None, devices={}
        )
        return document["privacy"]["epsilon_spent"]

    assert spent("running") is None
    assert spent("interrupted") == spent("finished") == with_epsilon.privacy.epsilon_spent


def test_a_sentence_on_what_epsilon_does_not_cover_is_added_once(tmp_path: Path, in_process: dpcfl.Run) -> None:
    folder = Path(shutil.copytree(in_process.path, tmp_path / "run"))
    before = read_document(folder)["privacy"]["not_covered"]
    for _ in range(2):
        add_not_covered(folder, "a page on it")
    assert read_document(folder)["privacy"]["not_covered"] == [*before, "a page on it"]
    (folder / "run.json").unlink()
    add_not_covered(folder, "a page on it")
    assert read_document(folder) == {}


@pytest.mark.parametrize(
    ("unit", "trust", "canaries", "clients", "said"),
    [
        ("sample", "untrusted-server", 5, [0, 1], "5 records of each of 2 clients were canaries and their other records empty, for an audit"),
        ("sample", "untrusted-server", 1, [1], "1 record of client 1 was a canary and its other records empty, for an audit"),
        (
            "sample", "secure-aggregation", 5, [0],
            "5 records of client 0 were canaries and all other records, of other clients too, empty, for an audit of the released sums of "
            "its cluster (with T to n shares of the noise, of which epsilon counts T - C)",
        ),
        ("client", "trusted-server", 2, [0, 1], "2 of 2 clients were canaries and none held data, for an audit"),
        ("client", "secure-aggregation", 1, [0], "1 of 2 clients was a canary and the others sent zeros, for an audit"),
    ],
)  # fmt: skip
def test_an_audited_run_says_how_many_records_or_clients_were_canaries(
    in_process: dpcfl.Run, unit: str, trust: str, canaries: int, clients: list[int], said: str
) -> None:
    """With several audited clients it named the canaries of one as those of all together."""
    protocol = in_process.job.protocol
    privacy = protocol.privacy.model_copy(update={"unit": unit, "trust": trust})
    audit = Audit(canaries=canaries, clients=clients, secret="0" * 64)
    assert audited(audit, protocol.model_copy(update={"privacy": privacy})) == f"{said}: the accuracy is meaningless"
