"""The interval of evaluations: a tenth of the clients' computation, from the job and the data alone."""

from __future__ import annotations

import json

import pytest

import dpcfl_net as dpcfl
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.signing import read_operator_key
from dpcfl_net.experiment.cost_estimate import EVALUATION_SHARE, TRAINING_PASSES, evaluation_interval
from dpcfl_net.experiment.job_files import read_job

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
