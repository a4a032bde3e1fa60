"""Work of a run before it starts: messages of all tasks, and the interval of evaluations from the job and the data alone."""

from __future__ import annotations

import json
import sys

import pytest
from conftest import SMALL
from secure_runs import size
from simulate import simulate

import dpcfl_net as dpcfl
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.signing import read_operator_key
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.cost_estimate import EVALUATION_SHARE, TRAINING_PASSES, estimate, evaluation_interval
from dpcfl_net.experiment.job_files import read_job
from dpcfl_net.federation.in_process import InProcessFederation
from dpcfl_net.transport.keys import make_keys

SETTINGS = {
    "name": "interval", "data": {"dataset": "digits", "clients": [2], "shift": "none", "train_per_client": 30, "test_per_client": 60},
    "model": {"name": "linear"}, "rounds": 16, "local": {"batch_size": 30}, "privacy": {"epsilon": 5, "delta": 1e-4},
    "algorithm": {"name": "global"}, "output": {"evaluate_every": "auto", "transcript": "off"},
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return dpcfl.run(SETTINGS, tmp_path_factory.mktemp("runs"), "in-process", progress=False).path


def evaluated(folder) -> list[int]:
    lines = map(json.loads, RunFolder(folder).metrics.read_text().splitlines())
    return [line["round"] for line in lines if line["view"] == "observer"]


def test_auto_evaluates_at_the_interval_and_in_the_last_round(finished):
    # 60 test records cost 60 passes, 30 training records 90: a tenth of 7 rounds of training pays for an evaluation.
    assert evaluated(finished) == [7, 14, 16]


def test_the_interval_is_the_smallest_within_the_share(finished):
    job = read_job(finished, read_operator_key(RunFolder(finished).operator_key))
    found = evaluation_interval(job, None, "auto")
    passes = 120, TRAINING_PASSES * 60  # of both clients: evaluation and training of a round
    assert passes[0] <= EVALUATION_SHARE * found * passes[1]
    assert passes[0] > EVALUATION_SHARE * (found - 1) * passes[1]
    assert evaluation_interval(job, None, 3) == 3


TRUSTED = {"unit": "client", "trust": "trusted-server", "epsilon": 8, "delta": 0.05}
RR = {"name": "rr-cluster", "clusters": 2, "min_cluster_size": 1, "sampling_rate": 1.0, "guarantee": "expected"}


@pytest.mark.parametrize(
    ("algorithm", "privacy", "changes"),
    [
        ({"name": "r-dpcfl", "clusters": 2}, {}, {}),
        ({"name": "feddp-kmeans", "clusters": 2}, {}, {}),
        ({"name": "em-fdro", "clients_per_round": 2}, {}, {"validation": 0.2}),
        ({"name": "dp-fedper", "sampling_rate": 1.0}, TRUSTED, {}),
        ({**RR, "base": "fedcam"}, TRUSTED, {}),
        ({**RR, "labels": "exponential", "labels_every": 2}, TRUSTED, {}),
        ({**RR, "base": "oracle", "min_cluster_size": 0}, TRUSTED, {}),
    ],
    ids=["models", "sums", "losses", "a part of the model", "two models", "labels", "public clusters"],
)
def test_the_messages_of_a_run_are_those_that_were_expected(tmp_path, monkeypatch, algorithm, privacy, changes):
    """Clients send updates of other sizes than the model's, and sums, losses and labels besides; labels beside updates are left out."""
    carried, exchange = [0, 0, 0], InProcessFederation._exchange

    def heard(self, kind, tasks, take, window):
        def hear(client, tensors):
            carried[:] = carried[0] + 1, carried[1] + size(tensors), carried[2] + size(tasks[client])
            take(client, tensors)

        return exchange(self, kind, tasks, hear, window)

    monkeypatch.setattr(InProcessFederation, "_exchange", heard)
    make_keys(tmp_path / "keys", 4)
    data = {"dataset": "digits", "clients": [2, 2], "train_per_client": 50, "test_per_client": 20, **changes}
    document = {**SMALL, "data": data, "local": {"batch_size": 20}, "rounds": 5, "algorithm": algorithm, "output": {}}
    job = make_job(config.resolve({**document, "privacy": {**SMALL["privacy"], **privacy}}), tmp_path / "keys")
    simulate(job, tmp_path, key_folder=tmp_path / "keys")
    found = estimate(job.protocol)
    assert carried == [found["tasks"], pytest.approx(found["bytes_up"], rel=2e-3), found["bytes_down"]]


TWO_MODELS = """
from dpcfl_net.algorithms.base import MODEL, UPDATE, full_epochs, on_client
from dpcfl_net.algorithms.global_model import Global
from dpcfl_net.core.types import Release
from dpcfl_net.privacy.slots import DPSGDSlot

class TwoModels(Global):
    def plan(self, client):
        how = full_epochs(self.protocol.local, client)
        return [DPSGDSlot("train", *how), DPSGDSlot("own", *how)] * self.protocol.rounds

    @on_client(charges=["train", "own"], takes={"model": MODEL}, gives={"update": UPDATE})
    def train(self, me, model):
        me.state["model"] = me.dpsgd("own", me.state.get("model", model))
        return Release(update=me.dpsgd("train", model) - model)
"""


def test_a_task_that_trains_two_models_counts_both(tmp_path, monkeypatch):
    """The steps of such an algorithm were half of those that it makes, and so was the expected time."""
    (tmp_path / "own_two_models.py").write_text(TWO_MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    make_keys(tmp_path / "keys", 2)
    found = [
        estimate(make_job(config.resolve({**SETTINGS, "algorithm": {"name": name}}), tmp_path / "keys").protocol)
        for name in ("global", "own_two_models:TwoModels")
    ]
    assert [found[1][name] for name in ("steps", "batches", "records")] == [
        2 * found[0][name] for name in ("steps", "batches", "records")
    ]
    assert [found[1][name] for name in ("releases", "tasks", "bytes_up")] == [
        found[0][name] for name in ("releases", "tasks", "bytes_up")
    ]
