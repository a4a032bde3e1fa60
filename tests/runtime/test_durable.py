"""`runtime.durable: false` skips the flushes of ledgers, unless the host of the worker insists, and the statement says so."""

from __future__ import annotations

import json
import os
from collections import Counter

import pytest
from conftest import SMALL, dpcfl, write_config

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.types import State
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.job_files import write_job
from dpcfl_net.launch.placement.placements import worker_terms
from dpcfl_net.results import summary
from dpcfl_net.results.summary import run_document
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.runtime.client_hosts import INSIST, make_host
from dpcfl_net.runtime.one_process import federation
from dpcfl_net.runtime.specs import WorkerTerms
from dpcfl_net.transport.keys import make_keys


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    settings = config.resolve({**SMALL, "model": {"name": "linear"}, "algorithm": {"name": "global"}})
    make_keys(folder, settings.data.client_count)
    return make_job(settings, folder)


@pytest.fixture
def flushes(monkeypatch):
    """Counts the flushes of this process by the folder that holds the file."""
    count: Counter[str] = Counter()

    def counted(real):
        def flush(fd):
            count[os.readlink(f"/proc/self/fd/{fd}")] += 1
            return real(fd)

        return flush

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return count


@pytest.mark.parametrize(("durable", "insists", "flushed"), [(True, "", True), (False, "", False), (False, "1", True)])
def test_a_worker_flushes_its_ledger_unless_the_run_says_no_and_its_host_does_not_insist(
    job, tmp_path, flushes, monkeypatch, durable, insists, flushed
):
    monkeypatch.setenv(INSIST, insists)
    make_host(job, 0, tmp_path / "ledgers", terms=WorkerTerms(durable=durable)).close()
    assert any(path.startswith(str(tmp_path)) for path in flushes) == flushed


@pytest.mark.parametrize("durable", [True, False])
def test_a_checkpoint_is_written_in_any_case_and_flushed_if_the_run_is_durable(tmp_path, flushes, durable):
    import numpy as np

    checkpoints = Checkpoints(tmp_path, durable=durable)
    checkpoints.write(1, State(np.zeros((1, 3), "f4"), [0]))
    checkpoints.flush()
    assert checkpoints.newest()[0] == 1
    assert bool(flushes) == durable


def test_the_statement_names_a_crash_of_the_machine(job, tmp_path):
    make_keys(tmp_path / "keys", len(job.protocol.roster))
    write_job(job, tmp_path, tmp_path / "keys")
    about = {"state": "finished", "wall_s": 1.0, "processes": 1, "replace_one": None, "devices": {}}
    lists = [run_document(tmp_path, job, durable=durable, **about)["privacy"]["not_covered"] for durable in (True, False)]
    (more,) = set(lists[1]) - set(lists[0])
    assert "crash of the machine" in more
    assert "runtime.durable" in more


@pytest.mark.parametrize("scope", ["run", "dataset"])
def test_a_run_in_one_process_flushes_for_a_record_book_alone_and_says_so(tmp_path, flushes, scope):
    ledger = {"scope": "dataset", "root": str(tmp_path / "book")} if scope == "dataset" else {}
    privacy, model, algorithm = {"epsilon": 5, "delta": 1e-4}, {"name": "linear"}, {"name": "global"}
    document = {**SMALL, "model": model, "algorithm": algorithm, "privacy": privacy, "ledger": ledger, "output": {}}
    settings = config.resolve({**document, "runtime": {"federation": "in-process"}})
    make_keys(tmp_path / "keys", settings.data.client_count)
    job = make_job(settings, tmp_path / "keys")
    flushes.clear()
    with federation(job, tmp_path / "ledgers", terms=worker_terms(settings)) as fed:
        assert fed.hosts[0] is not None
    flushed = {kind for kind in ("book", "ledgers") if any(path.startswith(str(tmp_path / kind)) for path in flushes)}
    assert flushed == ({"book", "ledgers"} if scope == "dataset" else set())
    assert summary.flushes(settings.runtime.model_dump(), job) == (scope == "dataset")


def test_a_report_keeps_the_line_on_a_crash_of_the_machine(tmp_path):
    document = {**SMALL, "data": {**SMALL["data"], "train_per_client": 40}, "model": {"name": "linear"}, "rounds": 2}
    runtime = {"federation": "in-process", "durable": False}
    path = write_config(tmp_path, **{**document, "algorithm": {"name": "global"}, "runtime": runtime, "output": {}})
    assert dpcfl("run", path, "--out", tmp_path).returncode == 0
    (found,) = tmp_path.rglob("run.json")
    lines = json.loads(found.read_text())["privacy"]["not_covered"]
    assert dpcfl("report", found.parent).returncode == 0
    assert json.loads(found.read_text())["privacy"]["not_covered"] == lines
    assert "crash of the machine" in " ".join(lines)


def test_a_guarantee_over_all_runs_needs_durable_charges(tmp_path):
    with pytest.raises(ConfigError, match=r"runtime\.durable is false: ledger\.scope 'dataset'"):
        config.resolve({**SMALL, "ledger": {"scope": "dataset", "root": str(tmp_path)}, "runtime": {"durable": False}})
