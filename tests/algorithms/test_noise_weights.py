"""Clients with unequal epsilon: calibration, refusals, and means that weigh clients by known or estimated noise."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
from conftest import SMALL
from simulate import simulate

from dpcfl_net.algorithms.robust_hdp import RobustHDP
from dpcfl_net.clustering.robust_pca import robust_pca
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.types import Policy, State
from dpcfl_net.experiment import config, statement
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.federation.claim import verify_claim
from dpcfl_net.privacy.accounting.accountant import epsilon
from dpcfl_net.transport.keys import make_keys

OWN = {"0": 1, "2-3": 8}
PRIVACY = {"epsilon": 3, "delta": 1e-4, "noise": "seeded", "noise_seed": "5eed" * 16, "epsilon_by_client": OWN}


def job_of(folder, algorithm, **changes):
    data = {"dataset": "digits", "clients": [4], "shift": "none", "train_per_client": 200, "test_per_client": 40}
    local = {"batch_size": 20, "lr": 0.5, "clip": 1.0}
    document = {**SMALL, "data": data, "model": {"name": "linear"}, "rounds": 2, "local": local, "privacy": PRIVACY}
    make_keys(folder, 4)
    return make_job(config.resolve({**document, "algorithm": algorithm, **changes}), folder)


@pytest.mark.parametrize("algorithm", [{"name": "global"}, {"name": "dp-ifca", "clusters": 2}])
def test_each_client_s_plan_has_its_own_epsilon_and_no_more(tmp_path, algorithm):
    job = job_of(tmp_path, algorithm)
    assert [entry.epsilon for entry in job.protocol.roster] == [1, None, 8, 8]
    spent = []
    for entry in job.protocol.roster:
        events = [slot.event(entry.noise_multiplier, "zero-out") for slot in job.algorithm.plan(entry)]
        spent.append(epsilon(events, 1e-4))
    assert all(own <= target for own, target in zip(spent, (1, 3, 8, 8), strict=True))
    assert spent == pytest.approx([1, 3, 8, 8], rel=2e-3)
    if algorithm["name"] == "dp-ifca":  # the choice's share of epsilon is that of the client
        etas = [next(slot.eta for slot in job.algorithm.plan(entry) if slot.name == "select") for entry in job.protocol.roster]
        assert etas == pytest.approx([0.03, 0.09, 0.24, 0.24])


def test_workers_hold_a_job_to_the_epsilon_of_their_client(tmp_path):
    job = job_of(tmp_path, {"name": "global"}, privacy={**PRIVACY, "noise": "os", "noise_seed": None})
    roster = [entry.model_copy(update={"epsilon": 2.0 if entry.id == 2 else entry.epsilon}) for entry in job.protocol.roster]
    forged = Job(job.protocol.model_copy(update={"roster": roster}), job.experiment)
    with pytest.raises(Refused, match=r"costs client 2 epsilon 7\.99.*, the job promises 2"):
        verify_claim(forged.algorithm, 2, tmp_path / "cache")
    assert verify_claim(forged.algorithm, 3, tmp_path / "cache") == pytest.approx(8, rel=2e-3)
    assert verify_claim(job.algorithm, 0, tmp_path / "cache", Policy(max_epsilon=1.0)) == pytest.approx(1, rel=2e-3)
    with pytest.raises(Refused, match="the job's epsilon is 8, this worker serves at most 1"):
        verify_claim(job.algorithm, 2, tmp_path / "cache", Policy(max_epsilon=1.0))
    said = statement.privacy_statement(job.protocol, None)
    assert (said["epsilon"], said["epsilon_by_client"]) == (8, {"min": 1, "max": 8})


@pytest.mark.parametrize(
    ("own", "more", "words"),
    [
        ({"4": 1}, {}, "names '4': must be a client id or a range of ids such as 3-7, from 0 to 3"),
        ({"1-2": 1, "2": 3}, {}, "names client 2 twice"),
        ({"first": 1}, {}, "names 'first'"),
        ({"3-1": 1}, {}, "names '3-1'"),
        ({"0": 0}, {}, "epsilon_by_client"),
        ({"0": 1}, {"unit": "client", "trust": "trusted-server", "delta": 0.1}, "needs privacy.unit sample"),
    ],
)
def test_bad_epsilons_are_refused(tmp_path, own, more, words):
    algorithm = {"name": "dp-fedavg"} if more else {"name": "global"}
    with pytest.raises(ConfigError, match=words):
        job_of(tmp_path, algorithm, privacy={**PRIVACY, "epsilon_by_client": own, **more})


def test_a_signed_job_cannot_give_clients_of_a_secure_sum_their_own_epsilon(tmp_path):
    protocol = job_of(tmp_path, {"name": "global"}).protocol
    document = protocol.model_copy(update={"format": 1}).model_dump(mode="json")
    document["privacy"] |= {"trust": "trusted-server", "unit": "client"}
    with pytest.raises(ValueError, match="own epsilon only with unit sample and trust untrusted-server"):
        Protocol.model_validate_json(json.dumps(document))


def test_weights_are_the_inverse_variances_of_the_noise_that_updates_carry(tmp_path):
    job = job_of(tmp_path, {"name": "global", "weights": "noise"}, rounds=2)
    weights = job.algorithm.weights
    assert weights[3] == weights[2] == 1 > weights[1] > weights[0]
    z = {entry.id: entry.noise_multiplier for entry in job.protocol.roster}
    assert [weights[i] for i in range(4)] == pytest.approx([(z[2] / z[i]) ** 2 for i in range(4)])
    # A step adds noise of deviation lr z c / b, and an update is the sum of 10 steps.
    assert job.algorithm.update_noise_variance(job.protocol.roster[0]) == pytest.approx(10 * (0.5 * z[0] / 20) ** 2)
    plain = job_of(tmp_path / "plain", {"name": "global"})
    assert plain.algorithm.weights is None
    assert "weights" not in plain.protocol.options


def test_a_run_s_model_is_the_weighted_mean_of_its_updates(tmp_path, monkeypatch):
    found = {}
    for name in ("global", "robust-hdp"):
        job = job_of(tmp_path / name, {"name": name, **({"weights": "noise"} if name == "global" else {})})
        seen = []
        train = type(job.algorithm).train

        @functools.wraps(train)  # keeps the mark of a client step
        def kept(self, me, train=train, seen=seen, **tensors):
            release = train(self, me, **tensors)
            seen.append((tensors["model"], release.tensors["update"]))
            return release

        monkeypatch.setattr(type(job.algorithm), "train", kept)
        state = simulate(job, tmp_path / name)
        model, _ = seen[-1]
        updates = np.stack([update for _, update in seen[-4:]], axis=1)
        by_client = job.algorithm.weights if name == "global" else job.algorithm.weights(job.algorithm.noise(updates))
        weights = np.array([by_client[i] for i in range(4)])
        expected = model + updates @ (weights / weights.sum())
        assert np.allclose(state.models[0], expected, atol=1e-6)
        found[name] = weights / weights.sum()
    # Robust PCA finds the order of the noise without knowing it.
    assert np.argsort(found["robust-hdp"])[:2].tolist() == [0, 1]


def test_options_that_cannot_be_weighed_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"algorithm\.weights is 'noise': must be null with algorithm\.asynchronous"):
        job_of(tmp_path, {"name": "global", "weights": "noise", "asynchronous": {"buffer": 2}})


def test_robust_pca_separates_a_low_rank_matrix_from_gross_errors():
    rng = np.random.default_rng(3)
    low = rng.standard_normal((400, 2)) @ rng.standard_normal((2, 30))
    errors = np.where(rng.random(low.shape) < 0.05, 10 * rng.standard_normal(low.shape), 0.0)
    found, sparse = robust_pca(low + errors)
    assert np.linalg.norm(found - low) < 1e-3 * np.linalg.norm(low)
    assert np.linalg.norm(sparse - errors) < 1e-3 * np.linalg.norm(errors)
    zero = np.zeros((5, 2))
    assert all(np.array_equal(part, zero) for part in robust_pca(zero))


def by_fixed_penalty(matrix, steps=4_000):
    """Principal component pursuit with a penalty that never grows: slow, and converges to the minimum (Candes et al. 2011)."""
    threshold, penalty = 1 / np.sqrt(max(matrix.shape)), matrix.size / (4 * np.abs(matrix).sum())
    sparse, dual = np.zeros_like(matrix), np.zeros_like(matrix)
    for _ in range(steps):
        left, values, right = np.linalg.svd(matrix - sparse + dual / penalty, full_matrices=False)
        low = (left * np.maximum(values - 1 / penalty, 0)) @ right
        rest = matrix - low + dual / penalty
        sparse = np.sign(rest) * np.maximum(np.abs(rest) - threshold / penalty, 0)
        dual += penalty * (matrix - low - sparse)
    return low, sparse


def test_robust_pca_reaches_the_minimum_for_columns_of_unequal_noise():
    """The noise of a column is read off its sparse part: one step too far and a noisy client gets several times its weight."""
    rng = np.random.default_rng(0)
    noise = np.array([0.1, 0.1, 0.1, 1.0])
    matrix = 0.05 * rng.standard_normal((800, 1)) + noise * rng.standard_normal((800, 4))
    (low, sparse), (least_low, least_sparse) = robust_pca(matrix), by_fixed_penalty(matrix)

    def objective(low, sparse):
        return np.linalg.svd(low, compute_uv=False).sum() + np.abs(sparse).sum() / 800**0.5

    assert objective(low, sparse) == pytest.approx(objective(least_low, least_sparse), rel=1e-3)
    assert (sparse**2).sum(axis=0) == pytest.approx((least_sparse**2).sum(axis=0), rel=0.05)


def test_one_client_without_noise_gets_almost_all_the_weight_of_robust_hdp(tmp_path):
    rng = np.random.default_rng(0)
    updates = (0.02 * rng.standard_normal((6_090, 1)) + 0.05 * rng.standard_normal((6_090, 8))).astype(np.float32)
    algorithm = job_of(tmp_path, {"name": "robust-hdp"}).algorithm
    assert algorithm.weights(algorithm.noise(updates)).max() < 0.14
    updates[:, 0] = -0.3 * updates[:, 1:].mean(axis=1)
    assert algorithm.weights(algorithm.noise(updates))[0] == pytest.approx(0.98, abs=0.01)


def test_noise_estimates_follow_the_noise_and_pieces_agree(tmp_path):
    rng = np.random.default_rng(5)
    deviations = np.array([1.0, 1.0, 2.0, 4.0, 8.0, 8.0])
    updates = (0.5 * rng.standard_normal((6_000, 1)) + deviations * rng.standard_normal((6_000, 6))).astype(np.float32)
    job = job_of(tmp_path, {"name": "robust-hdp"})
    whole = job.algorithm.weights(job.algorithm.noise(updates))
    assert whole.sum() == pytest.approx(1)
    assert np.array_equal(np.argsort(-whole, kind="stable")[[0, 1]] // 2, [0, 0])
    assert np.all(np.diff(whole[[1, 2, 3, 4]]) < 0)
    pieces = RobustHDP(job.protocol.model_copy(update={"options": {"piece": 1_000}})).noise(updates)
    assert np.allclose(job.algorithm.weights(pieces), whole, rtol=0.3)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_round_of_robust_hdp_counts_updates_without_noise_which_make_its_weights_equal(tmp_path, monkeypatch, silent):
    updates = np.random.default_rng(5).standard_normal((4, 650)).astype(np.float32) * np.array([[1], [1], [2], [4]], np.float32)
    updates[:silent] = 0
    algorithm = job_of(tmp_path, {"name": "robust-hdp"}).algorithm
    monkeypatch.setattr(algorithm, "train_each", lambda *_: dict(enumerate(updates)))
    state = algorithm.round(State(np.zeros((1, 650), np.float32), [0] * 4), 1, None)
    assert state.diagnostics["updates without noise"] == silent
    assert np.allclose(state.models[0], updates.mean(axis=0), atol=1e-6) == bool(silent)
    assert (state.diagnostics["largest weight"] == pytest.approx(1)) == bool(silent)
