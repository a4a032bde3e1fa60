"""Keys of answers that are not stored stay in a run folder while the run can be resumed, and no longer."""

from __future__ import annotations

import sys

import pytest
from api_runs import TINY

import dpcfl_net as dpcfl
from dpcfl_net.privacy.ledger.journal import may_hold_keys, read_journal

WIDE = """
from torch import nn

def build(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4000), nn.ReLU(), nn.Linear(4000, classes))
"""


def keys_of(folder) -> list[bytes]:
    journals = {ledger: read_journal(ledger / "journal") for ledger in (folder / "ledgers").iterdir()}
    found = {path: [slot.key for slot in image.slots.values() if slot.key is not None] for path, image in journals.items()}
    assert all(may_hold_keys(path / "journal") == bool(keys) for path, keys in found.items())
    return [key for keys in found.values() for key in keys]


@pytest.mark.parametrize("federation", ["in-process", "network"])
def test_a_finished_run_of_a_large_model_holds_no_key_of_its_noise(tmp_path, monkeypatch, federation):
    """With a key that stayed in the folder, its reader could remove the noise of a release."""
    (tmp_path / "wide.py").write_text(WIDE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    document = {
        **TINY, "rounds": 2, "model": {"name": "wide:build"}, "algorithm": {"name": "global"},
        "privacy": {"epsilon": 5, "delta": 1e-4}, "output": {"transcript": "full"},
    }  # fmt: skip
    stopped = dpcfl.run(document, tmp_path / "runs", federation, progress=False, callbacks=[lambda metrics: False])
    assert stopped.state == "interrupted"
    written = b"".join((ledger / "journal").read_bytes() for ledger in (stopped.path / "ledgers").iterdir())
    kept = keys_of(stopped.path)
    assert kept
    assert all(key in written for key in kept)
    done = dpcfl.resume(stopped.path, progress=False)
    assert done.state == "finished"
    assert not keys_of(done.path)
    assert [check for check in done.verify() if check.holds is False] == []
    assert dpcfl.resume(done.path, progress=False).state == "finished"
