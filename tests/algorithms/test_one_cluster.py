"""Algorithms with private choices and one cluster: nothing to choose, nothing to pay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SMALL
from secure_runs import SAMPLE, make
from simulate import simulate

from dpcfl_net.algorithms.base import algorithm_of
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.transport.keys import make_keys

ONE = [{"name": "dp-ifca", "clusters": 1}, {"name": "f-cdpfl", "clusters": 1}]
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
    """`dp-ifca` added more noise, and `f-cdpfl` had no finite epsilon, for the index of the only model."""
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


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({**ONE[0], "selection": {"budget_fraction": 0.02}}, r"selection\.budget_fraction is 0\.02: must be 0\.03"),
        ({**ONE[1], "select": "exponential"}, "select is 'exponential': must be 'argmin'"),
    ],
)
def test_options_of_choices_are_refused_with_one_cluster(algorithm, words):
    with pytest.raises(ConfigError, match=rf"algorithm\.{words} \(the default\) with clusters 1, where it has no effect"):
        config.resolve({**SMALL, "algorithm": algorithm})
