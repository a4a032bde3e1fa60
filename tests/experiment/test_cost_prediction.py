"""Predictions of time and memory: from which constants they follow, and which constants are used."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from conftest import SMALL

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment import config, host_costs
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.cost_estimate import estimate
from dpcfl_net.experiment.cost_prediction import StepCost, measure_step, predict
from dpcfl_net.experiment.host_costs import SHIPPED
from dpcfl_net.transport.keys import make_keys

NOTHING = replace(SHIPPED, **{name: 0.0 for name in host_costs.HostCosts.__dataclass_fields__ if name != "processor"})
FREE = StepCost(0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """(job, configuration) of the small example."""
    folder = tmp_path_factory.mktemp("job")
    settings = config.resolve({**SMALL, "output": {"evaluate_every": 3}})
    make_keys(folder, sum(settings.data.clients))
    return make_job(settings, folder), settings


@pytest.fixture
def no_costs(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_each_constant_counts_once_for_what_it_measures(planned):
    job, settings = planned
    work, rounds, p = estimate(job.protocol), job.protocol.rounds, job.protocol.model.parameters
    workers = work["clients"]

    def one(**costs):
        return predict(job, settings, replace(NOTHING, **costs), FREE, 2, workers)

    assert one(start_s=3.0).cpu_s == 3.0
    assert one(worker_s=0.5).cpu_s == 0.5 * workers
    assert one(round_s=0.25).cpu_s == 0.25 * rounds
    assert one(task_s=0.125).cpu_s == 0.125 * work["tasks"]
    assert one(byte_s=1.0).cpu_s == work["bytes_up"] + work["bytes_down"]
    assert one(start_wall_s=3.0, round_wall_s=1.0, task_wall_s=1.0).wall_s == 3.0 + rounds + work["tasks"]
    assert one(run_bytes=1e6, worker_bytes=1e3).memory == 1e6 + workers * 1e3 + 4 * p * work["tasks"] / rounds
    assert one(worker_parameter_bytes=8.0).memory - one().memory == 8 * p * workers


def test_steps_selections_and_evaluations_are_computing(planned):
    job, settings = planned
    work, rounds = estimate(job.protocol), job.protocol.rounds
    test_records = -(-rounds // 3) * work["clients"] * settings.data.test_per_client
    found = predict(job, settings, NOTHING, StepCost(0.5, 2.0, 1e6), 2, work["clients"])
    assert found.cpu_s == pytest.approx(0.5 * work["batches"] + 2.0 * (work["scored"] + test_records))
    assert found.wall_s == found.cpu_s / 2
    idle = predict(job, settings, NOTHING, FREE, 2, work["clients"])
    assert found.memory - idle.memory == 2e6  # two workers compute at a time
    assert work["batches"] >= work["steps"]


def test_a_step_of_the_jobs_model_is_measured(planned):
    step = measure_step(planned[0], None, steps=2)
    assert step.step_s > 0
    assert step.record_s > 0


def test_shipped_constants_are_named_until_the_host_is_measured(no_costs):
    assert host_costs.load()[0] == SHIPPED
    assert "shipped; measure this host with: dpcfl doctor --measure" in host_costs.load()[1]
    measured = replace(SHIPPED, processor=host_costs.processor(), task_s=0.5)
    host_costs.store(measured)
    assert host_costs.load() == (measured, "constants measured on this host")


@pytest.mark.parametrize(
    ("change", "words"),
    [({"processor": "another"}, "of another processor"), ({"format": 0}, "has another format")],
)
def test_constants_of_another_host_or_version_are_not_used(no_costs, change, words):
    path = host_costs.store(replace(SHIPPED, processor=host_costs.processor(), task_s=0.5))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    costs, source = host_costs.load()
    assert costs == SHIPPED
    assert words in source


@pytest.mark.parametrize("change", [{"task_s": -1.0}, {"task_s": "much"}, {"more": 1.0}])
def test_damaged_constants_are_an_error_that_says_what_to_do(no_costs, change):
    path = host_costs.store(replace(SHIPPED, processor=host_costs.processor()))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match="delete it, or measure again"):
        host_costs.load()
