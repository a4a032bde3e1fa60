"""Attacks read the records that score them where the run read them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from dpcfl_net.attacks import membership, reconstruction, recorded_choices, selections
from dpcfl_net.core.errors import DataMissing


@pytest.mark.parametrize(
    ("attack", "reader", "name"),
    [
        (reconstruction.attack, reconstruction, "open_set"),
        (membership.attack, membership, "open_set"),
        (selections.attack, recorded_choices, "client_slice"),
    ],
)
def test_an_attack_takes_the_data_folder_of_the_run_or_the_one_given(attack, reader, name, finished_run, tmp_path, monkeypatch):
    """A run with `data.root` and without DPCFL_DATA could not be attacked: its data set was looked for elsewhere."""

    def missing(*arguments):
        raise DataMissing(f"not in {arguments[-1]}")

    folder = Path(shutil.copytree(finished_run, tmp_path / "run"))
    config = folder / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**settings, "data": {**settings["data"], "root": "/of/the/run"}}))
    monkeypatch.setattr(reader, name, missing)
    with pytest.raises(DataMissing, match=r"not in /of/the/run$"):
        attack(folder)
    with pytest.raises(DataMissing, match=r"not in /elsewhere$"):
        attack(folder, root="/elsewhere")
