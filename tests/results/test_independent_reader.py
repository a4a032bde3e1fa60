"""A reader written from docs/reference alone agrees with `dpcfl verify`, and finds changes of ledgers and transcripts."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import independent_ledger
import independent_reader
import independent_signatures
import numpy as np
import pytest
import rewriting
from independent_ledger import Report, canonical, sha256
from independent_reader import payload_hash
from journals import cut_debit

import dpcfl_net as dpcfl
from dpcfl_net.core.tensors import describe, pack
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.ledger.ledger import Charged, Ledger
from dpcfl_net.privacy.ledger.release_store import Stored

Change = Callable[[Path], None]
LEDGER = "ledgers/client_0000/ledger.jsonl"


@pytest.fixture
def copied(by_network: dpcfl.Run, tmp_path: Path) -> Path:
    """A copy of a finished run that a test may change."""
    return Path(shutil.copytree(by_network.path, tmp_path / "run"))


def test_the_reader_imports_nothing_of_the_package():
    for module in (independent_reader, independent_ledger, independent_signatures):
        tree = ast.parse(Path(module.__file__).read_text())
        names = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
        names += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        assert names
        assert not [name for name in names if name.startswith("dpcfl")], module.__name__


def test_reader_and_verify_agree_on_a_finished_run(by_network: dpcfl.Run):
    read, checks = independent_reader.verify(by_network.path), by_network.verify()
    assert read.problems == []
    assert all(check.holds for check in checks), checks
    detail = {check.what: check.detail for check in checks}
    assert detail["transcript: hash chain whole"] == f"{read.records} records"
    assert detail["messages: every release was debited first"].startswith(f"{len(read.releases)} releases")
    for client in by_network.job.protocol.clients:
        events = [event for ledger, _, _, event in read.events if ledger == f"client_{client:04d}"]
        assert events == [event.as_json() for event in by_network.events(client)]


def change_a_byte(folder: Path) -> None:
    path = folder / LEDGER
    path.write_bytes(path.read_bytes().replace(b'"round":2', b'"round":3', 1))


def drop_a_line(folder: Path) -> None:
    lines = (folder / LEDGER).read_bytes().splitlines(keepends=True)
    (folder / LEDGER).write_bytes(b"".join([*lines[:2], *lines[3:]]))


def drop_the_last_line(folder: Path) -> None:
    lines = (folder / LEDGER).read_bytes().splitlines(keepends=True)
    (folder / LEDGER).write_bytes(b"".join(lines[:-1]))


def cheaper_event(folder: Path) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        lines[1]["events"][-1]["noise_multiplier"] = 9.0

    rewriting.rewrite_ledger(folder, 0, change, counter=False)


def uncharged_round(folder: Path) -> None:
    rewriting.rewrite_ledger(folder, 0, lambda lines: lines.pop(), counter=True)


def charged_twice(folder: Path) -> None:
    rewriting.rewrite_ledger(folder, 0, lambda lines: lines.append(lines[-1]), counter=True)


def swapped_payloads(folder: Path) -> None:
    def change(bodies: list[rewriting.Body]) -> None:
        (_, one), (_, other) = (rewriting.results(bodies, client, 3) for client in (0, 1))
        one[5], other[5] = other[5], one[5]

    rewriting.rewrite_transcript(folder, change)


def swapped_releases(folder: Path) -> None:
    """Payloads and their hashes: every message fits, only the clients know better."""

    def change(bodies: list[rewriting.Body]) -> None:
        (first, one), (second, other) = (rewriting.results(bodies, client, 3) for client in (0, 1))
        one[5], other[5] = other[5], one[5]
        first[4]["blake3"], second[4]["blake3"] = second[4]["blake3"], first[4]["blake3"]

    rewriting.rewrite_transcript(folder, change)


def other_model(folder: Path) -> None:
    def change(bodies: list[rewriting.Body]) -> None:
        task = next(body for body in bodies if body[4]["kind"] == "TASK")
        chunk = next(body for body in bodies if body[4].get("parent") == task[4]["id"] and body[4]["kind"] == "CHUNK")
        chunk[5] = bytes(len(chunk[5]))
        task[4]["blake3"] = payload_hash(chunk[5])

    rewriting.rewrite_transcript(folder, change)


def hidden_answer(folder: Path) -> None:
    """The task of a client shows another model than it got, and no answer to it."""

    def change(bodies: list[rewriting.Body]) -> None:
        result, _ = rewriting.results(bodies, 0, 3)
        task = next(body for body in bodies if body[4]["id"] == result[4]["parent"])
        chunk = next(body for body in bodies if body[4].get("parent") == task[4]["id"] and body[4]["kind"] == "CHUNK")
        chunk[5] = bytes(len(chunk[5]))
        task[4]["blake3"] = payload_hash(chunk[5])
        drop(bodies, result[4]["id"])

    rewriting.rewrite_transcript(folder, change)


def hidden_exchange(folder: Path) -> None:
    def change(bodies: list[rewriting.Body]) -> None:
        result, _ = rewriting.results(bodies, 0, 3)
        drop(bodies, result[4]["id"], result[4]["parent"])

    rewriting.rewrite_transcript(folder, change)


def drop(bodies: list[rewriting.Body], *ids: str) -> None:
    """Remove messages with their chunks and what answers them."""
    bodies[:] = [body for body in bodies if not {body[4]["id"], body[4].get("parent")} & {*ids}]


def missing_task(folder: Path) -> None:
    def change(bodies: list[rewriting.Body]) -> None:
        bodies.remove(next(body for body in bodies if body[4]["kind"] == "TASK"))

    rewriting.rewrite_transcript(folder, change)


def changed_message(folder: Path) -> None:
    path = folder / "transcript.msgpack"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def more_epsilon(folder: Path) -> None:
    path = folder / "protocol.json"
    document = json.loads(path.read_bytes())
    document["privacy"]["epsilon"] = 50.0
    path.write_bytes(canonical(document))


def other_experiment(folder: Path) -> None:
    path = folder / "experiment.json"
    path.write_bytes(canonical({**json.loads(path.read_bytes()), "seed": 7}))


def other_roster(folder: Path) -> None:
    path = folder / "roster.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"records":', b'"records":1', 1))


def damaged_journal(folder: Path) -> None:
    path = folder / "ledgers/client_0000/journal"
    content = bytearray(path.read_bytes())
    content[4096 + 4096 + 1030] ^= 1  # in the line of slot 1
    path.write_bytes(content)


SIGNED = "job signed by the operator, experiment matches its hash"
WHOLE_LEDGERS = "ledgers: hash chains and counters whole"
WHOLE_TRANSCRIPT = "transcript: hash chain whole"
DEBITED = "messages: every release was debited first"
SHOWN = "messages: clients were charged for the models that the transcript shows"
SAME = "models: clients of one cluster were given the same"
KEPT = "messages: kept bytes have the hashes in their headers"
ANSWERED = "messages: releases are those that the clients answered"

# Change, what the reader says, and the checks of `dpcfl verify` that fail.
CHANGES: list[tuple[Change, str, list[str]]] = [
    (change_a_byte, r"client_0000: line 2 of ledger.jsonl is not the line that the journal holds", [WHOLE_LEDGERS, DEBITED]),
    (drop_a_line, r"client_0000: line 2 of ledger.jsonl is not the line that the journal holds", [WHOLE_LEDGERS, DEBITED]),
    (
        drop_the_last_line,
        r"client_0000: ledger.jsonl has 3 lines, 4 were written: lines are missing at the end",
        [WHOLE_LEDGERS, DEBITED],
    ),
    (cheaper_event, r"client_0000: line 1 of ledger.jsonl is not the line that the journal holds", [WHOLE_LEDGERS, DEBITED]),
    (damaged_journal, r"client_0000: journal: a slot is damaged", [WHOLE_LEDGERS, DEBITED]),
    (uncharged_round, r"client 0, round 3 train: released without a debit", [DEBITED]),
    (charged_twice, r"client_0000: line 4 charges round 3 train a second time", [WHOLE_LEDGERS, DEBITED]),
    (swapped_payloads, r"transcript: the payload of record \d+ is not the one that its header announces", [KEPT]),
    (
        swapped_releases,
        r"client 0, round 3 train: the release in the transcript is not the one that the client stored",
        [ANSWERED],
    ),
    (other_model, r"client 0, round 1 \w+: charged for another task than the transcript shows", [SHOWN, SAME]),
    (hidden_answer, r"client 0, round 3 \w+: charged for another task than the transcript shows", [SHOWN, SAME]),
    (hidden_exchange, r"client 0, round 3 \w+: charged for a task that the transcript does not show", [SHOWN]),
    (missing_task, r"client 0, round 1 \w+: the transcript holds no task for this release", [SHOWN]),
    (changed_message, r"transcript: record \d+ was changed: its digest does not fit", [WHOLE_TRANSCRIPT]),
    (more_epsilon, r"protocol.json: the signature is not the operator's", [SIGNED]),
    (other_roster, r"roster.jsonl: not the roster that protocol.json names", [SIGNED]),
    (other_experiment, r"experiment.json: not the experiment that protocol.json names", [SIGNED]),
]


@pytest.mark.parametrize(("change", "said", "failed"), CHANGES, ids=[change.__name__ for change, _, _ in CHANGES])
def test_the_reader_finds(change: Change, said: str, failed: list[str], copied: Path):
    change(copied)
    problems = independent_reader.verify(copied).problems
    assert [problem for problem in problems if re.search(said, problem)], problems
    assert [check.what for check in dpcfl.open_run(copied).verify() if check.holds is False] == failed


def test_verify_names_a_release_without_a_debit_and_counts_debits_without_a_release(copied: Path):
    def debited() -> tuple[bool | None, str]:
        (check,) = [
            check for check in dpcfl.open_run(copied).verify() if check.what == "messages: every release was debited first"
        ]
        return check.holds, check.detail

    def lost_release(bodies: list[rewriting.Body]) -> None:
        for body in rewriting.results(bodies, 1, 3):
            bodies.remove(body)

    assert debited() == (True, "6 releases, each debited")
    rewriting.rewrite_transcript(copied, lost_release)
    assert debited() == (True, "5 releases, each debited; 1 debit without a release received")
    uncharged_round(copied)
    assert debited() == (False, "client 0 released train in round 3 without a debit")


def one_more_charge(lines: list[dict[str, Any]]) -> None:
    spent = {name: count + lines[-1]["slots"].count(name) for name, count in lines[-1]["spent"].items()}
    lines.append({**lines[-1], "round": lines[-1]["round"] + 1, "id": "0" * len(lines[-1]["id"]), "spent": spent})


def less_noise_charged(lines: list[dict[str, Any]]) -> None:
    lines[-1]["events"][-1]["noise_multiplier"] = 9.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (one_more_charge, r"client 0: \w+ charged (\d+) times, planned \d+"),
        (less_noise_charged, r"client 0 line \d+: \w+ is not the plan's event"),
    ],
)
def test_verify_holds_charges_of_a_ledger_whose_chain_fits_to_the_plan(change: Any, said: str, copied: Path):
    """A copy of a ledger from another host, written again with its counter: only the plan tells that it is not the client's."""
    rewriting.rewrite_ledger(copied, 0, change, counter=True)
    checks = {check.what: check for check in dpcfl.open_run(copied).verify()}
    assert checks["ledgers: hash chains and counters whole"].holds
    assert checks["ledgers hold nothing beyond the plan"].holds is False
    assert re.fullmatch(said, checks["ledgers hold nothing beyond the plan"].detail)


def test_without_the_journal_the_chain_finds_a_changed_and_a_dropped_line(copied: Path):
    ledger = copied / "ledgers/client_0000"
    (ledger / "journal").unlink()
    lines = (ledger / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (ledger / "counter").write_text(f"{len(lines) - 1} {sha256(lines[-1])}\n")
    assert independent_reader.verify(copied).problems == []
    for changed in ([lines[0], lines[1].replace(b'"round":1', b'"round":2'), *lines[2:]], [lines[0], *lines[2:], lines[-1]]):
        (ledger / "ledger.jsonl").write_bytes(b"".join(changed))
        (problem, *_) = independent_reader.verify(copied).problems
        assert re.fullmatch(
            r"client_0000: line [12] does not follow the line before: its prev is not that line's hash", problem
        )


def damaged_once(bodies: list[rewriting.Body]) -> rewriting.Body:
    """Put a damaged copy of an answer and its refusal before the answer; returns the damaged chunk."""
    answer, chunk = rewriting.results(bodies, 0, 3)
    damaged = [*chunk[:5], bytes([chunk[5][0] ^ 1]) + chunk[5][1:]]
    acknowledged = next(b for b in bodies if b[4]["kind"] == "ACK" and b[4].get("parent") == answer[4]["id"])
    refusal = [*acknowledged[:4], {**acknowledged[4], "kind": "ERROR", "code": "hash", "reason": "damaged"}, None]
    bodies[bodies.index(answer) : bodies.index(answer)] = [answer, damaged, refusal]
    return damaged


def test_an_answer_that_arrives_damaged_and_is_sent_again_is_no_problem(copied: Path):
    rewriting.rewrite_transcript(copied, damaged_once)
    assert independent_reader.verify(copied).problems == []
    (check,) = [check for check in dpcfl.open_run(copied).verify() if "kept bytes" in check.what]
    assert check.holds
    assert check.detail.endswith("damaged and were not accepted: 1")


def test_a_damaged_answer_that_is_acknowledged_is_a_problem(copied: Path):
    def change(bodies: list[rewriting.Body]) -> None:
        damaged = damaged_once(bodies)
        refusal = bodies[bodies.index(damaged) + 1]
        refusal[4] = {**refusal[4], "kind": "ACK", "code": "", "reason": ""}

    rewriting.rewrite_transcript(copied, change)
    (problem,) = independent_reader.verify(copied).problems
    assert "is not the one that its header announces" in problem
    (check,) = [check for check in dpcfl.open_run(copied).verify() if "kept bytes" in check.what]
    assert check.holds is False
    assert check.detail.endswith("are not those of its header")


@pytest.mark.parametrize("kept", [True, False], ids=["answers kept", "ledgers of another host"])
def test_a_second_release_with_other_numbers_is_a_problem_also_without_the_answers_of_clients(copied: Path, kept: bool):
    def change(bodies: list[rewriting.Body]) -> None:
        answer, chunk = rewriting.results(bodies, 0, 3)
        other = bytes(len(chunk[5]))
        bodies.append([*answer[:4], {**answer[4], "id": "2" * 32, "blake3": payload_hash(other)}, None])
        bodies.append([*chunk[:4], {**chunk[4], "parent": "2" * 32}, other])

    rewriting.rewrite_transcript(copied, change)
    if not kept:
        for client in (0, 1):
            rewriting.rewrite_ledger(copied, client, lambda _: None, counter=True)
            shutil.rmtree(copied / f"ledgers/client_{client:04d}/releases")
    failed = [check for check in dpcfl.open_run(copied).verify() if check.holds is False]
    assert [check.what for check in failed] == ["messages: releases are those that the clients answered"]
    assert re.fullmatch(r"client 0, round 3 \w+: two different releases", failed[0].detail)


def test_verify_names_the_comparison_with_answers_that_were_removed(copied: Path):
    """The check was left out, and nothing said so."""
    for answer in copied.glob("ledgers/*/releases/*"):
        answer.unlink()
    (check,) = [check for check in dpcfl.open_run(copied).verify() if check.what == ANSWERED]
    assert (check.holds, check.detail) == (None, "not checked: the ledgers here lack the answers, which were removed")


def test_truncated_ends_after_a_crash_are_no_problem(copied: Path):
    """A crash of the machine may cut the last line of a ledger, a crash of the coordinator the last record."""
    whole = independent_reader.verify(copied)
    for name in (LEDGER, "transcript.msgpack"):
        (copied / name).write_bytes((copied / name).read_bytes()[:-7])
    (problem,) = independent_reader.verify(copied).problems
    assert "lines are missing at the end" in problem, "a closed ledger says that its lines are on the device"
    journal = copied / "ledgers/client_0000/journal"
    content = journal.read_bytes()
    journal.write_bytes(content[:64] + bytes(24) + content[88:])  # as before the first flush of ledger.jsonl
    assert independent_reader.verify(copied).problems == []
    (copied / LEDGER).write_bytes((copied / LEDGER).read_bytes() + bytes(7))
    cut = independent_reader.verify(copied)
    assert cut.problems == []
    assert cut.events == whole.events, "the journal has the line"
    assert (cut.records, cut.notes) == (whole.records - 1, ["the last record of the transcript is truncated"])
    (check,) = [check for check in dpcfl.open_run(copied).verify() if check.what == "transcript: hash chain whole"]
    assert (check.holds, check.detail) == (True, f"{cut.records} records (the last record is truncated)")


JOB, RUN, EVENT = "ab" * 32, "cd" * 16, dpcfl.SampledGaussian(1.0, 0.1, 5)


def opened(folder: Path) -> Ledger:
    return Ledger(folder / "client_0000", owner={"run": RUN, "job": JOB, "client": 0}, durable=False)


def debit(ledger: Ledger, t: int, request: str) -> Charged:
    return ledger.debit(job=JOB, request=request, round=t, kind="train", slots=["train"], events=[EVENT])


def test_lines_that_a_crash_cut_and_their_charges_are_read(tmp_path: Path):
    folder = tmp_path / "client_0000"
    with opened(tmp_path) as ledger:
        debit(ledger, 1, "01" * 32)

    def charge_again() -> None:
        with opened(tmp_path) as ledger:
            debit(ledger, 2, "02" * 32)

    cut_debit(folder, charge_again)
    assert len(independent_ledger.check_ledger(folder, JOB, RUN, Report())) == 1
    with opened(tmp_path) as ledger:
        (torn,) = ledger.truncated(JOB)
        ledger.charge_truncated(torn, ["train"], [EVENT])
    report = Report()
    assert [line["round"] for line in independent_ledger.check_ledger(folder, JOB, RUN, report)] == [1]
    assert [(t, kind) for _, t, kind, _ in report.events] == [(1, "train"), (2, "closed")]
    assert [entry.type for entry in read_ledger(folder)] == ["header", "debit", "torn", "closed"]


def test_a_release_that_is_not_stored_is_tied_to_the_mark_in_the_journal(tmp_path: Path):
    tensors = {"choice": np.array(1), "update": np.arange(300_000, dtype="<f4")}  # over 1 MiB
    rows, packed = describe(tensors), pack(tensors)
    size = sum(row[3] for row in rows)
    payload = bytes(packed)[-size:]
    request = sha256(canonical([JOB, 0, 1, "train", [], payload_hash()]))
    with opened(tmp_path) as ledger:
        charged = debit(ledger, 1, request)
        answer = Stored("release", packed, payload=size, blake3=payload_hash(payload))
        ledger.store(charged.sequence, answer, repeatable=True)
    folder = tmp_path / "client_0000"
    assert not [*(folder / "releases").iterdir()]
    debits = independent_ledger.check_ledger(folder, JOB, RUN, Report())
    task = independent_signatures.Message(0, "down", "client 0", {"kind": "TASK"}, None)

    def problems(**changes: Any) -> list[str]:
        result = {"tensors": rows, "blake3": payload_hash(payload)} | changes
        return independent_reader.check_release(JOB, (0, 1, "train"), task, result, debits, folder)

    assert problems() == []
    for changes in ({"blake3": "0" * 64}, {"tensors": [["choice", "i8", [1], 8], rows[1]]}):
        (problem,) = problems(**changes)
        assert "is not the one that the client's journal marks" in problem
