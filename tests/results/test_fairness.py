"""F_acc and F_loss: each client's drop against a model without privacy, from what the observer wrote."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from conftest import dpcfl

from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.results.comparison import Comparison
from dpcfl_net.results.fairness import add_fairness, reference
from dpcfl_net.results.result import read_result
from dpcfl_net.results.summary import read_run_job


def test_drops_are_taken_against_a_model_without_privacy_for_each_true_cluster(finished_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    best = reference(read_run_job(folder))
    assert best.shape == (8, 2)
    assert best[:, 0].min() > 0.85  # far above what privacy leaves: 0.6 to 0.8
    found = add_fairness(folder)
    last = [line for line in runlog.read(folder / "metrics.jsonl") if "accuracy_by_client" in line][-1]
    drop = best[:, 0] - last["accuracy_by_client"]
    rise = np.array(last["loss_by_client"]) - best[:, 1]
    assert (drop > 0).all()
    assert found == {"f_acc": pytest.approx(drop.max() - drop.min()), "f_loss": pytest.approx(rise.max() - rise.min())}
    lines = len(runlog.read(folder / "metrics.jsonl"))
    assert add_fairness(folder) == found
    assert len(runlog.read(folder / "metrics.jsonl")) == lines  # written once
    assert read_result(folder).final["f_acc"] == found["f_acc"]


def test_the_statement_says_that_no_epsilon_covers_figures_of_models_without_privacy(finished_run, tmp_path):
    """The models that they compare with are trained on the clients' records, and their figures are written beside the promise."""
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)

    def said():
        lines = json.loads((folder / "run.json").read_text())["privacy"]["not_covered"]
        return [line for line in lines if line.startswith("F_acc and F_loss")]

    assert said() == []
    add_fairness(folder)
    add_fairness(folder)
    (line,) = said()
    assert "without noise" in line
    (folder / "run.json").unlink()
    assert dpcfl("report", folder).returncode == 0  # writes run.json again
    assert said() == [line]
    assert "no epsilon covers them" in Comparison.of([folder]).table.caption


def test_a_reference_model_is_trained_once_and_belongs_to_its_partition(finished_run, monkeypatch):
    job = read_run_job(finished_run)
    first = reference(job)
    from dpcfl_net.results import fairness

    monkeypatch.setattr(fairness, "_train", None)  # anything but the cache would fail
    assert (reference(job) == first).all()
    moved = job.experiment.model_copy(update={"partition_seed": job.experiment.partition_seed + 1})
    with pytest.raises(TypeError):
        reference(type(job)(job.protocol, moved))


def test_a_reference_model_belongs_to_the_files_that_it_was_trained_on(finished_run, monkeypatch):
    job = read_run_job(finished_run)
    reference(job)
    from dpcfl_net.results import fairness

    monkeypatch.setattr(fairness, "_train", None)
    whole = fairness.open_set
    monkeypatch.setattr(fairness, "open_set", lambda *asked: replace(whole(*asked), identity="a smaller copy of the data set"))
    with pytest.raises(TypeError):
        reference(job)


def test_a_run_without_figures_by_client_is_refused(finished_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    lines = [line for line in runlog.read(folder / "metrics.jsonl") if line["view"] != "observer"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match="no accuracy and loss by client"):
        add_fairness(folder)
