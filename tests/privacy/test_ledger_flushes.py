"""What a ledger flushes, in which order, and into which folders."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from folder_names import after_each_kill
from ledgers import OWNER, answered, debit

from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.ledger.durable import Disk
from dpcfl_net.privacy.ledger.journal import SLOTS
from dpcfl_net.privacy.ledger.ledger import Ledger
from dpcfl_net.privacy.ledger.release_store import Stored


@pytest.fixture
def folder(tmp_path):
    return answered(tmp_path / "ledger")


def test_a_journal_without_flushes_has_the_bytes_of_one_with_flushes_and_takes_less_of_the_device(tmp_path):
    for durable in (True, False):
        Ledger(tmp_path / str(durable), owner=OWNER, durable=durable).close()
    with_flushes, without = (tmp_path / name / "journal" for name in ("True", "False"))
    assert with_flushes.read_bytes() == without.read_bytes()
    assert without.stat().st_blocks < with_flushes.stat().st_blocks / 4
    with Ledger(tmp_path / "False", owner=OWNER, durable=True) as ledger:
        for number in range(1, 2 * SLOTS):
            ledger.store(debit(ledger, number).sequence, Stored("release", b"bytes"))
    assert len(read_ledger(tmp_path / "False")) == 2 * SLOTS


def test_folders_of_a_new_ledger_are_flushed_into_the_folders_above(tmp_path, monkeypatch):
    """A folder whose name is lost in a crash of the machine takes the ledger along."""
    flushed, real = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.add(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
    Ledger(tmp_path / "run" / "ledgers" / "client", owner=OWNER).close()
    assert {str(tmp_path / name) for name in ("", "run", "run/ledgers", "run/ledgers/client")} <= flushed


def test_the_names_of_folders_that_were_made_are_flushed_and_all_of_a_tree(tmp_path, monkeypatch):
    flushed, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
    Disk().make_folder(tmp_path / "run" / "ledgers")
    assert flushed[-2:] == [str(tmp_path), str(tmp_path / "run")]
    flushed.clear()
    Disk().make_folder(tmp_path / "run" / "ledgers")
    assert flushed == []
    (tmp_path / "run" / "ledgers" / "a").touch()
    Disk().sync_tree(tmp_path / "run")
    assert sorted(flushed) == [str(tmp_path / name) for name in ("", "run", "run/ledgers", "run/ledgers/a")]


def test_no_folder_above_one_that_is_there_is_looked_at(tmp_path, monkeypatch):
    """Each new ledger looked at all folders up to the root, twice."""
    looked, real = [], Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: (looked.append(path), real(path))[1])
    Disk().make_folder(tmp_path / "ledgers" / "client")
    assert looked == [tmp_path / "ledgers" / "client", tmp_path / "ledgers", tmp_path]
    looked.clear()
    Disk().make_folder(tmp_path / "ledgers" / "client")
    assert looked == [tmp_path / "ledgers" / "client"]


def test_without_flushes_only_the_folder_of_a_ledger_itself_is_closed_to_other_users_and_nothing_is_looked_at(
    tmp_path, monkeypatch
):
    looked = []
    monkeypatch.setattr(Path, "exists", lambda path: looked.append(path))
    monkeypatch.setattr(os, "access", lambda path, mode: looked.append(path))
    mask = os.umask(0o022)
    try:
        for _ in range(2):
            Disk(durable=False).make_folder(tmp_path / "ledgers" / "client")
    finally:
        os.umask(mask)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ledgers", "ledgers/client")] == [0o755, 0o700]
    assert not looked


def test_a_new_result_takes_a_name_that_no_kept_result_has_without_a_look_at_the_device(tmp_path, monkeypatch):
    def answer(ledger, *jobs):
        for job in jobs:
            ledger.store(debit(ledger, 1, job=job).sequence, Stored("release", job.encode()))

    with Ledger(tmp_path, owner=OWNER, durable=False) as ledger:
        answer(ledger, "a", "b")
    (tmp_path / "releases" / "0.answer").rename(tmp_path / "releases" / "2.answer")
    with Ledger(tmp_path, owner=OWNER, durable=False) as ledger:
        looked = []
        with monkeypatch.context() as patch:
            patch.setattr(Path, "exists", lambda path: looked.append(path))
            answer(ledger, "c", "d")
        assert not looked
    assert sorted(path.name for path in (tmp_path / "releases").iterdir()) == [f"{number}.answer" for number in range(4)]
    with Ledger(tmp_path, owner=OWNER, durable=False) as ledger:
        assert [ledger.lookup(f"{job}-1").release for job in "abcd"] == [b"a", b"b", b"c", b"d"]


def test_a_short_write_in_place_is_completed(tmp_path, monkeypatch):
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, offset: real(fd, [b"".join(parts)[:7]], offset))
    (tmp_path / "file").write_bytes(b"." * 40)
    with (tmp_path / "file").open("r+b") as file:
        Disk().write_at(file.fileno(), 5, b"abc", b"", memoryview(b"0123456789"), b"defghijk")
    assert (tmp_path / "file").read_bytes() == b"." * 5 + b"abc0123456789defghijk" + b"." * 14


def test_folders_that_a_killed_process_created_without_a_flush_are_flushed_before_a_ledger_is_made_in_them(
    tmp_path, monkeypatch
):
    """Only the process that created them flushed their names: the next ledger, charges included, was lost with an unflushed folder."""
    after_each_kill(tmp_path, monkeypatch, lambda folder, _: Ledger(folder, owner=OWNER).close())


def test_a_task_costs_two_flushes_in_the_order_that_the_charge_needs(tmp_path, monkeypatch):
    """Line and key are flushed before the debit returns, the answer before `store` does; only then is the key overwritten."""
    trail = []
    real = {name: getattr(os, name) for name in ("write", "pwritev", "fsync", "fdatasync", "replace", "unlink")}

    def noted(name):
        def call(fd, *rest):
            trail.append((name, os.path.basename(os.readlink(f"/proc/self/fd/{fd}") if isinstance(fd, int) else fd)))
            return real[name](fd, *rest)

        return call

    with Ledger(tmp_path / "ledger", owner=OWNER) as ledger:
        for number in (1, 2, 3):
            ledger.store(debit(ledger, number).sequence, Stored("release", b"x"))
        for name in real:
            monkeypatch.setattr(os, name, noted(name))
        charged = debit(ledger, 4)
        assert trail == [("pwritev", "journal"), ("fdatasync", "journal"), ("write", "ledger.jsonl")]
        trail.clear()
        ledger.store(charged.sequence, Stored("release", b"x"))
        assert trail == [("pwritev", "0.answer"), ("fdatasync", "0.answer"), ("pwritev", "journal")]
        charged = debit(ledger, 5)
        trail.clear()
        ledger.store(charged.sequence, Stored("release", b"x"), repeatable=True)
        assert trail == [("pwritev", "journal"), ("fdatasync", "journal")]
        trail.clear()
        for number in range(6, 6 + 3 * SLOTS):
            ledger.store(debit(ledger, number).sequence, Stored("release", b"x"))
        assert trail.count(("fdatasync", "ledger.jsonl")) == 3
        assert len([name for name, _ in trail if "sync" in name]) == 2 * 3 * SLOTS + 3
        charged = debit(ledger, number + 1)
        trail.clear()
        final = ("before", "final")
        ledger.store(charged.sequence, Stored("release", b"x"), before_final=lambda: trail.append(final))
        flushed = [("pwritev", "2.answer"), ("fdatasync", "2.answer")]
        assert [each for each in trail if each[1] != "releases"] == [*flushed, final, *flushed, ("pwritev", "journal")]
        trail.clear()
    assert trail == [("fdatasync", "ledger.jsonl"), ("pwritev", "journal"), ("fdatasync", "journal")]
