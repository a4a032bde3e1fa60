"""A run whose ledgers were removed while it was stopped is not resumed with empty ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import SMALL

import dpcfl_net as api
from dpcfl_net.core.errors import LedgerError

SETTINGS = {
    **SMALL,
    "data": {"dataset": "digits", "clients": [2, 1], "train_per_client": 100, "test_per_client": 20},
    "model": {"name": "linear"},
    "rounds": 3,
    "algorithm": {"name": "global"},
    "output": {"transcript": "off"},
}
TRUSTED = {
    "privacy": {"epsilon": 10, "delta": 0.1, "unit": "client", "trust": "trusted-server", "noise": "seeded", "noise_seed": "5eed" * 16},
    "algorithm": {"name": "dp-fedavg", "sampling_rate": 0.5},
}  # fmt: skip


def stopped(out: Path, federation: str, **sections) -> Path:
    """A run that was stopped after its second round."""
    run = api.run({**SETTINGS, **sections}, out, federation, callbacks=[lambda metrics: metrics.round < 2], progress=False)
    assert run.state == "interrupted"
    return run.path


@pytest.mark.parametrize("federation", ["in-process", pytest.param("network", marks=pytest.mark.slow)])
@pytest.mark.parametrize("removed", ["one folder", "all files of one", "all"])
def test_a_client_that_has_answered_does_not_go_on_without_its_ledger(tmp_path, federation, removed):
    folder = stopped(tmp_path / "runs", federation)
    away = {"one folder": "ledgers/client_0001", "all files of one": "ledgers/client_0001", "all": "ledgers"}[removed]
    shutil.copytree(folder, tmp_path / "whole")
    shutil.rmtree(folder / away)
    if removed == "all files of one":
        (folder / away).mkdir()
    first = "client_0000" if removed == "all" else "client_0001"
    with pytest.raises(LedgerError, match=f"{first} holds no ledger, but client {int(first[-1])} has answered") as error:
        api.resume(folder, progress=False)
    assert (error.value.code, error.value.exit_code) == ("ledger-missing", 3)
    assert not (folder / "ledgers" / first / "ledger.jsonl").exists()
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "whole", folder)  # restored
    assert api.resume(folder, progress=False).state == "finished"


def test_a_trusted_server_does_not_go_on_without_its_ledger_but_clients_that_no_coin_drew_have_none(tmp_path):
    folder = stopped(tmp_path / "runs", "in-process", **TRUSTED)
    shutil.copytree(folder, tmp_path / "whole")
    shutil.rmtree(folder / "ledgers" / "curator")
    with pytest.raises(LedgerError, match="curator holds no ledger, but the trusted server has released sums"):
        api.resume(folder, progress=False)
    assert api.resume(tmp_path / "whole", progress=False).state == "finished"


def test_a_run_that_was_stopped_before_its_first_round_makes_its_ledgers(tmp_path):
    folder = stopped(tmp_path / "runs", "in-process")
    for name in ("ledgers", "checkpoints"):
        shutil.rmtree(folder / name)
    for name in ("metrics.jsonl", "clusters.jsonl"):
        (folder / name).unlink()
    assert api.resume(folder, progress=False).state == "finished"
