"""What commands say about a run that another process runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folder import write_round, write_start

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.locks import run_lock
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.results.result import read_result
from dpcfl_net.results.summary import read_document
from dpcfl_net.results.verify import verify_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run whose run.json is that of its start, after two rounds."""
    folder = write_start(tmp_path / "a run", 6)
    for at in (1, 2):
        write_round(folder, at, 6)
    return folder


def test_completed_rounds_are_those_in_metrics_until_run_json_has_them(folder: Path) -> None:
    with run_lock(folder):
        found = read_document(folder)
    assert (found["state"], found["rounds_done"]) == ("running", 2)
    found = read_document(folder)
    assert (found["state"], found["rounds_done"]) == ("interrupted", 2)


@pytest.mark.parametrize(("before", "expected"), [(3.0, 8.2), (60.0, 60.0)])
def test_a_killed_run_has_taken_the_seconds_of_its_rounds(folder: Path, before: float, expected: float) -> None:
    """Those in run.json end where it started: a resumed run would count from there."""
    run = RunFolder(folder).run
    run.write_text(json.dumps({**json.loads(run.read_text()), "wall_s": before}))
    assert read_document(folder)["wall_s"] == pytest.approx(expected)


def test_a_comparison_advises_to_resume_only_a_run_that_has_ended(folder: Path) -> None:
    with run_lock(folder), pytest.raises(ConfigError, match=r"is running after 2 rounds; .*: dpcfl watch '.*/a run'$"):
        read_result(folder)
    with pytest.raises(ConfigError, match=r"is interrupted after 2 rounds; .*: dpcfl run --resume '.*/a run'$"):
        read_result(folder)


def test_a_run_is_verified_only_after_it_has_ended(folder: Path) -> None:
    """A release that arrived between the reads of ledger and transcript was called one without a debit."""
    with run_lock(folder), pytest.raises(ConfigError, match=r"is running: verify it after it has ended; .*dpcfl watch '"):
        verify_run(folder)
