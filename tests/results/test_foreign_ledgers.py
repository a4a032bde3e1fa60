"""`dpcfl verify` reads whose ledger lies in a client's folder: a whole one of another client or job would pass for its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import dpcfl_net as dpcfl
from dpcfl_net.privacy.ledger.ledger_folder import lock
from dpcfl_net.results.verify import Check, verify_run

TRUSTED = {
    "name": "trusted", "rounds": 2, "model": {"name": "linear"}, "local": {"batch_size": 16, "lr": 0.5},
    "data": {"dataset": "digits", "clients": [4], "train_per_client": 30, "test_per_client": 10},
    "algorithm": {"name": "dp-fedavg", "sampling_rate": 1.0},
    "privacy": {"unit": "client", "trust": "trusted-server", "epsilon": 8, "delta": 1e-2},
}  # fmt: skip


def whole_ledgers(folder: Path) -> Check:
    return next(check for check in verify_run(folder) if check.what.startswith("ledgers: hash chains"))


def with_ledger(run: dpcfl.Run, folder: Path, name: str, other: Path) -> Path:
    """A copy of a run in which one ledger is another one, whole."""
    shutil.copytree(run.path, folder)
    shutil.rmtree(folder / "ledgers" / name)
    shutil.copytree(other, folder / "ledgers" / name)
    return folder


def test_a_ledger_of_another_client_or_job_is_noticed(with_epsilon: dpcfl.Run, by_network: dpcfl.Run, tmp_path: Path) -> None:
    """Equal plans fit, and lines of another job were left out: a client that charged nothing held, too."""
    assert whole_ledgers(with_epsilon.path).holds is True
    own, foreign = with_epsilon.path / "ledgers", by_network.path / "ledgers"
    for other, whose in ((own / "client_0001", "client 1, "), (foreign / "client_0000", "client 0, ")):
        folder = with_ledger(with_epsilon, tmp_path / other.parts[-3], "client_0000", other)
        found = whole_ledgers(folder)
        assert found.holds is False
        assert found.detail.startswith(f"client 0: the ledger in {folder}/ledgers/client_0000 belongs to {whose}job "), (
            found.detail
        )
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["curator", "client_0000"])
def test_a_trusted_server_with_the_ledger_of_another_run_is_noticed(tmp_path: Path, name: str) -> None:
    first, second = (dpcfl.run(TRUSTED, tmp_path / where, "in-process", progress=False) for where in ("first", "second"))
    assert not [check for check in first.verify() if check.holds is False]
    folder = with_ledger(first, tmp_path / "copy", name, second.path / "ledgers" / name)
    found = whole_ledgers(folder)
    assert (found.holds, second.job.protocol.run in found.detail) == (False, True), found.detail


@pytest.mark.parametrize("client", [0, 1])
def test_a_ledger_that_a_worker_holds_is_not_verified(by_network: dpcfl.Run, tmp_path: Path, client: int):
    """A worker that was started manually, without a coordinator, was not seen: its ledger was read while it may change."""
    folder = Path(shutil.copytree(by_network.path, tmp_path / "run"))
    ledger = folder / f"ledgers/client_{client:04d}"
    handle = lock(ledger)
    try:
        with pytest.raises(
            dpcfl.ConfigError, match=f"{ledger}: a process holds the ledger of client {client}: verify after it"
        ):
            verify_run(folder)
    finally:
        os.close(handle)
    assert all(check.holds for check in verify_run(folder))
    (ledger / "lock").unlink()
    assert all(check.holds for check in verify_run(folder))
