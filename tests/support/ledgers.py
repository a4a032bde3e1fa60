"""Ledgers of a client in a folder: debits, edits, and what a crash leaves."""

from __future__ import annotations

import pytest
from journals import MOST_CUT, cut_debit

from dpcfl_net.core.errors import LedgerError
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.ledger.ledger import Ledger
from dpcfl_net.privacy.ledger.release_store import Stored

OWNER = {"run": "r1", "job": "j" * 64, "client": 3}
STEP = SampledGaussian(1.25, 0.1, 7)


def open_ledger(folder, owner=OWNER):
    return Ledger(folder, owner=owner, durable=False)


def debit(ledger, number, *, job="job", key=None):
    return ledger.debit(job=job, request=f"{job}-{number}", round=number, kind="train", slots=["train"], events=[STEP], key=key)


def answered(folder):
    """A ledger with three answered debits, closed."""
    with open_ledger(folder) as ledger:
        for number in (1, 2, 3):
            ledger.store(debit(ledger, number).sequence, Stored("release", b"bytes %d" % number), b"state %d" % number)
    return folder


def lines_of(folder):
    return (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)


def write_lines(folder, lines):
    (folder / "ledger.jsonl").write_bytes(b"".join(lines))


def refusal(folder):
    with pytest.raises(LedgerError) as error:
        open_ledger(folder)
    with pytest.raises(LedgerError) as reading:
        read_ledger(folder)
    assert reading.value.code == error.value.code
    return error.value.code


def killed(ledger):
    """End a ledger without the flushes and writes of `close`."""
    ledger._usable, ledger._journal._dirty = False, False
    ledger.close()


def tear(folder, number=4, cut=MOST_CUT):
    """Leave what a crash in the middle of a debit leaves."""

    def charge():
        with open_ledger(folder) as ledger:
            debit(ledger, number)

    cut_debit(folder, charge, cut)
