"""A client's ledger after kill -9, and after an edit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess

import pytest
from conftest import DPCFL, ROOT
from gates import JOB, FakeStep, ask, one_charge_and_one_draw, open_gate, task, try_ask, used_ledger

from dpcfl_net.core.errors import LedgerError
from dpcfl_net.core.tensors import unpack
from dpcfl_net.privacy.ledger import entries
from dpcfl_net.privacy.ledger import ledger as ledger_module
from dpcfl_net.privacy.ledger.chain import Chain, read_ledger
from dpcfl_net.privacy.ledger.journal import JOURNAL, read_journal
from dpcfl_net.privacy.ledger.ledger import Charged, Ledger

PLACES = ("before compute", "in compute", "after the answer was stored")


def killed_in(folder, where):
    """Ask for round 3 in a process of its own that is killed at this place; the key that it drew with."""
    drawn = folder.with_suffix(".drawn")
    child = os.fork()
    if child == 0:
        _, gate = open_gate(folder, durable=True)

        def compute(charge, state):
            drawn.write_bytes(charge.key)
            if where == "before compute":
                os.kill(os.getpid(), signal.SIGKILL)
            result = FakeStep()(charge, state)
            if where == "in compute":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        ask(gate, 3, compute=compute)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return drawn.read_bytes()


@pytest.mark.scenario(15)
def test_a_killed_process_is_charged_once(tmp_path, monkeypatch, evidence):
    for where in PLACES:
        folder = used_ledger(tmp_path / where)
        key = killed_in(folder, where)
        fake = FakeStep()
        answer = try_ask(folder, task(3), fake)
        assert answer.cached == (where == "after the answer was stored")
        assert unpack(answer.release)["key"].tobytes()[: len(key)] == key
        one_charge_and_one_draw(folder, task(3), fake, answer, 2)
    evidence.got(f"kill -9 {', '.join(PLACES)}: 1 charge, and the same draw of the noise after the restart")
    folder = used_ledger(tmp_path / "control")
    with monkeypatch.context() as off:
        off.setattr(Ledger, "debit", lambda self, **_: Charged(3, os.urandom(32)))  # nothing on disk before the data
        key = killed_in(folder, "in compute")
    assert len([entry for entry in read_ledger(folder) if entry.type == "debit"]) == 2
    answer = try_ask(folder, task(3), FakeStep())
    assert unpack(answer.release)["key"].tobytes()[: len(key)] != key
    evidence.control("with no debit on disk before the data is touched: no charge for what was drawn, and a second draw")


def refused(folder):
    """The code with which a gate turns this ledger down."""
    with pytest.raises(LedgerError) as error:
        open_gate(folder)
    return error.value.code


def cheaper(line):
    """A debit in canonical form that says it was for fewer steps."""
    entry = json.loads(line)
    entry["events"][0]["steps"] = 1
    return json.dumps(entry, sort_keys=True, separators=(",", ":")).encode() + b"\n"


EDITS = {
    "the last debit taken out": (lambda lines: lines[:-1], "ledger-rolled-back"),
    "a debit in the middle taken out": (lambda lines: [*lines[:2], *lines[3:]], "ledger-broken"),
    "the last debit made cheaper": (lambda lines: [*lines[:-1], cheaper(lines[-1])], "ledger-broken"),
    "a debit in the middle made cheaper": (lambda lines: [*lines[:2], cheaper(lines[2]), *lines[3:]], "ledger-broken"),
    "two debits exchanged": (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "ledger-broken"),
}


def edited(folder, change):
    path = folder / "ledger.jsonl"
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


@pytest.mark.scenario(16)
def test_an_edited_ledger_refuses_to_start(finished_run, tmp_path, monkeypatch, evidence):
    folder = tmp_path / "ledger"
    ledger, gate = open_gate(folder)
    first = {number: ask(gate, number) for number in (1, 2, 3, 4)}
    assert gate.remaining()["train"] == 0
    ledger.close()
    whole = (folder / "ledger.jsonl").read_bytes()
    for at in range(0, len(whole), 7):
        (folder / "ledger.jsonl").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert refused(folder) in ("ledger-broken", "ledger-rolled-back"), at
    for change, code in EDITS.values():
        (folder / "ledger.jsonl").write_bytes(whole)
        edited(folder, change)
        assert refused(folder) == code
    shutil.copytree(finished_run / "ledgers" / "client_0003", tmp_path / "ledgers" / "client_0003")
    edited(tmp_path / "ledgers" / "client_0003", lambda lines: lines[:-1])
    done = subprocess.run(
        [*DPCFL, "worker", str(finished_run), "--client", "3", "--connect", "tcp://127.0.0.1:1", "--keys", str(finished_run / "keys"),
         "--operator-key", str(finished_run / "operator.pub"), "--ledgers", str(tmp_path / "ledgers")],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, "ledger-rolled-back" in done.stderr) == (3, True), done.stderr
    evidence.got(
        f"every 7th byte flipped, {', '.join(EDITS)}: ledger-broken or ledger-rolled-back; a worker leaves with exit code 3"
    )

    def unchecked(where):
        content = (where / "ledger.jsonl").read_bytes()
        lines = content.splitlines(keepends=True)
        image = read_journal(where / JOURNAL)
        del image.slots[image.newest]
        image.synced = 0
        parsed = [entries._parse(line, json.loads(line)["prev"]) for line in lines]
        return Chain(parsed, lines[-1], len(content), b"", image, False, False)

    (folder / "ledger.jsonl").write_bytes(whole)
    edited(folder, EDITS["the last debit taken out"][0])
    for path in (folder / "releases").iterdir():
        if json.loads(path.read_bytes().partition(b"\n")[0])["round"] == 4:
            path.unlink()
    monkeypatch.setattr(ledger_module, "read_chain", unchecked)
    ledger, gate = open_gate(folder)
    assert gate.remaining()["train"] == 1
    again = ask(gate, 4)
    assert (again.status, again.cached) == ("release", False)
    assert again.release != first[4].release
    assert len(ledger.charges(JOB)) == 4
    ledger.close()
    evidence.control(
        "without the chain and the journal's count the ledger is taken, and a spent round is answered once more, with fresh noise"
    )
