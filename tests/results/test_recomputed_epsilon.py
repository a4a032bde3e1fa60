"""`dpcfl verify` computes epsilon again, from the charges in the ledgers and from the whole signed plan."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import rewriting
from test_foreign_ledgers import TRUSTED

import dpcfl_net as dpcfl
from dpcfl_net.experiment.job_files import Job, write_job
from dpcfl_net.results.verify import Check, verify_run

WITHIN = "epsilon recomputed from ledgers and plan is within the target"
NOISY_PART = "no finite epsilon, as the signed job says; that of the noisy updates alone is within the target"
PROMISE = "run.json states the promise of the signed job"
UNPROTECTED = {
    "name": "raw", "rounds": 2, "model": {"name": "linear"}, "local": {"batch_size": 16, "lr": 0.5},
    "data": {"dataset": "digits", "clients": [1, 1], "train_per_client": 60, "test_per_client": 10},
    "algorithm": {"name": "f-cdpfl", "clusters": 2}, "privacy": {"epsilon": 5, "delta": 1e-3}, "output": {"transcript": "off"},
}  # fmt: skip


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


def test_a_charge_without_a_guarantee_that_the_job_does_not_declare_is_noticed(with_epsilon: dpcfl.Run, tmp_path: Path) -> None:
    def unprotected(lines: list[dict[str, Any]]) -> None:
        lines[-1]["events"] = [{"type": "Unprotected", "reason": "sent as it is"} for _ in lines[-1]["events"]]

    folder = Path(shutil.copytree(with_epsilon.path, tmp_path / "run"))
    rewriting.rewrite_ledger(folder, 0, unprotected, counter=True)
    assert recomputed(folder).holds is False
    assert recomputed(folder, PROMISE).holds is False, "what it has spent is not finite"


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


def test_charges_of_a_trusted_server_that_cost_more_than_the_target_are_noticed(tmp_path: Path) -> None:
    folder = dpcfl.run(TRUSTED, tmp_path, "in-process", progress=False).path
    before = recomputed(folder)
    assert (before.holds, before.detail[:11]) == (True, "charged 7.9"), "the clients' ledgers hold raw releases only"
    rewriting.rewrite_ledger(folder, "curator", one_more_charge, counter=True)
    found, beyond = recomputed(folder), recomputed(folder, "ledgers hold nothing beyond the plan")
    assert (found.holds, float(found.detail.split(", ")[0].split()[-1]) > 8) == (False, True), found.detail
    assert beyond == Check(beyond.what, False, "the trusted server: round charged 3 times, planned 2")
    whole = "ledgers: hash chains and counters whole"
    assert recomputed(folder, whole).detail.startswith("5 ledgers, ")
    shutil.rmtree(folder / "ledgers/client_0001")  # clients of a trusted server may have none
    assert (recomputed(folder, whole).holds, recomputed(folder, whole).detail[:11]) == (True, "4 ledgers, ")
    shutil.rmtree(folder / "ledgers/curator")
    config = folder / "config.yaml"
    for text in (config.read_text(), config.read_text().replace("in-process", "network")):
        config.write_text(text)
        gone = recomputed(folder, whole)
        assert gone.holds is False
        assert gone.detail.startswith(f"the trusted server: no ledger in {folder}/ledgers/curator: it never started")


def test_what_participations_cost_is_the_largest_of_all_clients(tmp_path: Path) -> None:
    asynchronous = {"name": "dp-fedavg", "asynchronous": {"buffer": 2, "participations": 2}}
    folder = dpcfl.run({**TRUSTED, "algorithm": asynchronous}, tmp_path, "in-process", progress=False).path
    once = recomputed(folder)
    assert (once.holds, once.detail[:11]) == (True, "charged 4.9"), "each client took part once"

    def again(lines: list[dict[str, Any]]) -> None:
        slot = "participation of client 3"
        more = {"round": 3, "id": "0" * 64, "slots": [slot], "events": lines[-1]["events"][:1]}
        lines.append({**lines[-1], **more, "spent": {**lines[-1]["spent"], slot: 2}})

    rewriting.rewrite_ledger(folder, "curator", again, counter=True)
    twice = recomputed(folder)
    assert (twice.holds, twice.detail.startswith("charged 7.99954, whole plan 7.99954, ")) == (True, True), twice.detail


@pytest.mark.parametrize("own", [{"adjacency": "replace-one"}, {"accountant": "rdp"}], ids=["adjacency", "accountant"])
def test_epsilon_is_recomputed_as_the_job_says(tmp_path: Path, own: dict[str, str]) -> None:
    document = {**UNPROTECTED, "algorithm": {"name": "local"}, "privacy": {**UNPROTECTED["privacy"], **own}}
    found = recomputed(dpcfl.run(document, tmp_path, "in-process", progress=False).path)
    charged, plan = (float(part.split()[-1]) for part in found.detail.split(", ")[:2])
    assert (found.holds, charged == plan, 4.99 < plan <= 5) == (True, True, True), found.detail


def test_the_noisy_part_of_a_run_without_a_guarantee_is_held_to_the_target(tmp_path: Path) -> None:
    folder = dpcfl.run(UNPROTECTED, tmp_path, "in-process", progress=False).path
    found = recomputed(folder, NOISY_PART)
    assert (found.holds, found.detail[:15]) == (True, "charged 4.99964"), found.detail
    assert found.detail.endswith(
        "; cluster index unprotected: the argmin of the training loss is sent as it is, and one record can flip it"
    )
    document = folder / "run.json"
    text = document.read_text()
    document.write_text(text.replace('"epsilon_spent": null', '"epsilon_spent": 4.99964'))
    assert recomputed(folder, PROMISE).detail == "epsilon_spent: 4.99964 here, – by job and ledgers"
    rewriting.rewrite_ledger(folder, 0, one_more_charge, counter=True)
    found = recomputed(folder, NOISY_PART)
    assert (found.holds, float(found.detail.split(", ")[0].split()[-1]) > 5) == (False, True), found.detail
