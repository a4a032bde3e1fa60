"""F_acc and F_loss: each client's drop against a model without privacy, from what the observer wrote."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from conftest import SMALL, dpcfl

import dpcfl_net as package
from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.results.comparison import Comparison
from dpcfl_net.results.fairness import add_fairness, reference
from dpcfl_net.results.result import read_result
from dpcfl_net.results.summary import read_run_job
from dpcfl_net.transport.keys import make_keys

DATA = {
    "dataset": "digits", "clients": [1, 2], "train_per_client": 400, "test_per_client": 60, "shift": "label-flip",
    "validation": 0.02,
}  # fmt: skip


def job_of(folder, data=(), **changes):
    """A job of two true clusters of unequal size with other labels; of its records, a client sets 8 aside."""
    folder.mkdir()
    make_keys(folder, 3)
    own = {"rounds": 2, "model": {"name": "linear"}, "algorithm": {"name": "global"}, "data": {**DATA, **dict(data)}}
    privacy = {**SMALL["privacy"], "accountant": "rdp"}  # calibrates faster
    return make_job(config.resolve({**SMALL, **own, "privacy": privacy, **changes}), folder)


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


def test_the_last_round_keeps_its_accuracy(with_epsilon, tmp_path):
    """Its second line took the place of the first: pages, exports, curves and `Run.rounds` lacked the accuracy of the last round."""
    folder = tmp_path / "run"
    shutil.copytree(with_epsilon.path, folder)
    rounds, curve = package.open_run(folder).rounds, read_result(folder).curve
    assert (rounds[-1].accuracy, len(curve)) == (with_epsilon.final["accuracy_mean"], 3)
    done = dpcfl("compare", folder, "--fairness")
    assert (done.returncode, "F_acc %" in done.stdout) == (0, True), done.stderr
    assert (package.open_run(folder).rounds, read_result(folder).curve) == (rounds, curve)


def test_a_failure_between_figures_and_statement_is_made_up_for(finished_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    before = (folder / "run.json").read_bytes()
    found = add_fairness(folder)
    after = (folder / "run.json").read_bytes()
    (folder / "run.json").write_bytes(before)
    assert add_fairness(folder) == found
    assert (folder / "run.json").read_bytes() == after


def test_a_loss_that_is_not_finite_has_no_spread(finished_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    lines = list(runlog.read(folder / "metrics.jsonl"))
    last = max((line for line in lines if "loss_by_client" in line), key=lambda line: line["round"])
    last["loss_by_client"][2] = None  # JSON has no inf
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = add_fairness(folder)
    assert found["f_loss"] is None
    assert found["f_acc"] is not None


def test_a_reference_model_is_that_of_the_clients_own_cluster_tested_on_its_own_records(tmp_path):
    job = job_of(tmp_path / "a")
    best = reference(job)
    assert best[:, 0].min() > 0.8  # trained on both clusters, whose labels differ, it would be right for half of the records
    assert len(np.unique(best[:, 1])) == 3
    turned = job.experiment.model_copy(update={"slices": [*reversed(job.experiment.slices)]})
    assert (reference(type(job)(job.protocol, turned)) == best[::-1]).all()
    validated = reference(job_of(tmp_path / "b", data={"evaluate": "validation"}))
    assert (validated[:, 0] * 8 == np.rint(validated[:, 0] * 8)).all()
    assert validated[:, 1].tolist() != best[:, 1].tolist()


def test_a_reference_model_belongs_to_its_data_and_its_model(tmp_path):
    first = reference(job_of(tmp_path / "a"))
    turned = reference(job_of(tmp_path / "b", data={"shift": "rotation"}))
    assert turned[:, 0].min() > 0.8  # with the labels of another cluster it would be wrong for all records of some clients
    other = reference(job_of(tmp_path / "c", model={"name": "digits-cnn"}))
    assert (other[:, 1] != first[:, 1]).all()


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
    settings, images, slices = fairness.partition(job.experiment, None)
    changed = settings, replace(images, identity="a smaller copy of the data set"), slices
    monkeypatch.setattr(fairness, "partition", lambda *_: changed)
    with pytest.raises(TypeError):
        reference(job)


def test_a_run_without_figures_by_client_is_refused(finished_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder)
    lines = [line for line in runlog.read(folder / "metrics.jsonl") if line["view"] != "observer"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match="no accuracy and loss by client"):
        add_fairness(folder)
