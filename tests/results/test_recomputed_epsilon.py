"""`dpcfl verify` computes epsilon again, from the charges in the ledgers and from the whole signed plan."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import rewriting

import dpcfl_net as dpcfl
from dpcfl_net.experiment.job_files import Job, write_job
from dpcfl_net.results.verify import Check, verify_run

WITHIN = "epsilon recomputed from ledgers and plan is within the target"


def recomputed(folder: Path, what: str = WITHIN) -> Check:
    return next(check for check in verify_run(folder) if check.what == what)


def one_more_charge(lines: list[dict[str, Any]]) -> None:
    spent = {name: count + lines[-1]["slots"].count(name) for name, count in lines[-1]["spent"].items()}
    lines.append({**lines[-1], "round": lines[-1]["round"] + 1, "id": "0" * len(lines[-1]["id"]), "spent": spent})


def test_charges_of_one_client_that_cost_more_than_the_target_are_noticed(with_epsilon: dpcfl.Run, tmp_path: Path) -> None:
    assert recomputed(with_epsilon.path).holds is True
    folder = Path(shutil.copytree(with_epsilon.path, tmp_path / "run"))
    rewriting.rewrite_ledger(folder, 1, one_more_charge, counter=True)
    found = recomputed(folder)
    assert found.holds is False
    charged, plan = (float(part.split()[-1]) for part in found.detail.split(", ")[:2])
    assert plan <= 5 < charged, found.detail


def test_a_signed_plan_that_costs_more_than_the_target_is_noticed(with_epsilon: dpcfl.Run, tmp_path: Path) -> None:
    """A worker refuses such a job; a folder that claims to be a run of it may hold no charge at all."""
    folder = Path(shutil.copytree(with_epsilon.path, tmp_path / "run"))
    job = with_epsilon.job
    target = job.protocol.privacy.model_copy(update={"epsilon": 4.0})
    write_job(Job(job.protocol.model_copy(update={"privacy": target}), job.experiment), folder, folder / "keys")
    found = recomputed(folder)
    assert found.holds is False
    assert found.detail.startswith("charged 0, whole plan 4.9"), found.detail
    assert found.detail.endswith("target 4 at delta 0.0001"), found.detail
