"""Predictions of time and memory: from which constants they follow, and which constants are used."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from conftest import SMALL

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.protocol import AggregatorEntry
from dpcfl_net.experiment import config, host_costs
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.cost_estimate import estimate
from dpcfl_net.experiment.cost_prediction import REST_BYTES, StepCost, measure_step, predict
from dpcfl_net.experiment.host_costs import SHIPPED
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.training.memory import IDLE_S
from dpcfl_net.transport.keys import make_keys

NOTHING = replace(SHIPPED, **{name: 0.0 for name in host_costs.HostCosts.__dataclass_fields__ if name != "processor"})
FREE = StepCost(0.0, 0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """(job, configuration) of the small example."""
    folder = tmp_path_factory.mktemp("job")
    settings = config.resolve({**SMALL, "output": {"evaluate_every": 3}})
    make_keys(folder, settings.data.client_count)
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
    assert one().memory == REST_BYTES * p * workers + 4 * p * work["tasks"] / rounds
    at_rest = one().memory
    assert (
        one(worker_parameter_bytes=8.0).memory - at_rest == (8 - REST_BYTES) * p * workers
    )  # no task takes long: none is at rest
    assert one(worker_bytes=1e3, run_bytes=1e6).memory - at_rest == 1e6 + workers * 1e3


def with_aggregators(job, *bounds, **changes):
    """The job with aggregators for these groups (first, last) of clients, and other changes of its protocol."""
    entries = [AggregatorEntry(public_key="k" * 40, first=a, last=b) for a, b in bounds]
    return Job(job.protocol.model_copy(update={"aggregators": entries, **changes}), job.experiment)


def test_each_constant_of_an_aggregator_counts_once(planned):
    flat, settings = planned
    job = with_aggregators(flat, (0, 2), (3, 7))
    rounds, p, models = job.protocol.rounds, job.protocol.model.parameters, 4

    def one(*, of=job, **costs):
        return predict(of, settings, replace(NOTHING, **costs), FREE, 2, 8)

    assert one(aggregator_s=0.5).cpu_s == 0.5 * 2
    assert one(aggregator_round_s=0.25).cpu_s == 0.25 * 2 * rounds
    assert one(aggregator_wall_s=0.125).wall_s == 0.125 * rounds
    assert one(aggregator_bytes=1e6).memory - one().memory == 2e6
    assert one(aggregator_parameter_bytes=30.0).aggregator_memory == 2 * models * 30 * p
    assert one(aggregator_update_bytes=3.0).aggregator_memory == p * (2 * models * 8 + 8 * 3)  # sums, and updates that wait
    assert one(byte_s=1.0).cpu_s > one(of=flat, byte_s=1.0).cpu_s  # what clients send, and what aggregators send
    workers = REST_BYTES * p * 8
    assert one().memory - workers == p * 2 * 8 * models * 2  # of each aggregator, there and at the server
    passing_on = with_aggregators(flat, (0, 2), (3, 7), algorithm="km-cdpfl", options={"clusters": 2})
    assert one(of=passing_on).memory - workers == p * (
        4 * 8 + 2 * 4 * 8
    )  # each update, at the server once and at aggregators twice
    assert predict(job, settings, replace(NOTHING, aggregator_s=1.0, aggregator_bytes=1.0), FREE, 2, 0).aggregator_memory == 0


def test_bytes_at_the_server_depend_on_the_aggregators_and_not_on_the_clients(planned):
    flat, _ = planned
    n, p, rounds = 8, flat.protocol.model.parameters, flat.protocol.rounds
    of_clients, found = estimate(flat.protocol), estimate(with_aggregators(flat, (0, 3), (4, 7)).protocol)
    assert (found["group_bytes_up"], found["group_bytes_down"]) == (of_clients["bytes_up"], of_clients["bytes_down"])
    assert of_clients["group_bytes_up"] == of_clients["tree"].aggregators == 0
    sums, lists = (rounds - 1) * 2 * 4 * 8 * p, 8 * n + (rounds - 1) * 16 * n
    assert found["bytes_up"] == 4 * p * n + sums + lists
    alone = with_aggregators(flat, (0, 3), (4, 7), algorithm="global", options={})
    assert estimate(alone.protocol)["bytes_up"] == rounds * (2 * 8 * p + 16 * n)
    assert estimate(alone.protocol)["bytes_down"] == rounds * (2 * 4 * p + 32 * n)
    personal = with_aggregators(flat, (0, 3), (4, 7), algorithm="km-cdpfl", options={"clusters": 2})
    assert estimate(personal.protocol)["bytes_up"] == rounds * (4 * p * n + 8 * n)  # each update is passed on
    assert estimate(personal.protocol)["bytes_down"] == rounds * (4 * p * n + 16 * n)  # each client has a model


def test_steps_selections_and_evaluations_are_computing(planned):
    job, settings = planned
    work, rounds = estimate(job.protocol), job.protocol.rounds
    test_records = -(-rounds // 3) * work["clients"] * settings.data.test_per_client
    found = predict(job, settings, NOTHING, StepCost(0.5, 2.0, 1e6, 1e5), 2, work["clients"])
    assert found.cpu_s == pytest.approx(0.5 * work["batches"] + 2.0 * (work["scored"] + test_records))
    assert found.wall_s == found.cpu_s / 2
    idle = predict(job, settings, NOTHING, FREE, 2, work["clients"])
    task_s = found.cpu_s / work["tasks"]
    assert task_s > IDLE_S  # so of the others only a part has computed lately, and keeps its memory
    assert found.memory - idle.memory == pytest.approx(2e6 + 1e5 + 1e6 * 2 * IDLE_S / task_s)
    quick = predict(job, settings, NOTHING, StepCost(1e-6, 0.0, 1e6, 0.0), 2, work["clients"])
    assert quick.memory - idle.memory == work["clients"] * 1e6
    assert work["batches"] >= work["steps"]


def test_a_step_of_the_jobs_model_is_measured(planned):
    step = measure_step(planned[0], None, most_steps=2)
    assert step.step_s > 0
    assert step.record_s > 0


def test_a_step_with_constant_pace_is_measured_as_workers_compute_it(tmp_path, monkeypatch):
    from dpcfl_net.training.dpsgd import Trainer

    local = {**SMALL["local"], "pace": "constant", "deadline_s": 60}
    settings = config.resolve({**SMALL, "local": local})
    make_keys(tmp_path, settings.data.client_count)
    job = make_job(settings, tmp_path)
    rooms, train = [], Trainer.train

    def watched(self, *arguments, room=None):
        rooms.append(room)
        return train(self, *arguments, room=room)

    monkeypatch.setattr(Trainer, "train", watched)
    measure_step(job, None, most_steps=2)
    assert rooms
    assert all(room is not None and room > settings.local.batch_size for room in rooms)


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
