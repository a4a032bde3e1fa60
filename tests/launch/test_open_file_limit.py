"""Runs under a low limit on open files: each process raises its own, and says so where the system does not allow it."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import dpcfl, only_run
from run_results import last_models

from dpcfl_net.core.open_files import OTHERS, files_for
from dpcfl_net.launch.placement import parents
from dpcfl_net.launch.placement.base import ClientRange
from dpcfl_net.launch.placement.local import LocalLauncher
from dpcfl_net.runtime.specs import WorkerSpec

FORTY = [
    "data.clients=[20, 10, 10]", "data.train_per_client=30", "data.test_per_client=2", "local.batch_size=8", "rounds=2",
    "data.shift=none",
]  # fmt: skip
LIMIT = 70  # the parent of 40 workers has about 90 open files


def limited(folder, hard):
    return dpcfl(
        "run", "quickstart", *FORTY, "algorithm=local", "--out", folder,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, hard)),
    )  # fmt: skip


@pytest.mark.slow
def test_many_workers_start_under_a_low_limit_that_can_be_raised(tmp_path):
    done = limited(tmp_path, 4096)
    assert done.returncode == 0, done.stderr


def test_a_limit_that_is_too_low_for_any_run_is_named(tmp_path):
    done = limited(tmp_path, LIMIT)
    assert done.returncode == 4
    assert done.stderr == f"error: this system allows a process {LIMIT} open files (ulimit -Hn); 128 are needed\n"


def test_more_workers_than_the_system_allows_open_files_are_refused_with_the_limit(tmp_path):
    """The parent of 70 workers has about 150 open files."""
    done = dpcfl(
        "run", "quickstart", *FORTY[1:], "algorithm=local", "data.clients=[40, 20, 10]", "--out", tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)),
    )  # fmt: skip
    assert done.returncode == 4
    assert "too many open files (raise the limit: ulimit -n)" in done.stderr


@pytest.mark.slow
def test_a_run_in_one_process_closes_ledgers_under_a_low_limit_and_has_the_same_bits(tmp_path):
    """286 files are enough for 10 clients at once."""
    models = {}
    for hard in (286, 4096):
        done = dpcfl(
            "run", "quickstart", *FORTY, "algorithm=global", "runtime.federation=in-process", "privacy.noise=seeded",
            f"privacy.noise_seed={'ab' * 32}", "--out", tmp_path / str(hard),
            preexec_fn=lambda hard=hard: resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 256), hard)),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        models[hard] = last_models(only_run(tmp_path / str(hard)))
    assert models[286] == models[4096]
    verified = dpcfl("verify", only_run(tmp_path / "286"))
    assert verified.returncode == 0, verified.stdout


def test_a_launcher_raises_its_limit_with_the_number_of_its_workers(monkeypatch):
    """It holds a handle and a socket of each."""
    monkeypatch.setattr(parents, "fork_worker", lambda *_: SimpleNamespace(sentinel=9, log=Path("log")))
    here = Path()
    launcher = LocalLauncher(WorkerSpec(here, 0, "tcp://127.0.0.1:1", None, here, "", here), here, {})
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OTHERS, before[1]))
    try:
        for client in range(100):
            launcher.start(ClientRange(range(client, client + 1)))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= files_for(100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
