"""Attacks read the records that score them where the run read them, and a promise excepts what they show of these records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from conftest import dpcfl

from dpcfl_net.attacks import membership, reconstruction, selections
from dpcfl_net.core.errors import DataMissing
from dpcfl_net.experiment import job_files
from dpcfl_net.launch.cli.commands import attack as commands
from dpcfl_net.results.attack_results import AttackResult


@pytest.mark.parametrize("attack", [reconstruction.attack, membership.attack, selections.attack])
def test_an_attack_takes_the_data_folder_of_the_run_or_the_one_given(attack, finished_run, tmp_path, monkeypatch):
    """A run with `data.root` and without DPCFL_DATA could not be attacked: its data set was looked for elsewhere."""

    def missing(*arguments):
        raise DataMissing(f"not in {arguments[-1]}")

    folder = Path(shutil.copytree(finished_run, tmp_path / "run"))
    config = folder / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**settings, "data": {**settings["data"], "root": "/of/the/run"}}))
    monkeypatch.setattr(job_files, "open_set", missing)
    with pytest.raises(DataMissing, match=r"not in /of/the/run$"):
        attack(folder)
    with pytest.raises(DataMissing, match=r"not in /elsewhere$"):
        attack(folder, root="/elsewhere")


@pytest.mark.parametrize(("name", "excepted"), [("invert", True), ("membership", True), ("audit", False)])
def test_the_promise_of_a_run_excepts_what_an_attack_shows_of_its_records(name, excepted, finished_run, tmp_path):
    """The grid of `dpcfl attack invert` has training records, on the page that states epsilon; canaries are nobody's records."""
    folder = Path(shutil.copytree(finished_run, tmp_path / "run"))

    def said():
        lines = json.loads((folder / "run.json").read_text())["privacy"]["not_covered"]
        return [line for line in lines if line.startswith("results of attacks")]

    assert said() == []
    for _ in range(2):
        commands._keep(folder, AttackResult(name, "Title", "Headline."))
    lines = said()
    assert len(lines) == excepted
    assert ("they are scored by the clients" in (folder / "report.html").read_text()) == excepted
    (folder / "run.json").unlink()
    assert dpcfl("report", folder).returncode == 0  # writes run.json again
    assert said() == lines
