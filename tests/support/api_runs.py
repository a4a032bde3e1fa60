"""Shared small runs of the Python API; the fixtures are registered in tests/conftest.py."""

from __future__ import annotations

from pathlib import Path

import pytest

import dpcfl_net as dpcfl

TINY = {
    "name": "tiny",
    "data": {"dataset": "digits", "clients": [1, 1], "train_per_client": 200, "test_per_client": 40},
    "model": {"name": "digits-cnn"},
    "rounds": 3,
    "local": {"batch_size": 32, "lr": 0.5},
    "privacy": {"epsilon": 5, "delta": 1e-4, "noise": "seeded", "noise_seed": "5eed" * 16},
    "algorithm": {"name": "dp-ifca", "clusters": 2},
    "output": {"transcript": "full"},
}


@pytest.fixture(scope="session")
def by_network(tmp_path_factory) -> dpcfl.Run:
    """A finished run with processes."""
    return dpcfl.run(TINY, tmp_path_factory.mktemp("by-network"), progress=False)


@pytest.fixture(scope="session")
def in_process(tmp_path_factory) -> dpcfl.Run:
    """The same run in the test's own process."""
    return dpcfl.run(TINY, tmp_path_factory.mktemp("in-process"), "in-process", progress=False)


@pytest.fixture(scope="session")
def with_epsilon(tmp_path_factory) -> dpcfl.Run:
    """A finished run with an epsilon."""
    settings = {**TINY, "privacy": {"epsilon": 5, "delta": 1e-4}}
    return dpcfl.run(settings, tmp_path_factory.mktemp("with-epsilon"), "in-process", progress=False)


def interrupted(out: Path, federation: str = "in-process") -> dpcfl.Run:
    """A run that a callback stopped after its first round."""
    return dpcfl.run({**TINY, "rounds": 20}, out, federation, callbacks=[lambda metrics: False], progress=False)
