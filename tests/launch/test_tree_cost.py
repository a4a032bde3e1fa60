"""Bytes and memory of runs with aggregators are those that `dpcfl job` predicts, within 30 %."""

from __future__ import annotations

import pytest

from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.cost_estimate import estimate
from dpcfl_net.experiment.cost_prediction import StepCost, predict
from dpcfl_net.experiment.host_costs import SHIPPED
from dpcfl_net.launch.bench import noop_algorithm, runs
from dpcfl_net.transport.keys import make_aggregator_keys, make_keys

CLIENTS, AGGREGATORS = 12, 3
PASSED_ON = """
from dataclasses import replace
from dpcfl_net.core.types import State
from dpcfl_net.launch.bench.noop_algorithm import NoOp

class EachUpdate(NoOp):
    name = "each update"

    @classmethod
    def capabilities_for(cls, options, setting):
        return replace(super().capabilities_for(options, setting), summed_rounds=0)

    def round(self, state, t, fed):
        updates = fed.call(self.give_back, common={"model": state.models[0]}).column("update")
        return State(sum(updates.values())[None] / len(updates), state.assignment)
"""


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [noop_algorithm.NAME, "passed_on:EachUpdate"], ids=["sums", "updates-passed-on"])
@pytest.mark.parametrize(("model", "rounds"), [("cnn", 12), ("wide", 4)])
def test_bytes_and_memory_are_as_predicted(tmp_path, monkeypatch, algorithm, model, rounds):
    (tmp_path / "passed_on.py").write_text(PASSED_ON)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    settings = runs.config(model, CLIENTS, rounds, {"name": algorithm}, runtime={"aggregators": AGGREGATORS})
    make_keys(tmp_path, CLIENTS)
    make_aggregator_keys(tmp_path, range(AGGREGATORS))
    job = make_job(settings, tmp_path)
    work, found = estimate(job.protocol), predict(job, settings, SHIPPED, StepCost(0.0, 0.0, 0.0, 0.0), 2, CLIENTS)
    run = runs.run(settings)
    assert run.bytes_up == pytest.approx(work["bytes_up"] / settings.rounds, rel=0.3)
    assert run.bytes_down == pytest.approx(work["bytes_down"] / settings.rounds, rel=0.3)
    assert run.private["aggregator"] * AGGREGATORS == pytest.approx(found.aggregator_memory, rel=0.3)
    if model == "cnn":  # with a large model the peaks of the workers, which the prediction adds, do not meet
        launcher = min(run.launcher, 150 << 20)  # that of pytest grows with the tests before
        assert run.total + launcher == pytest.approx(found.memory, rel=0.3)
