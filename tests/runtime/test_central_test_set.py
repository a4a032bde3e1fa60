"""Runs with a central test set: the observer's figure against a computation by hand, where it is shown, and who never sees it."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import numpy as np
import pytest

import dpcfl_net as dpcfl
from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.data.datasets import load
from dpcfl_net.experiment import config
from dpcfl_net.experiment.cost_estimate import evaluation_interval
from dpcfl_net.experiment.job_files import client_slice
from dpcfl_net.report.export import export
from dpcfl_net.report.page import key_figures
from dpcfl_net.report.sweep import comparison_page
from dpcfl_net.results.comparison import Comparison
from dpcfl_net.results.run_view import read_run
from dpcfl_net.runtime import evaluation
from dpcfl_net.transport.observer_notes import Models

CENTRAL = 60
SETTINGS = {
    "name": "central",
    # 3 * 100 test records of the larger cluster and the central 60 are the whole test split of 360.
    "data": {
        "dataset": "digits", "clients": [1, 3], "shift": "label-flip", "train_per_client": 100, "test_per_client": 100,
        "central_test": CENTRAL,
    },
    "model": {"name": "linear"},
    "rounds": 2,
    "local": {"batch_size": 20, "lr": 0.5},
    "privacy": {"epsilon": 5, "delta": 1e-4, "noise": "seeded", "accountant": "rdp", "noise_seed": "5eed" * 16},
    "algorithm": {"name": "oracle"},
    "output": {"transcript": "off"},
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> dpcfl.Run:
    return dpcfl.run(SETTINGS, tmp_path_factory.mktemp("central"), "in-process", progress=False)


def test_the_figure_is_the_mean_over_clients_of_their_models_on_the_withheld_records(run):
    images, truth = load("digits"), run.job.experiment.true_clusters
    pieces = [client_slice(run.job, client, None)[1] for client in range(4)]
    held = np.concatenate([piece.test_rows for piece, cluster in zip(pieces, truth, strict=True) if cluster == 1])
    central = np.setdiff1d(np.arange(360), held)
    assert len(central) == CENTRAL
    assert not set(central) & set(pieces[truth.index(0)].test_rows)
    assigned, expected = run.rounds[-1].assignment, []
    for client, cluster in enumerate(truth):
        bias, weight = sorted((value.numpy() for value in run.models[assigned[client]].values()), key=lambda value: value.ndim)
        found = (images.test_x[central].reshape(CENTRAL, -1) / 255 @ weight.T + bias).argmax(1)
        expected.append(np.mean(found == (images.test_y[central] + cluster) % 10))
    assert expected.count(expected[0]) in (1, 3)  # the clusters differ, or the weights of the mean would not matter
    assert run.final["accuracy_central"] == pytest.approx(np.mean(expected))
    assert run.rounds[-1].accuracy_central == run.final["accuracy_central"] != run.rounds[0].accuracy_central


def test_the_figure_is_shown_beside_the_others(run, tmp_path):
    shown = f"{100 * run.final['accuracy_central']:.1f} %"
    assert ("Central test set", shown) in key_figures(read_run(run.path))
    comparison = Comparison.of([run.path])
    table = comparison.table
    assert table.rows[0][table.columns.index("central %")] + " %" == shown
    assert "Accuracy on the central test set" in comparison_page("runs", [], comparison)
    export(run.path, tmp_path)
    with (tmp_path / "rounds.csv").open() as file:
        assert [float(line["accuracy_central"]) for line in csv.DictReader(file)] == [
            metrics.accuracy_central for metrics in run.rounds
        ]
    lines = [line for line in runlog.read(run.path / "metrics.jsonl") if "loss_central" in line]
    assert {line["view"] for line in lines} == {"observer"}
    assert all(0 < line["loss_central"] < 10 for line in lines)
    assert "central_test" not in (run.path / "protocol.json").read_text()  # all that the server knows of the data


def test_no_test_record_is_evaluated_before_a_choice_on_validation_records(run):
    data = {**run.job.experiment.data, "validation": 0.2, "evaluate": "validation"}
    trial = replace(run.job, experiment=run.job.experiment.model_copy(update={"data": data}))
    models = Models(2, list(run.rounds[-1].assignment), np.zeros((2, run.job.protocol.model.parameters), np.float32))
    assert evaluation.TestSetEvaluator(run.job, None).evaluate(models).central is not None
    found = evaluation.TestSetEvaluator(trial, None).evaluate(models)
    assert len(found.accuracy) == 4
    assert found.central is None


def test_the_interval_of_evaluations_counts_the_central_records(run):
    longer = replace(run.job, protocol=run.job.protocol.model_copy(update={"rounds": 100}))
    # A round trains on 400 records in three passes, of which a tenth is 120; it evaluates 4 * 100 records and 2 * 60 central ones.
    assert evaluation_interval(longer, None, "auto") == math.ceil((400 + 2 * CENTRAL) / 120) > math.ceil(400 / 120)


def test_personal_models_are_refused():
    with pytest.raises(ConfigError, match=r"data\.central_test is 60: must be null with local, whose personal models stay"):
        config.resolve({**SETTINGS, "algorithm": {"name": "local"}})


@pytest.mark.slow
def test_processes_measure_the_same(run, tmp_path):
    found = dpcfl.run(SETTINGS, tmp_path, progress=False)
    assert [one.accuracy_central for one in found.rounds] == [one.accuracy_central for one in run.rounds]
    assert found.final == run.final
