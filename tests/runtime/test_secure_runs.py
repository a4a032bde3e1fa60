"""Whole runs with secure sums: the same bits in one process and in many, with drop-outs and crashes at each stage, and nothing charged twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rewriting
import secure_runs
from chaos_runs import assert_charged_as_planned, chaos, charges, kinds, run
from conftest import dpcfl
from run_results import last_models
from secure_runs import SAMPLE, STAGES, charged, make, opened, played

from dpcfl_net.attacks import updates
from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.payload_hash import payload_hash
from dpcfl_net.core.tensors import buffers, split
from dpcfl_net.federation.gate import request_id
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.ledger.ledger import Ledger
from dpcfl_net.results.privacy_statement import statement
from dpcfl_net.results.summary import read_run_job
from dpcfl_net.results.verify import verify_run
from dpcfl_net.runtime.checkpoint import Checkpoints

FOUR = {"dataset": "digits", "clients": [4], "train_per_client": 50, "test_per_client": 20, "shift": "none"}
TWO_CLUSTERS = {**FOUR, "clients": [3, 3], "shift": "rotation"}
COINS = {"name": "dp-fedavg", "sampling_rate": 0.5}
IN_PROCESS = {"federation": "in-process"}
RECORDED = {"transcript": "full"}


def settings(algorithm: dict[str, Any], privacy: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A configuration of four clients, or of two clusters of three."""
    data = TWO_CLUSTERS if privacy is SAMPLE else FOUR
    return secure_runs.document(algorithm, privacy, **{"data": data, **changes})


def events(folder: Path) -> dict[str, list[Any]]:
    """What each ledger was charged for, in order."""
    return {
        ledger.name: [(line.round, line.kind, line.slots, line.events) for line in read_ledger(ledger) if line.type == "debit"]
        for ledger in sorted((folder / "ledgers").iterdir())
    }


def sums(folder: Path) -> list[str]:
    """The diagnostic of each round's sums."""
    found = {line["round"]: line["diagnostics"] for line in runlog.read(folder / "clusters.jsonl") if "diagnostics" in line}
    return [shown.get("secure sum") or shown.get("secure sums") for _, shown in sorted(found.items())]


def state_of(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text())["state"])


@pytest.fixture(scope="module")
def networked(tmp_path_factory) -> Path:
    """A finished run of four workers with secret coins, with its transcript."""
    folder, _ = run(tmp_path_factory.mktemp("networked"), None, settings(COINS, output=RECORDED))
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The same run in one process."""
    folder, _ = run(tmp_path_factory.mktemp("alone"), None, settings(COINS, runtime=IN_PROCESS))
    return folder


# ---- the same bits


def test_one_process_and_five_give_the_same_bits_and_charges(networked, alone):
    assert last_models(networked) == last_models(alone)
    assert events(networked) == events(alone)
    assert_charged_as_planned(networked)
    assert sums(networked) == ["ok"] * 3


RUNS = {
    "visible": settings({**COINS, "sampling": "visible"}, rounds=4),  # two cycles, so that all slots are used
    "prox": settings({"name": "dp-fedprox", "sampling_rate": 0.5}),
    "fedper": settings({"name": "dp-fedper", "sampling_rate": 0.5}, model={"name": "digits-cnn"}),
    **{
        f"rr {base}": settings(
            {"name": "rr-cluster", "base": base, "guarantee": "expected", "sampling_rate": 0.5, "clusters": 2, "min_cluster_size": 1}
        )
        for base in ("ifca", "fesem", "fedcam")
    },
    "global": settings({"name": "global"}, SAMPLE),
    "oracle": settings({"name": "oracle"}, SAMPLE),
    "dp-ifca": settings({"name": "dp-ifca", "clusters": 2}, SAMPLE),
    "r-dpcfl 2": settings({"name": "r-dpcfl", "clusters": 2, "secure_from": 2}, SAMPLE),
    "r-dpcfl 4": settings({"name": "r-dpcfl", "clusters": 2, "secure_from": 4}, SAMPLE, rounds=5),
}  # fmt: skip


@pytest.mark.slow  # one algorithm above, and all of them in one process in test_secure_algorithms.py
@pytest.mark.parametrize("name", RUNS)
def test_every_algorithm_gives_the_same_bits_over_the_network(tmp_path, name):
    network, _ = run(tmp_path / "network", None, RUNS[name])
    alone, _ = run(tmp_path / "alone", None, {**RUNS[name], "runtime": IN_PROCESS})
    assert last_models(network) == last_models(alone)
    assert events(network) == events(alone)
    assert_charged_as_planned(network)
    assert set(sums(network)) <= {None, "ok"}


# ---- drop-outs


@pytest.mark.slow  # drop-outs at each stage in one process: test_secure_algorithms.py
def test_clients_that_are_cut_off_are_not_in_the_sum_and_too_few_abort_the_round(tmp_path):
    """Three of four must answer. Over the network the sums are those of one process in which the same clients are not asked."""
    plan = chaos(tmp_path, partitions=[{"clients": [1, 2], "rounds": [2, 2]}, {"clients": [3], "rounds": [3, 3]}])
    folder, _ = run(tmp_path / "run", plan, settings(COINS, rounds=4, runtime={"quorum": 0.5, "round_timeout_s": 2}))
    assert sums(folder) == ["ok", "2 of 4 clients sent keys, needs 3", "ok", "ok"]
    gone = {(2, "secure_keys"): [1, 2], (3, "secure_keys"): [3]}
    job = make(tmp_path / "alone", COINS, data=FOUR, rounds=4)
    states = played(job, tmp_path / "alone", quorum=0.5, unasked=gone)
    assert np.array_equal(states[2].models, states[1].models)
    assert last_models(folder) == states[-1].models.tobytes()
    found = charges(folder)
    assert found == {name: charged(tmp_path / "alone", client) for client, name in enumerate(found)}
    checked = dpcfl("verify", folder)
    assert checked.returncode == 0, checked.stdout
    report = dpcfl("report", folder)
    assert report.returncode == 0, report.stderr
    page = (folder / "report.html").read_text()
    assert "2 of 4 clients sent keys, needs 3" in page


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_workers_that_are_stopped_at_a_stage_cost_the_round_at_most(tmp_path, stage, count):
    stops = [{"stop": f"client {c}", "at": {"round": 2, "step": "charged", "task": stage}, "seconds": 8} for c in range(count)]
    # At most three timeouts fall into the stop, so that the last rounds begin long after it; a healthy client has time on a busy machine.
    limits, rounds = {"quorum": 0.5, "round_timeout_s": 3}, 9
    kept = {"keep_checkpoints": rounds}
    folder, _ = run(tmp_path, chaos(tmp_path, processes=stops), settings(COINS, rounds=rounds, runtime=limits, output=kept))
    assert state_of(folder) == "finished"
    found = sums(folder)
    assert (found[0], found[-1]) == ("ok", "ok")
    assert all(text == "ok" or "needs 3" in text or "too few valid shares" in text for text in found)
    states = Checkpoints(folder / "checkpoints")
    assert states.rounds() == list(range(1, rounds + 1))
    for t in range(2, rounds + 1):
        if found[t - 1] != "ok":
            assert states.read(t).models.tobytes() == states.read(t - 1).models.tobytes()
    for lines in charges(folder).values():
        assert len(lines) == len(set(lines))
    checked = dpcfl("verify", folder)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
def test_a_worker_that_is_killed_and_does_not_come_back_is_left_out_of_the_sums(tmp_path):
    """It was charged in round 2, and its vector had not left: answers wait for the deadline."""
    plan = chaos(tmp_path, processes=[{"kill": "client 3", "at": {"round": 2, "step": "charged", "task": "masked_update"}}])
    limits = {"quorum": 0.5, "round_timeout_s": 30, "max_restarts": 0}
    local = {**secure_runs.WITH_COINS, "deadline_s": 1.0}
    folder, _ = run(tmp_path / "run", plan, settings(COINS, local=local, runtime=limits))
    gone = {(2, "masked_update"): [3]}
    job = make(tmp_path / "alone", COINS, data=FOUR, local=local)
    states = played(job, tmp_path / "alone", quorum=0.5, unheard=gone, unasked={(3, "secure_keys"): [3]})
    assert sums(folder) == ["ok"] * 3
    assert last_models(folder) == states[-1].models.tobytes()
    found = charges(folder)
    assert found == {name: charged(tmp_path / "alone", client) for client, name in enumerate(found)}
    checked = dpcfl("verify", folder)
    assert checked.returncode == 0, checked.stdout


# ---- crashes


class Crashed(Exception):
    """The process ends here."""


@pytest.mark.parametrize("moment", ["before the debit", "after the debit", "after the answer is stored"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_crashes_at_any_stage_answers_with_equal_bytes_and_is_charged_once(tmp_path, monkeypatch, stage, moment):
    job = make(tmp_path / "crashed", COINS, data=FOUR, rounds=2)
    original = getattr(Ledger, "store" if "stored" in moment else "debit")
    seen: list[str] = []

    def crash(self: Ledger, *args: Any, **more: Any) -> Any:
        if "stored" in moment:
            kind = self.entries[-1].kind
        else:
            kind = more["kind"]
        if kind == stage:
            seen.append(kind)
        if kind != stage or len(seen) != 6:  # the second client in the second round
            return original(self, *args, **more)
        if moment != "before the debit":
            original(self, *args, **more)
        raise Crashed

    monkeypatch.setattr(Ledger, "store" if "stored" in moment else "debit", crash)
    with opened(job, tmp_path / "crashed") as fed:
        fed.round = 1
        first = job.algorithm.round(job.algorithm.start(fed), 1, fed)
        fed.round = 2
        with pytest.raises(Crashed):
            job.algorithm.round(first, 2, fed)
    monkeypatch.undo()
    with opened(job, tmp_path / "crashed") as fed:
        fed.round = 2
        second = job.algorithm.round(first, 2, fed)
    undisturbed = played(make(tmp_path / "alone", COINS, data=FOUR, rounds=2), tmp_path / "alone")
    assert second.diagnostics == {"secure sum": "ok", "survivors": 4}
    assert np.array_equal(second.models, undisturbed[-1].models)
    for client in range(4):
        assert charged(tmp_path / "crashed", client) == [(t, kind) for t in (1, 2) for kind in STAGES]


def assert_undisturbed(folder: Path, undisturbed: Path, kills: int) -> None:
    """A run in which all answered in the end has the bits and charges of the undisturbed one."""
    assert kinds(folder)["kill"] == kills
    assert sums(folder) == ["ok"] * 3
    assert last_models(folder) == last_models(undisturbed)
    assert events(folder) == events(undisturbed)
    assert_charged_as_planned(folder)


@pytest.mark.slow  # crashes at each stage in one process: above
def test_workers_and_the_coordinator_are_killed_at_every_stage_of_one_run(tmp_path, networked):
    moments = [
        ("client 0", 1, "charged", "secure_keys"), ("client 1", 1, "charged", "secure_shares"), ("client 2", 1, "answered", "masked_update"),
        ("coordinator", 2, "sent", "masked_update"), ("client 3", 2, "charged", "masked_update"),
        ("client 0", 3, "sent", "secure_survivors"), ("client 1", 3, "charged", "secure_unmask"), ("coordinator", 3, "answered", "secure_unmask"),
    ]  # fmt: skip
    kills = [{"kill": who, "at": {"round": t, "step": step, "task": task}} for who, t, step, task in moments]
    folder, _ = run(tmp_path, chaos(tmp_path, processes=kills), settings(COINS, output=RECORDED, runtime={"max_restarts": 5}))
    assert_undisturbed(folder, networked, len(moments))


@pytest.mark.slow
@pytest.mark.parametrize("who", ["client 1", "coordinator", "all"])
@pytest.mark.parametrize("step", ["sent", "charged", "answered"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_whose_processes_are_killed_at_a_stage_ends_with_the_same_bits(tmp_path, networked, who, stage, step):
    plan = chaos(tmp_path, processes=[{"kill": who, "at": {"round": 2, "step": step, "task": stage}}])
    folder, _ = run(tmp_path, plan, settings(COINS, output=RECORDED))
    assert_undisturbed(folder, networked, 6 if who == "all" else 1)


# ---- what a user sees


def test_the_messages_are_named_as_masked_and_the_claim_holds(networked, monkeypatch):
    shown = dpcfl("inspect", networked, "--round", "2", "--limit", "1000")
    assert shown.returncode == 0, shown.stderr
    assert "masked vectors, of which it learned sums over clients only" in shown.stdout
    for kind, content in zip(
        STAGES, ("keys u1[128]", "boxes u1[4, 82]", "masked u4[650]", "signature u1[64]", "shares u1[4, 33]"), strict=True
    ):
        lines = [line for line in shown.stdout.splitlines() if " RESULT " in line and f" {kind} " in line]
        assert len(lines) == 4
        assert all(content in line for line in lines)
    early = updates._early
    for recorded in (early, lambda *about: (line for line in early(*about) if not line[2])):  # full, headers only
        monkeypatch.setattr(updates, "_early", recorded)
        with pytest.raises(ConfigError, match="its clients send masked vectors, of which the server learns sums only"):
            updates.read_updates(networked, read_run_job(networked), 3)


def test_a_run_with_rounds_before_its_sums_does_not_say_that_the_server_sees_sums_alone(tmp_path):
    """R-DPCFL clusters single clients by their noisy updates before the first sum."""
    document = settings(
        {"name": "r-dpcfl", "clusters": 2, "secure_from": 2}, {**SAMPLE, "noise": "os", "noise_seed": None}, output=RECORDED
    )
    folder, _ = run(tmp_path, None, {**document, "data": TWO_CLUSTERS, "rounds": 2})
    shown = dpcfl("inspect", folder, "--client", "0", "--round", "1").stdout
    assert "update f4[650]" in shown
    assert "in secure sums masked vectors, of which it learned sums over clients only, and in other rounds" in shown
    page = (folder / "report.html").read_text()
    assert "noisy releases of single clients in other rounds" in page
    assert "in other rounds what the client&#39;s gate released" in page
    assert "sees only sums over clients" not in page
    facts = dict(statement(json.loads((folder / "run.json").read_text())["privacy"]).facts)
    assert "in other rounds it receives releases of single clients, to which each client adds noise" in facts["Trust"]


def verified(folder: Path) -> dict[str, tuple[bool | None, str]]:
    """Result and detail of each check of a run."""
    return {check.what: (check.holds, check.detail) for check in verify_run(folder)}


SPLIT = (2, "masked_update")  # round and kind of the task with another model
SAME_MODELS = "models: clients of one cluster were given the same"


def test_verify_names_clients_of_a_sum_that_were_given_different_models(networked, tmp_path):
    """The server sent client 1 another model in round 2, on record and charged: no other check can notice it."""
    assert verified(networked)[SAME_MODELS] == (True, "12 tasks compared")
    folder = Path(shutil.copytree(networked, tmp_path / "split"))
    sent: dict[str, Any] = {}

    def another_model(bodies: list[rewriting.Body]) -> None:
        (task,) = [
            body[4]
            for body in bodies
            if body[2:4] == ["down", "client 1"] and body[4]["kind"] == "TASK" and (body[4]["round"], body[4]["task"]) == SPLIT
        ]
        (chunk,) = [body for body in bodies if body[4]["kind"] == "CHUNK" and body[4].get("parent") == task["id"]]
        tensors = split(task["tensors"], chunk[5])
        tensors["model"] = tensors["model"] + np.float32(1)
        chunk[5] = b"".join(bytes(buffer) for buffer in buffers(tensors))
        sent.update(task, blake3=payload_hash(chunk[5]))
        task["blake3"] = sent["blake3"]

    def charged_for_it(lines: list[dict[str, Any]]) -> None:
        (line,) = [line for line in lines if (line.get("round"), line.get("kind")) == SPLIT and line["type"] == "debit"]
        line["id"] = request_id(line["job"], 1, *SPLIT, sent["tensors"], sent["blake3"])

    rewriting.rewrite_transcript(folder, another_model)
    rewriting.rewrite_ledger(folder, 1, charged_for_it, counter=True)
    checks = verified(folder)
    assert [what for what, (holds, _) in checks.items() if holds is False] == [SAME_MODELS]
    assert checks[SAME_MODELS][1].startswith("round 2 masked_update: 2 different models where the job has 1, clients 0 and 1")


def test_verify_claims_no_comparison_of_models_that_the_transcript_does_not_keep(networked, tmp_path):
    folder = Path(shutil.copytree(networked, tmp_path / "headers"))

    def without_bytes(bodies: list[rewriting.Body]) -> None:
        for body in bodies:
            body[5] = None

    rewriting.rewrite_transcript(folder, without_bytes)
    holds, detail = verified(folder)[SAME_MODELS]
    assert holds is None
    assert detail.startswith("0 tasks compared; of 12 masked steps the transcript keeps no bytes")


def test_the_page_says_that_the_server_saw_masked_vectors_and_sums(networked):
    done = dpcfl("report", networked)
    assert done.returncode == 0, done.stderr
    page = (networked / "report.html").read_text()
    assert "masked vectors" in page


def test_a_ledger_s_events_have_the_epsilon_of_the_plan(networked, tmp_path):
    lines = [line for line in read_ledger(networked / "ledgers/client_0000") if line.type == "debit"]
    raw = [json.loads(line) for line in (networked / "ledgers/client_0000/ledger.jsonl").read_text().splitlines()]
    protocol = json.loads((networked / "protocol.json").read_text())
    file = tmp_path / "events.json"
    found = [event for line in raw if line["type"] == "debit" for event in line["events"]]
    assert len(found) == len(lines) == 15
    file.write_text(json.dumps({"events": found, "delta": protocol["privacy"]["delta"] * (1 - 1e-3)}))
    done = dpcfl("account", "--json", file)
    assert done.returncode == 0, done.stderr
    assert 9.9 < json.loads(done.stdout)["epsilon"] <= 10
