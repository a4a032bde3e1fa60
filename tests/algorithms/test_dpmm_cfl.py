"""DPMM-CFL: clusters from noisy rounds without a given number, evidence over rounds, and clients without an answer."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import SMALL

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.federation.base import Results
from dpcfl_net.transport.keys import make_keys

LOCAL = {"batch_size": 20, "lr": 0.5}
PRIVACY = {**SMALL["privacy"], "accountant": "rdp"}  # calibrates faster
DATA = {"dataset": "digits", "clients": [3, 3], "train_per_client": 200, "test_per_client": 40}


def job_of(folder, sizes=None, **options):
    make_keys(folder, 6)
    data = {**DATA, "sizes": sizes, "train_per_client": None} if sizes else DATA
    document = {**SMALL, "data": data, "model": {"name": "linear"}, "local": LOCAL, "rounds": 4, "privacy": PRIVACY}
    return make_job(config.resolve({**document, "algorithm": {"name": "dpmm-cfl", **options}}), folder)


class Noisy:
    """Clients whose updates are a direction of their cluster and the job's noise; round t has `signal[t]` times the noise."""

    clients, missing, lost = range(6), (), ()

    def __init__(self, job, signal):
        self.job, self.signal, self.t, self.gone = job, signal, 0, set()
        self._rng = np.random.default_rng(0)
        p = job.protocol.model.parameters
        self._sides = self._rng.normal(size=(2, p))

    def update(self, client):
        deviation = self.job.algorithm.noise_variance(self.job.protocol.client(client), self.t) ** 0.5
        noise = self._rng.normal(size=self._sides.shape[1])
        return (deviation * (self.signal[self.t] * self._sides[client % 2] + noise)).astype(np.float32)

    def call(self, step, common=None, each=None):
        self.tasks, self.updates = each or dict.fromkeys(self.clients, common), {}
        self.updates |= {i: self.update(i) for i in self.clients if i not in self.gone}
        return Results(self.clients, {i: {"update": update} for i, update in self.updates.items()})

    def initial_model(self, number=0):
        return np.zeros(self._sides.shape[1], np.float32)

    def rng(self, purpose):
        return np.random.default_rng(self.t)


def rounds(job, signal):
    fed = Noisy(job, signal)
    state, states = job.algorithm.start(fed), []
    for fed.t in range(1, max(signal) + 1):
        state = job.algorithm.round(state, fed.t, fed)
        states.append(state)
    return fed, states


def test_clusters_of_a_clear_round_are_kept_through_noisy_ones(tmp_path):
    job = job_of(tmp_path)
    _, states = rounds(job, {1: 2.0, 2: 0.0, 3: 0.0})
    assert [state.assignment for state in states] == [[0, 1] * 3] * 3
    assert [len(state.models) for state in states] == [2] * 3
    (tmp_path / "alone").mkdir()
    _, states = rounds(job_of(tmp_path / "alone", evidence="round"), {1: 2.0, 2: 0.0, 3: 0.0})
    assert states[0].assignment == [0, 1] * 3
    assert states[2].assignment == [0] * 6  # a round of noise alone shows one cluster
    assert states[2].memory == {}


def test_evidence_adds_up_over_rounds_that_are_too_noisy_alone(tmp_path):
    _, states = rounds(job_of(tmp_path), dict.fromkeys(range(1, 5), 0.2))
    assert states[0].assignment == [0] * 6
    assert states[-1].assignment == [0, 1] * 3


@pytest.mark.parametrize("without", [0, 1])
def test_models_are_the_means_of_their_clients_models(tmp_path, without):
    job = job_of(tmp_path)
    fed, (state,) = rounds(job, {1: 2.0})
    np.testing.assert_allclose(
        state.models, [np.mean([fed.updates[i] for i in range(k, 6, 2)], axis=0) for k in (0, 1)], rtol=1e-5
    )
    fed.gone, fed.t, fed.signal = {without, 2 + without, 4 + without, 5 - without}, 2, {2: 1.0}
    after = job.algorithm.round(state, 2, fed)
    assert all((fed.tasks[i]["model"] == state.models[i % 2]).all() for i in range(6))
    assert after.assignment == state.assignment
    assert after.models[without].tobytes() == state.models[without].tobytes()
    moved = state.models[1 - without] + np.mean([*fed.updates.values()], axis=0)
    np.testing.assert_allclose(after.models[1 - without], moved, rtol=1e-5, atol=1e-7)
    assert after.memory is state.memory


def test_evidence_of_all_rounds_has_the_mean_noise_of_each_client(tmp_path):
    job = job_of(tmp_path, sizes=[100, 200, 300] * 2)
    _, states = rounds(job, {1: 2.0, 2: 1.0, 3: 1.0})
    each = np.array([[job.algorithm.noise_variance(entry, t) for entry in job.protocol.roster] for t in (1, 2, 3)])
    relative = each / each.mean(axis=1, keepdims=True)
    assert np.abs(relative[0] - relative[1]).max() > 0.1  # first whole data sets, then equal batches
    for t, state in enumerate(states, 1):
        np.testing.assert_allclose(state.memory["noise"], relative[:t].mean(axis=0), rtol=1e-12)


@pytest.mark.parametrize("first", ["full-batch", pytest.param("training", marks=pytest.mark.slow)])
def test_the_noise_is_that_of_the_plan(tmp_path, first):
    job = job_of(tmp_path, first_round=first)
    entry = job.protocol.roster[0]
    deviation = 0.5 * job.protocol.local.clip * entry.noise_multiplier
    assert [slot.steps for slot in job.algorithm.plan(entry)] == [1, 10, 10, 10] if first == "full-batch" else [10] * 4
    assert job.algorithm.noise_variance(entry, 2) == pytest.approx(10 * (deviation / 20) ** 2)
    exact = (deviation / 200) ** 2
    assert job.algorithm.noise_variance(entry, 1) == pytest.approx(
        exact if first == "full-batch" else 10 * (deviation / 20) ** 2
    )


def test_full_batch_noise_falls_with_the_records_of_a_client(tmp_path):
    job = job_of(tmp_path, sizes=[100, 200, 300] * 2)
    for entry in job.protocol.roster:
        deviation = 0.5 * job.protocol.local.clip * entry.noise_multiplier / entry.records
        assert job.algorithm.noise_variance(entry, 1) == pytest.approx(deviation**2)
    assert len({entry.records for entry in job.protocol.roster}) == 3


def test_bad_options_are_refused():
    many = {**DATA, "clients": [301], "shift": "none", "train_per_client": 4}
    with pytest.raises(ConfigError, match=r"dpmm-cfl with 301 clients: must be at most 300"):
        config.resolve({**SMALL, "data": many, "algorithm": {"name": "dpmm-cfl"}})
    with pytest.raises(ConfigError, match=r"algorithm\.concentration"):
        config.resolve({**SMALL, "data": DATA, "algorithm": {"name": "dpmm-cfl", "concentration": 0}})
    with pytest.raises(ConfigError, match=r"communication\.up\.form is 'top-k': must be float32 or int8 for dpmm-cfl"):
        config.resolve({**SMALL, "data": DATA, "algorithm": {"name": "dpmm-cfl"}, "communication": {"up": "topk:0.1"}})
