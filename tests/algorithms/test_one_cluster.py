"""Algorithms that release choices, labels or a clustering, with one cluster: nothing to release, nothing to pay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SMALL
from secure_runs import CLIENT, DP_SGD, SAMPLE, SEED, make
from simulate import simulate

from dpcfl_net.algorithms.base import algorithm_of
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.transport.keys import make_keys

ONE = [{"name": "dp-ifca", "clusters": 1}, {"name": "f-cdpfl", "clusters": 1}, {"name": "feddp-kmeans", "clusters": 1}]
ASYNCHRONOUS = {"asynchronous": {"buffer": 2}}


def job_for(folder: Path, algorithm: dict[str, Any], **changes: Any) -> Job:
    data = {**SMALL["data"], "clients": [2, 2], "train_per_client": 60, "test_per_client": 10}
    document = {**SMALL, "data": data, "model": {"name": "linear"}, "rounds": 4, "algorithm": algorithm, **changes}
    keys = folder / algorithm["name"]
    make_keys(keys, 4)
    return make_job(config.resolve(document), keys)


def same_as_global(folder: Path, algorithm: dict[str, Any], **changes: Any) -> None:
    """One model for all: plan, noise and models are those of `global`."""
    options = {key: value for key, value in algorithm.items() if key != "clusters"}
    own, other = (job_for(folder, how, **changes) for how in (algorithm, {**options, "name": "global"}))
    assert own.protocol.unprotected == other.protocol.unprotected  # the seed of the noise
    for a, b in zip(own.protocol.roster, other.protocol.roster, strict=True):
        assert own.algorithm.plan(a) == other.algorithm.plan(b)
        assert a.noise_multiplier == b.noise_multiplier
    state, expected = (simulate(job, folder / f"run of {job.protocol.algorithm}") for job in (own, other))
    assert state.assignment == [0, 0, 0, 0]
    assert state.diagnostics["phase"] == "single"
    assert np.array_equal(state.models, expected.models)


@pytest.mark.parametrize("algorithm", ONE, ids=lambda algorithm: algorithm["name"])
def test_one_cluster_pays_for_no_choice(algorithm, tmp_path):
    """`dp-ifca` added more noise, and `f-cdpfl` had no finite epsilon, for the index of the only model.

    `feddp-kmeans` refused four rounds, and with more paid for sums that found one cluster.
    """
    same_as_global(tmp_path, algorithm)


def test_a_client_that_joins_later_does_not_choose_among_one_model(tmp_path):
    same_as_global(tmp_path, ONE[0], availability={"clients": {1: [[3, 4]]}})


def test_asynchronous_rounds_of_one_cluster_begin_at_once(tmp_path):
    same_as_global(tmp_path, {**ONE[0], **ASYNCHRONOUS})


def test_secure_sums_of_one_cluster_begin_at_once(tmp_path):
    """The first rounds sent each client's noisy update, for a choice of one."""
    job = make(tmp_path, ONE[0], SAMPLE, rounds=2)
    for entry in job.protocol.roster:
        assert [slot.name for slot in job.algorithm.plan(entry) if slot.name in ("select", "train")] == []
        assert [slot.name for slot in job.algorithm.plan(entry)].count("masked") == 2
    state = simulate(job, tmp_path / "run", key_folder=tmp_path / "keys")
    assert state.diagnostics == {"phase": "single", "secure sums": "ok"}


@pytest.mark.parametrize("algorithm", ONE, ids=lambda algorithm: algorithm["name"])
def test_the_claim_of_one_cluster_names_no_choice(algorithm, tmp_path):
    able = algorithm_of(job_for(tmp_path, algorithm).protocol).capabilities
    assert "choose" not in able.without_clients
    assert "argmin" not in (able.claim_of_paper or "")
    assert able.covers == ("model updates",)
    assert "sums" not in able.without_clients


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({**ONE[0], "selection": {"budget_fraction": 0.02}}, r"selection\.budget_fraction is 0\.02: must be 0\.03"),
        ({**ONE[1], "select": "exponential"}, "select is 'exponential': must be 'argmin'"),
        ({**ONE[2], "centres": 12}, "centres is 12: must be 10"),
        ({**ONE[2], "noise_ratio": 2.0}, r"noise_ratio is 2\.0: must be 4\.0"),
    ],
)
def test_options_of_choices_are_refused_with_one_cluster(algorithm, words):
    with pytest.raises(ConfigError, match=rf"algorithm\.{words} \(the default\) with clusters 1, where it has no effect"):
        config.resolve({**SMALL, "algorithm": algorithm})


# ---- whole clients

CENTRAL = {"delta": 1e-2, "unit": "client", "trust": "trusted-server", "noise": "seeded", "noise_seed": SEED}
RR = {"name": "rr-cluster", "clusters": 1, "sampling_rate": 0.5}
BY_SAMPLING = {
    "labels-first": ({}, {**CENTRAL, "epsilon": 5, "adjacency": "replace-one"}),
    "expected": ({"guarantee": "expected"}, {**CENTRAL, "epsilon": 5}),
    "secure sums": ({"guarantee": "expected"}, CLIENT),
    "visible": ({"guarantee": "expected", "sampling": "visible"}, CLIENT),
}


def local_of(privacy: dict[str, Any]) -> dict[str, Any]:
    """Local training without a deadline, which only secret coins need."""
    return {"local": DP_SGD} if privacy["trust"] == "trusted-server" else {}


@pytest.mark.parametrize("case", BY_SAMPLING)
def test_one_cluster_of_rr_cluster_pays_for_no_label_and_no_count(case, tmp_path):
    """A part of each round's budget, 30 % of 1 / z^2 or the longer vector with a count, paid for labels that all are 0."""
    more, privacy = BY_SAMPLING[case]
    local = local_of(privacy)
    jobs = {}
    for name in ("rr-cluster", "dp-fedavg"):
        options = {**RR, **more} if name == "rr-cluster" else {"sampling": more.get("sampling", "auto"), "sampling_rate": 0.5}
        jobs[name] = make(tmp_path / name, {**options, "name": name}, privacy, **local)
    own, other = jobs.values()
    assert own.algorithm.central_plan() == other.algorithm.central_plan()
    assert own.protocol.curator_noise_multiplier == other.protocol.curator_noise_multiplier
    for a, b in zip(own.protocol.roster, other.protocol.roster, strict=True):
        assert own.algorithm.plan(a) == other.algorithm.plan(b)
        assert a.noise_multiplier == b.noise_multiplier
    assert own.algorithm.capabilities.published == other.algorithm.capabilities.published
    assert own.algorithm.capabilities.sent_raw == other.algorithm.capabilities.sent_raw
    assert own.algorithm.capabilities.without_clients == other.algorithm.capabilities.without_clients
    assert own.algorithm.secure_code(4) == other.algorithm.secure_code(4)
    assert own.algorithm.secure_code(8) == other.algorithm.secure_code(8)
    state, expected = (
        simulate(job, tmp_path / name / "run", key_folder=tmp_path / name / "keys") for name, job in jobs.items()
    )
    assert state.assignment == [0] * 8
    assert state.diagnostics["sizes"] == [4.0]
    assert state.models.shape == expected.models.shape
    assert np.std(state.models) == pytest.approx(np.std(expected.models), rel=0.1)  # mostly the noise, divided by q n


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_cluster_size": 2}, r"min_cluster_size is 2: must be 8 \(the default\) with clusters 1, where it has no effect"),
        ({"labels_share": 0.5}, r"labels_share is 0\.5: must be 0\.3 \(the default\) with clusters 1, where it has no effect"),
        ({"guarantee": "paper"}, "guarantee is 'paper': must be labels-first or expected with clusters 1"),
        ({"labels": "exponential", "labels_every": 1}, "clusters is 1: must be 2 or more with labels exponential"),
    ],
)
def test_options_of_labels_are_refused_with_one_cluster(options, words, tmp_path):
    privacy = {**CENTRAL, "epsilon": 5, "adjacency": "replace-one"}
    with pytest.raises(ConfigError, match=rf"algorithm\.{words}"):
        make(tmp_path, {**RR, **options}, privacy, local=DP_SGD)


@pytest.mark.parametrize("base", ["fesem", "fedcam"])
@pytest.mark.parametrize("privacy", [{**CENTRAL, "epsilon": 5}, CLIENT], ids=["trusted", "secure"])
def test_one_cluster_runs_with_each_base(base, privacy, tmp_path):
    job = make(tmp_path, {**RR, "guarantee": "expected", "base": base}, privacy, rounds=2, **local_of(privacy))
    state = simulate(job, tmp_path / "run", key_folder=tmp_path / "keys")
    assert state.assignment == [0] * 8
    assert len(state.models) == 1 + (base == "fedcam")
