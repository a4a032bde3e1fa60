"""Shared small runs of the Python API; the fixtures are registered in tests/conftest.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_runs import shared_run

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
def by_network(tmp_path_factory) -> Iterator[dpcfl.Run]:
    """A finished run with processes."""
    with shared_run(tmp_path_factory, "by-network", lambda out: dpcfl.run(TINY, out, progress=False).path) as folder:
        yield dpcfl.open_run(folder)


@pytest.fixture(scope="session")
def in_process(tmp_path_factory) -> Iterator[dpcfl.Run]:
    """The same run in the test's own process."""
    with shared_run(tmp_path_factory, "in-process", lambda out: _run_here(TINY, out)) as folder:
        yield dpcfl.open_run(folder)


@pytest.fixture(scope="session")
def with_epsilon(tmp_path_factory) -> Iterator[dpcfl.Run]:
    """A finished run with an epsilon."""
    settings = {**TINY, "privacy": {"epsilon": 5, "delta": 1e-4}}
    with shared_run(tmp_path_factory, "with-epsilon", lambda out: _run_here(settings, out)) as folder:
        yield dpcfl.open_run(folder)


def _run_here(settings: dict, out: Path) -> Path:
    return dpcfl.run(settings, out, "in-process", progress=False).path


def interrupted(out: Path, federation: str = "in-process") -> dpcfl.Run:
    """A run that a callback stopped after its first round."""
    return dpcfl.run({**TINY, "rounds": 20}, out, federation, callbacks=[lambda metrics: False], progress=False)
