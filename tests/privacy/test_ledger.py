"""The privacy ledger: what survives a restart, who may open it, and how it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat

import pytest
from journals import keys_in, slot_start
from ledgers import OWNER, STEP, answered, debit, open_ledger, tear

from dpcfl_net.core import locks
from dpcfl_net.core.errors import LedgerError
from dpcfl_net.privacy.ledger import journal, ledger_folder
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.ledger.journal import SLOTS
from dpcfl_net.privacy.ledger.ledger import Charged, Expired, Ledger
from dpcfl_net.privacy.ledger.ledger_folder import erase_kept_keys
from dpcfl_net.privacy.ledger.release_store import Stored


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_folder, "PROBE_S", 0.0)
    return answered(tmp_path / "ledger")


def test_what_was_written_is_there_after_a_restart(folder):
    with open_ledger(folder) as ledger:
        assert ledger.spent("job") == {"train": 3}
        assert [e.events for e in ledger.charges("job")] == [(STEP,)] * 3
        assert ledger.lookup("job-3") == Stored("release", b"bytes 3")
        assert ledger.lookup("job-2") == Stored("release", b"bytes 2")
        assert ledger.lookup("job-1") == Expired()
        assert ledger.lookup("job-4") is None
        assert (ledger.state("job"), ledger.state("job", before=3)) == (b"state 3", b"state 2")
        assert ledger.state("other") is None
        assert read_ledger(folder) == list(ledger.entries)


def test_a_charged_request_keeps_its_key_until_its_answer_is_stored(folder):
    with open_ledger(folder) as ledger:
        charged = debit(ledger, 4)
        assert keys_in(folder) == [4]
        assert stat.S_IMODE((folder / "journal").stat().st_mode) == 0o600
        assert ledger.lookup("job-4") == charged
    with open_ledger(folder) as ledger:
        assert ledger.lookup("job-4") == charged
        ledger.store(charged.sequence, Stored("release", b"x"))
        assert keys_in(folder) == []
        assert charged.key not in (folder / "journal").read_bytes()
        assert ledger.lookup("job-4") == Stored("release", b"x")


def test_keys_come_from_the_operating_system_unless_given(tmp_path):
    with open_ledger(tmp_path / "a") as one, open_ledger(tmp_path / "b") as two:
        keys = {debit(ledger, number).key for ledger in (one, two) for number in (1, 2)}
        assert len(keys) == 4
        assert {len(key) for key in keys} == {32}
        assert debit(one, 3, key=b"k" * 32).key == b"k" * 32
        with pytest.raises(ValueError, match="32 bytes"):
            debit(one, 4, key=b"short")
        assert "6b6b6b" not in repr(one.lookup("job-3"))
        assert "kkk" not in repr(one.lookup("job-3"))


def test_a_key_is_gone_once_the_journal_has_written_over_it(folder):
    """Otherwise erasing it would erase the key of a later debit, in whose slot it was."""
    with open_ledger(folder) as ledger:
        debit(ledger, 4)
        for number in range(5, 5 + SLOTS):
            debit(ledger, number)
        assert ledger.lookup("job-4") == Expired()
        ledger.store(4, Stored("release", b"late"), repeatable=True)
        assert sorted(keys_in(folder)) == list(range(5, 5 + SLOTS))
        assert ledger.lookup(f"job-{4 + SLOTS}").answered == ""


def test_one_request_or_one_round_and_kind_is_never_debited_twice(folder):
    with open_ledger(folder) as ledger:
        with pytest.raises(ValueError, match="second time"):
            debit(ledger, 3)
        with pytest.raises(ValueError, match="second time"):
            ledger.debit(job="job", request="new", round=3, kind="train", slots=["train"], events=[STEP])
        assert ledger.spent("job") == {"train": 3}
    assert len(read_ledger(folder)) == 4


def test_a_line_that_is_no_debit_gets_no_result_and_a_debit_gets_one(folder):
    """A second result would be another answer to the same request."""
    tear(folder)
    with open_ledger(folder) as ledger:
        for sequence in (0, 3, 4):
            with pytest.raises(ValueError, match=f"entry {sequence} is not a debit without a result"):
                ledger.store(sequence, Stored("release", b"other"))
        assert ledger.lookup("job-3") == Stored("release", b"bytes 3")
        assert len(list((folder / "releases").iterdir())) == 3


def test_the_newest_state_outlives_answers_that_left_none(folder):
    with open_ledger(folder) as ledger:
        for number in range(4, 9):
            ledger.store(debit(ledger, number).sequence, Stored("refused", code="mechanism-mismatch"))
        assert ledger.state("job") == b"state 3"
    with open_ledger(folder) as ledger:
        assert ledger.state("job") == b"state 3"
        assert ledger.lookup("job-8") == Stored("refused", code="mechanism-mismatch")
        assert ledger.lookup("job-6") == Expired()
        ledger.store(debit(ledger, 9).sequence, Stored("release", b""), b"state 9")
        assert ledger.state("job") == b"state 9"
        assert ledger.lookup("job-3") == Expired()


def test_two_processes_cannot_hold_one_ledger(folder):
    ledger = open_ledger(folder)
    with pytest.raises(LedgerError) as error:
        open_ledger(folder)
    assert error.value.code == "ledger-locked"
    assert len(read_ledger(folder)) == 4
    ledger.close()
    open_ledger(folder).close()


def test_a_ledger_opens_while_another_process_looks_whether_it_is_in_use(folder, monkeypatch):
    """`dpcfl verify` holds the lock while it looks: a worker that started at that moment was refused."""
    probe = os.open(folder / "lock", os.O_RDONLY)
    fcntl.flock(probe, fcntl.LOCK_SH)
    monkeypatch.setattr(ledger_folder, "PROBE_S", 60.0)
    monkeypatch.setattr(ledger_folder.time, "sleep", lambda _: fcntl.flock(probe, fcntl.LOCK_UN))
    open_ledger(folder).close()
    os.close(probe)


def test_the_lock_of_a_removed_folder_does_not_open_the_ledger_that_was_made_in_its_place(folder, monkeypatch):
    """A worker that refuses its job removes a new ledger: another one that had opened the lock file held the ledger beside a third."""
    refused, made, lock = open_ledger(folder), [], locks._flock

    def delayed(handle, kind):
        if not made:
            made.append(None)
            shutil.rmtree(folder)
            refused.close()
            made.append(open_ledger(folder))
        return lock(handle, kind)

    monkeypatch.setattr(locks, "_flock", delayed)
    with pytest.raises(LedgerError, match="ledger-locked"):
        open_ledger(folder)
    made[1].close()


def test_a_killed_holder_leaves_the_ledger_free(folder):
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        open_ledger(folder)
        os.write(go, b"x")
        signal.pause()
    os.read(ready, 1)
    with pytest.raises(LedgerError, match="ledger-locked"):
        open_ledger(folder)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    open_ledger(folder).close()
    os.close(ready)
    os.close(go)


def test_no_other_user_may_change_a_ledger_under_any_umask(tmp_path):
    before = os.umask(0)
    try:
        with open_ledger(tmp_path / "ledgers" / "client_0000") as ledger:
            ledger.store(debit(ledger, 1).sequence, Stored("release", b"bytes"), b"state")
    finally:
        os.umask(before)
    folder = tmp_path / "ledgers" / "client_0000"
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "releases")} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()} == {0o600}


def test_a_closed_ledger_takes_no_debit(folder):
    ledger = open_ledger(folder)
    ledger.close()
    with pytest.raises(LedgerError, match="ledger-closed"):
        debit(ledger, 4)
    assert len(read_ledger(folder)) == 4


@pytest.mark.parametrize(("call", "charged"), [("pwritev", 0), ("write", 1)], ids=["journal", "ledger.jsonl"])
def test_a_failed_write_stops_this_opening_and_the_next_one_recovers(folder, monkeypatch, call, charged):
    """Asked again, the request passed for answered, or its step ran and only its result was refused."""

    def full(*args):
        raise OSError(28, "No space left on device")

    with open_ledger(folder) as ledger:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(OSError, match="No space") as found:
                debit(ledger, 4)
            assert found.value.filename == str(folder)
        for again in (lambda: debit(ledger, 5), lambda: ledger.lookup("job-4")):
            with pytest.raises(LedgerError, match="ledger-closed"):
                again()
    with open_ledger(folder) as ledger:
        assert ledger.spent("job") == {"train": 3 + charged}
        debit(ledger, 4 + charged)


def test_a_ledger_that_cannot_be_flushed_at_its_end_closes_its_own_files_once(folder, monkeypatch):
    """Closed twice, it would close files that another thread has opened since under the same numbers."""

    def broken(fd):
        raise OSError(errno.EIO, "Input/output error")

    def close_when_broken(ledger, others):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", broken)
            try:
                ledger.close()
            finally:
                others += [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]

    ledger, others = Ledger(folder, owner=OWNER), []
    debit(ledger, 4)
    with pytest.raises(OSError, match="Input/output error"), ledger:
        close_when_broken(ledger, others)
    for other in others:
        os.close(other)
    open_ledger(folder).close()


def test_a_ledger_whose_larger_journal_cannot_be_opened_closes_its_own_files_once(folder, monkeypatch):
    opened = os.open

    def too_many(path, flags, *mode):
        if path == folder / "journal" and not flags & os.O_CREAT:
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, flags, *mode)

    with open_ledger(folder) as ledger, monkeypatch.context() as patch:
        patch.setattr(os, "open", too_many)
        with pytest.raises(OSError, match="Too many open files"):
            ledger.debit(job="job", request="job-4", round=4, kind="train", slots=["s" * 9000], events=[STEP])
    open_ledger(folder).close()


def test_another_owner_is_refused(folder):
    with pytest.raises(LedgerError) as error:
        open_ledger(folder, owner={**OWNER, "client": 4})
    assert error.value.code == "ledger-foreign"


def test_a_journal_that_is_written_while_it_is_read_is_read_again(folder, monkeypatch):
    """A reader holds no lock, and may see half of a slot."""
    whole = (folder / "journal").read_bytes()
    half = whole[: slot_start(1) + 100] + bytes(len(whole) - slot_start(1) - 100)
    seen = iter([half, whole, whole])
    monkeypatch.setattr(journal, "read_bytes", lambda path: next(seen))
    assert len(read_ledger(folder)) == 4
    assert next(seen, None) is None


def test_at_the_end_of_a_run_keys_of_a_ledger_in_use_and_of_requests_without_an_answer_stay(folder):
    with open_ledger(folder) as ledger:
        debit(ledger, 4)
        ledger.store(debit(ledger, 5).sequence, Stored("release", b"bytes 5"), repeatable=True)
        with pytest.raises(LedgerError, match="ledger-locked"):
            erase_kept_keys(folder)
        assert keys_in(folder) == [4, 5]
    erase_kept_keys(folder)
    assert keys_in(folder) == [4]


def test_where_there_is_no_ledger_no_keys_are_erased_and_no_folder_is_made(tmp_path):
    erase_kept_keys(tmp_path / "ledger")
    assert not list(tmp_path.iterdir())


def test_a_journal_that_cannot_be_flushed_at_the_end_of_a_run_is_named(folder, monkeypatch):
    with open_ledger(folder) as ledger:
        ledger.store(debit(ledger, 4).sequence, Stored("release", b"bytes 4"), repeatable=True)
    monkeypatch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error") as failed:
        erase_kept_keys(folder)
    assert failed.value.filename == str(folder / "journal")


def test_states_and_answers_of_jobs_are_apart(tmp_path):
    with open_ledger(tmp_path / "ledger") as ledger:
        for number in range(1, 5):
            ledger.store(debit(ledger, number, job="a").sequence, Stored("release", b"a"), b"state a")
        for number in range(1, 5):
            ledger.store(debit(ledger, number, job="b").sequence, Stored("release", b"b"), b"state b")
        assert isinstance(debit(ledger, 5, job="a"), Charged)
        assert (ledger.state("a"), ledger.state("b")) == (b"state a", b"state b")
        assert ledger.lookup("a-4") == Stored("release", b"a")
        assert ledger.lookup("a-1") == Expired()
