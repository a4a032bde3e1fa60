"""A run of format 2: it opens for reading, and nothing goes on with its ledgers and messages, whose payload hashes are SHA-256."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import dpcfl as command
from earlier_format import as_format_2

import dpcfl_net as dpcfl
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.report.transcript_figures import transcript_figures
from dpcfl_net.runtime.aggregator import run_aggregator
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.runtime.coordinator import run_coordinator
from dpcfl_net.runtime.specs import AggregatorSpec, CoordinatorSpec

REFUSED = r"has format 2, and this version of dpcfl_net runs format 3.* finish the run with the version that started it"


@pytest.fixture(scope="module")
def earlier(by_network: dpcfl.Run, tmp_path_factory) -> dpcfl.Run:
    """A finished run of format 2."""
    folder = Path(shutil.copytree(by_network.path, tmp_path_factory.mktemp("earlier") / "run"))
    as_format_2(folder)
    return dpcfl.open_run(folder)


@pytest.fixture(scope="module")
def stopped(by_network: dpcfl.Run, tmp_path_factory) -> tuple[Path, Job]:
    """A stopped run of format 2, and its job."""
    folder = Path(shutil.copytree(by_network.path, tmp_path_factory.mktemp("stopped") / "run"))
    return folder, as_format_2(folder, "interrupted")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_metrics_models_report_and_ledgers_are_read(earlier: dpcfl.Run, by_network: dpcfl.Run):
    assert earlier.state == "finished"
    assert earlier.metrics.equals(by_network.metrics)
    assert earlier.models.keys() == by_network.models.keys() == {0, 1}
    for m, model in earlier.models.items():
        assert all(torch.equal(value, by_network.models[m][name]) for name, value in model.items())
    assert [line.round for line in earlier.ledger(0)] == [line.round for line in by_network.ledger(0)]
    assert earlier.report().stat().st_size > 10_000
    assert {figure.why for figure in transcript_figures(earlier.view)} == {
        "the transcript holds messages of wire protocol 1, and this version of dpcfl_net reads 2, whose payload hashes differ: "
        "read them with the version that recorded them"
    }


def test_verify_names_the_checks_that_it_does_not_make(earlier: dpcfl.Run):
    checks = earlier.verify()
    assert [(check.holds, check.what.partition(":")[0]) for check in checks] == [
        (True, "job signed by the operator, experiment matches its hash"),
        (None, "config.yaml is the configuration of the signed job"),
        (True, "ledgers"),
        (True, "ledgers hold nothing beyond the plan"),
        (True, "the signed job meets the conditions of its epsilon"),
        (True, "no finite epsilon, as the signed job says; that of the noisy updates alone is within the target"),
        (None, "run.json states the promise of the signed job"),
        (True, "transcript"),
        (None, "messages"),
    ]
    assert checks[-1].detail == (
        "not checked: the job has format 2, whose payload hashes are SHA-256: verify with the version that ran it"
    )


def test_a_finished_one_is_still_finished(earlier: dpcfl.Run):
    assert dpcfl.resume(earlier.path).state == "finished"


def test_resume_is_refused_before_anything_is_opened(stopped: tuple[Path, Job]):
    folder, _ = stopped
    before = content(folder)
    with pytest.raises(ConfigError, match=REFUSED) as raised:
        dpcfl.resume(folder, progress=False)
    assert not getattr(raised.value, "__notes__", []), "no advice to resume it"
    assert content(folder) == before


@pytest.mark.slow
def test_the_command_refuses_to_resume(stopped: tuple[Path, Job]):
    folder, _ = stopped
    done = command("run", "--resume", folder)
    assert done.returncode == 2
    assert "start a new run from its config.yaml" in done.stderr
    inspected = command("inspect", folder)
    assert inspected.returncode == 2
    assert "messages of wire protocol 1" in inspected.stderr


def test_each_process_refuses_the_job(stopped: tuple[Path, Job]):
    folder, job = stopped
    files, before = RunFolder(folder), content(folder)
    key = files.operator_key.read_text().strip()
    with pytest.raises(ConfigError, match=REFUSED):
        make_host(job, 0, files.ledgers)
    with pytest.raises(ConfigError, match=REFUSED):
        run_coordinator(CoordinatorSpec(files.protocol, key, "tcp://127.0.0.1:*", None, files.keys, folder))
    with pytest.raises(ConfigError, match=REFUSED):
        run_aggregator(AggregatorSpec(files.protocol, 0, key, "tcp://127.0.0.1:*", "tcp://127.0.0.1:1", files.keys, folder))
    assert content(folder) == before
