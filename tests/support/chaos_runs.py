"""Runs with a chaos file: start them, and read what they released, charged and suffered."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from conftest import assert_nothing_left, dpcfl, only_run, write_config
from run_results import job_of

from dpcfl_net.core import runlog
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.transport.keys import client_key

ROUNDS = 6
TINY = {
    "data": {"dataset": "digits", "clients": [1, 1, 1], "train_per_client": 200, "test_per_client": 40},
    "model": {"name": "linear"}, "rounds": ROUNDS, "algorithm": {"name": "dp-ifca", "clusters": 2},
}  # fmt: skip


def chaos(folder: Path, **sections: Any) -> Path:
    """Write a chaos file."""
    path = folder / "chaos.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"seed": 7, **sections}))
    return path


def faults(folder: Path) -> list[dict[str, Any]]:
    """The spans of all faults."""
    return [span for span in runlog.read(folder / "spans.jsonl") if span["what"].startswith("fault ")]


def kinds(folder: Path) -> Counter[str]:
    """How often each kind of fault happened."""
    return Counter(span["what"].removeprefix("fault ") for span in faults(folder))


def charges(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """What each ledger charged: (round, kind) in order."""
    return {
        ledger.name: [(line.round, line.kind) for line in read_ledger(ledger) if line.type == "debit"]
        for ledger in sorted((folder / "ledgers").iterdir())
    }


def assert_charged_as_planned(folder: Path) -> None:
    """Each ledger has exactly the slots of its client's plan, and `dpcfl verify` holds."""
    job = job_of(folder)
    for entry in job.protocol.roster:
        lines = read_ledger(folder / "ledgers" / client_key(entry.id))
        spent = Counter(name for line in lines if line.type == "debit" for name in line.slots)
        assert spent == Counter(slot.name for slot in job.algorithm.plan(entry)), entry.id
    checked = dpcfl("verify", folder)
    assert checked.returncode == 0, checked.stdout


def run(out: Path, plan: Path | None, settings: dict[str, Any], code: int = 0, timeout: float = 180) -> tuple[Path, str]:
    """Run a configuration. Returns its folder, and what the command printed."""
    more = [] if plan is None else ["--chaos", plan]
    done = dpcfl("run", write_config(out / "c", **settings), "--out", out / "runs", *more, timeout=timeout)
    assert done.returncode == code, done.stdout + done.stderr
    folder = only_run(out / "runs")
    assert_nothing_left(folder)
    return folder, done.stdout + done.stderr


def timed_run(out: Path, plan: Path | None, settings: dict[str, Any], timeout: float = 180) -> tuple[Path, float]:
    """Run a configuration to its end. Returns its folder, and the seconds that the command took."""
    began = time.monotonic()
    folder, _ = run(out, plan, settings, timeout=timeout)
    return folder, time.monotonic() - began
