"""`dpcfl verify` and clients without a ledger: those that got no task need none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from rewriting import read_bodies, rewrite_transcript

import dpcfl_net as dpcfl
from dpcfl_net.results.verify import Check, verify_run

REMOVED = "it got a task, so that its ledger is on another machine, or was removed"
UNKNOWN = "neither the transcript nor messages.jsonl tells whether it got a task"
GREETINGS = ("HELLO", "WELCOME")
NAMES = {"transcript": "transcript.msgpack", "messages": "messages.jsonl"}


def ledgers(folder: Path) -> Check:
    return next(check for check in verify_run(folder) if check.what.startswith("ledgers: hash chains"))


def without_ledger(run: dpcfl.Run, folder: Path) -> Path:
    """A copy of a run without the ledger of client 1."""
    shutil.copytree(run.path, folder)
    shutil.rmtree(folder / "ledgers/client_0001")
    return folder


def without_tasks(folder: Path, record: str) -> None:
    """Take the tasks of client 1, and its answers, out of one record of the messages: it connected, and that was all."""

    def stays(peer: str, kind: str) -> bool:
        return peer != "client 1" or kind in GREETINGS

    if record == "transcript":
        rewrite_transcript(
            folder, lambda bodies: bodies.__setitem__(slice(None), [b for b in bodies if stays(b[3], b[4]["kind"])])
        )
        kept = {(b[2], b[4]["kind"]) for b in read_bodies(folder) if b[3] == "client 1"}
        assert {("up", "HELLO"), ("down", "WELCOME")} <= kept
        return
    path = folder / "messages.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [line for line in lines if stays(line["peer"], line["kind"])]
    assert {line["kind"] for line in kept if line["peer"] == "client 1"} >= {*GREETINGS}
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))


@pytest.mark.parametrize("silent", [(), ("transcript",), ("messages",)])
def test_a_client_with_a_task_in_either_record_needs_a_ledger(by_network: dpcfl.Run, tmp_path: Path, silent: tuple[str, ...]):
    folder = without_ledger(by_network, tmp_path / "copy")
    for record in silent:
        without_tasks(folder, record)
    found = ledgers(folder)
    assert (found.holds, found.detail) == (False, f"client 1: no ledger in {folder}/ledgers/client_0001: {REMOVED}")


def test_a_record_that_is_no_message_may_have_been_a_task(by_network: dpcfl.Run, tmp_path: Path):
    folder = without_ledger(by_network, tmp_path / "copy")
    for record in NAMES:
        without_tasks(folder, record)
    assert ledgers(folder).holds is True
    rewrite_transcript(folder, lambda bodies: bodies.append([*bodies[-1][:2], "down", "client 1", {"kind": "odd"}, None]))
    found = ledgers(folder)
    assert (found.holds, found.detail) == (False, f"client 1: no ledger in {folder}/ledgers/client_0001: {REMOVED}")


@pytest.mark.parametrize("kept", ["transcript", "messages", "both"])
def test_a_client_without_a_task_needs_no_ledger(by_network: dpcfl.Run, tmp_path: Path, kept: str):
    folder = without_ledger(by_network, tmp_path / "copy")
    for record, name in NAMES.items():
        if kept in (record, "both"):
            without_tasks(folder, record)
        else:
            (folder / name).unlink()
    found = ledgers(folder)
    assert (found.holds, found.detail) == (True, "1 ledgers, 3 charges; clients without a ledger, which got no task: 1")


def test_without_a_record_of_tasks_it_is_unknown_whether_a_ledger_is_missing(by_network: dpcfl.Run, tmp_path: Path):
    folder = without_ledger(by_network, tmp_path / "copy")
    for name in NAMES.values():
        (folder / name).unlink()
    found = ledgers(folder)
    assert (found.holds, found.detail) == (None, f"client 1: no ledger in {folder}/ledgers/client_0001, and {UNKNOWN}")
    (folder / "config.yaml").unlink()  # which tells that it ran in several processes
    assert ledgers(folder).holds is False


def test_in_one_process_every_client_has_a_ledger(with_epsilon: dpcfl.Run, tmp_path: Path):
    """Such a run records no tasks."""
    found = ledgers(without_ledger(with_epsilon, tmp_path / "copy"))
    assert found.holds is False
    assert "it never started, its ledger is on another machine, or was removed" in found.detail
