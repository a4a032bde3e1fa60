"""Final figures in run.json: those of the last round, or none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from run_folder import write_lines

import dpcfl_net as dpcfl
from dpcfl_net.results.summary import run_document


def final(folder: Path, job: Any, state: str) -> dict[str, Any]:
    document = run_document(folder, job, state=state, wall_s=1.0, processes=1, replace_one=None, devices={})
    return dict(document["final"])


def test_a_finished_run_whose_last_round_was_not_measured_has_no_final_accuracy(tmp_path: Path, in_process: dpcfl.Run) -> None:
    folder, rounds = Path(shutil.copytree(in_process.path, tmp_path / "run")), in_process.rounds
    assert final(folder, in_process.job, "finished")["accuracy_mean"] == rounds[2].accuracy
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").unlink()
    write_lines(folder / "metrics.jsonl", [line for line in lines if (line["view"], line["round"]) != ("observer", 3)])
    found = final(folder, in_process.job, "finished")
    assert (found["accuracy_mean"], found["ari"], found["clusters"]) == (None, None, 2)
    assert final(folder, in_process.job, "interrupted")["accuracy_mean"] == rounds[1].accuracy


def test_the_number_of_clusters_is_that_of_the_last_round(tmp_path: Path, in_process: dpcfl.Run) -> None:
    folder = Path(shutil.copytree(in_process.path, tmp_path / "run"))
    write_lines(folder / "clusters.jsonl", [{"view": "server", "round": 3, "clusters": 7}])
    assert final(folder, in_process.job, "finished")["clusters"] == 7
