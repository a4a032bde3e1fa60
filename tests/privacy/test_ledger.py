"""The privacy ledger: what it refuses to open, what a crash may leave, what survives a restart."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import tracemalloc

import pytest
from folder_names import after_each_kill
from journals import MOST_CUT, cut_debit, keys_in, slot_start

from dpcfl_net.core import locks
from dpcfl_net.core.atomic import DRAFT
from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.errors import LedgerError
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.privacy.ledger import journal
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.ledger.durable import Disk
from dpcfl_net.privacy.ledger.entries import FIRST_PREV, Entry, counter_line, digest, verify_lines
from dpcfl_net.privacy.ledger.journal import KEY_AT, LINE_AT, SLOTS
from dpcfl_net.privacy.ledger.ledger import Charged, Expired, Ledger
from dpcfl_net.privacy.ledger.ledger_folder import erase_kept_keys, read_state
from dpcfl_net.privacy.ledger.release_store import Stored, answers

OWNER = {"run": "r1", "job": "j" * 64, "client": 3}
STEP = SampledGaussian(1.25, 0.1, 7)


def open_ledger(folder, owner=OWNER):
    return Ledger(folder, owner=owner, durable=False)


def debit(ledger, number, *, job="job", key=None):
    return ledger.debit(job=job, request=f"{job}-{number}", round=number, kind="train", slots=["train"], events=[STEP], key=key)


@pytest.fixture
def folder(tmp_path):
    """A ledger with three answered debits, closed."""
    with open_ledger(tmp_path / "ledger") as ledger:
        for number in (1, 2, 3):
            ledger.store(debit(ledger, number).sequence, Stored("release", b"bytes %d" % number), b"state %d" % number)
    return tmp_path / "ledger"


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


def test_a_failed_write_stops_this_opening_and_the_next_one_recovers(folder, monkeypatch):
    def full(fd, data, offset):
        raise OSError(28, "No space left on device")

    with open_ledger(folder) as ledger:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", full)
            with pytest.raises(OSError, match="No space") as found:
                debit(ledger, 4)
            assert found.value.filename == str(folder)
        with pytest.raises(LedgerError, match="ledger-closed"):
            debit(ledger, 5)
    with open_ledger(folder) as ledger:
        assert ledger.spent("job") == {"train": 3}
        debit(ledger, 4)


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


# What no crash leaves


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda lines: [lines[0], lines[2], lines[1], lines[3]], id="reordered"),
        pytest.param(lambda lines: [lines[0], lines[2], lines[3]], id="deleted"),
        pytest.param(lambda lines: [*lines[:2], lines[1], *lines[2:]], id="doubled"),
        pytest.param(lambda lines: lines[1:], id="no header"),
        pytest.param(lambda lines: [*lines, b"\n"], id="empty line"),
        pytest.param(lambda lines: [*lines, b"{}\n"], id="foreign line"),
        pytest.param(lambda lines: [*lines, b"[" * 100000 + b"\n"], id="deep nesting"),
        pytest.param(lambda lines: [lines[0], lines[1][:40] + b"\n", *lines[2:]], id="cut in the middle"),
        pytest.param(lambda lines: [*lines, b'{"cut'], id="cut line without a debit under way"),
    ],
)
def test_a_broken_chain_is_refused(folder, edit):
    write_lines(folder, edit(lines_of(folder)))
    if lines_of(folder)[-1].endswith(b"\n"):
        assert refusal(folder) == "ledger-broken"
    else:
        with pytest.raises(LedgerError, match="ledger-broken"):
            open_ledger(folder)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(b"1.25", b"9.25", id="cheaper event"),
        pytest.param(b'"round":1', b'"round": 1', id="not canonical"),
        pytest.param(b'"round":1', b'"note":1,"round":1', id="further field"),
    ],
)
def test_an_edit_of_a_line_that_the_journal_has_no_more_is_refused(folder, old, new):
    with open_ledger(folder) as ledger:
        for number in range(4, 2 * SLOTS):
            ledger.store(debit(ledger, number).sequence, Stored("release", b"x"))
    header, first, *others = lines_of(folder)
    assert old in first
    write_lines(folder, [header, first.replace(old, new), *others])
    assert refusal(folder) == "ledger-broken"


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param([Entry(0, "header"), Entry(2, "torn", job="a")], id="number left out"),
        pytest.param([Entry(0, "torn", job="a")], id="no header"),
        pytest.param([Entry(0, "header"), Entry(1, "header")], id="two headers"),
        pytest.param([Entry(0, "header"), Entry(1, "debit", slots=("a",), events=(STEP,), spent={"a": 2})], id="wrong sum"),
        pytest.param([Entry(0, "header"), Entry(1, "debit", slots=("a",), spent={"a": 1})], id="slot without event"),
        pytest.param([Entry(0, "header"), Entry(1, "closed", torn=0)], id="nothing truncated"),
        pytest.param(
            [Entry(0, "header"), Entry(1, "torn", round=1), Entry(2, "closed", torn=1, round=2)], id="another round closed"
        ),
        pytest.param(
            [Entry(0, "header"), Entry(1, "torn", job="a"), Entry(2, "closed", torn=1, job="b")], id="another job closed"
        ),
        pytest.param([Entry(0, "header"), *(Entry(n, "debit", id="a", round=n) for n in (1, 2))], id="request charged twice"),
        pytest.param([Entry(0, "header"), *(Entry(n, "debit", id=str(n)) for n in (1, 2))], id="round and kind charged twice"),
        pytest.param([Entry(0, "header", format=2)], id="another format"),
    ],
)
def test_a_good_chain_over_entries_that_cannot_be_is_refused(entries):
    lines, prev = [], FIRST_PREV
    for entry in entries:
        lines.append(entry.line(prev))
        prev = digest(lines[-1])
    with pytest.raises(LedgerError, match="ledger-broken"):
        verify_lines(lines, "x")


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_rolled_back_ledger_is_refused(folder, kept):
    write_lines(folder, lines_of(folder)[:kept])
    assert refusal(folder) == "ledger-rolled-back"


def test_a_line_that_was_whole_once_cannot_pass_as_torn(folder):
    whole = (folder / "ledger.jsonl").read_bytes()
    (folder / "ledger.jsonl").write_bytes(whole[:-1])
    assert refusal(folder) == "ledger-rolled-back"


def test_a_removed_ledger_or_journal_is_refused(folder):
    saved = (folder / "journal").read_bytes()
    (folder / "journal").unlink()
    assert refusal(folder) == "ledger-broken"
    (folder / "journal").write_bytes(b"3 nonsense\n")
    assert refusal(folder) == "ledger-broken"
    (folder / "journal").write_bytes(saved)
    (folder / "ledger.jsonl").unlink()
    assert refusal(folder) == "ledger-rolled-back"
    (folder / "journal").unlink()
    assert refusal(folder) == "ledger-broken"


def test_the_first_line_alone_is_missed_as_well(tmp_path):
    open_ledger(tmp_path / "ledger").close()
    (tmp_path / "ledger" / "ledger.jsonl").unlink()
    assert refusal(tmp_path / "ledger") == "ledger-rolled-back"


def test_a_ledger_without_its_journal_is_not_continued(folder):
    """Neither the operator's copy nor one that is cut to its first line, whose stored answers show that there were more."""
    newest = len(lines_of(folder)) - 1
    (folder / "counter").write_bytes(counter_line(newest, digest(lines_of(folder)[newest])))
    (folder / "journal").unlink()
    shutil.copytree(folder, folder.with_name("copy"), ignore=lambda *_: ["releases"])
    assert len(read_ledger(folder.with_name("copy"))) == 4
    (folder / "counter").unlink()
    write_lines(folder, lines_of(folder)[:1])
    for each in (folder, folder.with_name("copy")):
        with pytest.raises(LedgerError, match="journal is missing"):
            open_ledger(each)


def test_a_copy_is_compared_with_its_counter(folder):
    first, *others = lines_of(folder)
    (folder / "journal").unlink()
    for number, written, lines, code in (
        (3, others[2], [first, *others], None),
        (2, others[1], [first, *others], None),  # it is being extended
        (3, others[2], [first, *others[:2]], "ledger-rolled-back"),
        (3, others[1], [first, *others], "ledger-broken"),
        (0, None, [first, *others], "ledger-broken"),
        (0, None, [first, others[0][:-1]], "ledger-broken"),
        (0, None, [first], None),
    ):
        (folder / "counter").unlink(missing_ok=True)
        if written:
            (folder / "counter").write_bytes(counter_line(number, digest(written)))
        write_lines(folder, lines)
        if code is None:
            assert len(read_ledger(folder)) == len(lines)
            continue
        with pytest.raises(LedgerError) as error:
            read_ledger(folder)
        assert error.value.code == code


def test_a_changed_answer_is_noticed_before_it_is_used(folder):
    (path,) = (path for path in (folder / "releases").iterdir() if b"state 3" in path.read_bytes())
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"!")
    with open_ledger(folder) as ledger, pytest.raises(LedgerError, match="ledger-broken"):
        ledger.lookup("job-3")
    path.write_bytes(whole.replace(b"state 3", b"state 4"))
    with open_ledger(folder) as ledger, pytest.raises(LedgerError, match="ledger-broken"):
        ledger.state("job")
    for damage in (lambda: path.write_bytes(whole[:40] + b"!" + whole[41:]), lambda: path.write_bytes(b"")):
        damage()
        with pytest.raises(LedgerError, match="ledger-broken"):
            open_ledger(folder)


def test_an_answer_to_another_request_is_noticed(folder):
    """Of a copy of the ledger, in which the same round was charged with other content."""
    copy = shutil.copytree(folder, folder.with_name("copy"))
    for each, request in ((folder, "job-4"), (copy, "other")):
        with open_ledger(each) as ledger:
            charged = ledger.debit(job="job", request=request, round=4, kind="train", slots=["train"], events=[STEP])
            ledger.store(charged.sequence, Stored("release", b"bytes 4 of " + request.encode()))
    (theirs,) = (path for path in (copy / "releases").iterdir() if b"bytes 4" in path.read_bytes())
    shutil.copy(theirs, folder / "releases" / theirs.name)
    assert sorted(answers(folder, read_ledger(folder))) == [2, 3]
    with pytest.raises(LedgerError, match="belongs to no debit"):
        open_ledger(folder)


def test_a_damaged_state_is_noticed_although_its_answer_is_no_longer_kept(folder):
    with open_ledger(folder) as ledger:
        for number in range(4, 9):
            ledger.store(debit(ledger, number).sequence, Stored("release", b"bytes"))
    (path,) = (path for path in (folder / "releases").iterdir() if b"state 3" in path.read_bytes())
    path.write_bytes(b"!" + path.read_bytes()[1:])
    with pytest.raises(LedgerError, match="the first line is damaged"):
        open_ledger(folder)


def test_more_damaged_answers_than_a_crash_can_have_cut_are_refused_and_stay(folder):
    """An older client state would pass for the newest one, and the damaged file that shows it was removed."""
    with open_ledger(folder) as ledger:
        for number in range(4, 9):
            ledger.store(debit(ledger, number).sequence, Stored("release", b"bytes"))
        debit(ledger, 9)
    (folder / "releases" / "9.answer").write_bytes(b"cut")
    (path,) = (path for path in (folder / "releases").iterdir() if b"state 3" in path.read_bytes())
    whole = path.read_bytes()
    path.write_bytes(b"!" + whole[1:])
    for _ in range(2):
        with pytest.raises(
            LedgerError, match=f"{path.name} and 9.answer: the first line is damaged; a crash can have cut 1, not all"
        ):
            open_ledger(folder)
    path.write_bytes(whole)
    with open_ledger(folder) as ledger:
        assert ledger.state("job") == b"state 3"


def test_a_damaged_answer_beside_a_charge_without_one_stays(folder):
    """It was removed as one that a crash cut short, before its absence was noticed."""
    with open_ledger(folder) as ledger:
        debit(ledger, 4)
    (path,) = (path for path in (folder / "releases").iterdir() if b"state 3" in path.read_bytes())
    path.write_bytes(b"!" + path.read_bytes()[1:])
    with pytest.raises(LedgerError, match="the result of entry 3 is missing or damaged"):
        open_ledger(folder)
    assert path.exists()


@pytest.mark.parametrize(
    "change",
    [{"sequence": [3]}, {"sequence": 3.0}, {"sequence": -1}, {"round": None}, {"id": 5}, {"release": [[], 0, "", ""]},
     {"release": [10**30, 0, "", ""]}, {"release": [0, 5, "", ""]}, {"release": []}, {"state": [0]}, {"state": [-1, ""]}, {"status": ["release"]}],
)  # fmt: skip
def test_a_first_line_of_an_answer_with_values_of_another_kind_is_noticed(folder, change):
    """Anyone can compute the check of such a line: opening the ledger ended in a TypeError."""
    (path,) = (path for path in (folder / "releases").iterdir() if b"state 3" in path.read_bytes())
    line, _, rest = path.read_bytes().partition(b"\n")
    header = {name: value for name, value in json.loads(line).items() if name != "check"} | change
    path.write_bytes(canonical_json({**header, "check": digest(canonical_json(header))}) + b"\n" + rest)
    with pytest.raises(LedgerError, match="the first line is damaged"):
        open_ledger(folder)


def test_a_first_line_of_an_answer_that_is_nested_without_end_is_noticed(folder):
    (path,) = (path for path in (folder / "releases").iterdir() if b"state 3" in path.read_bytes())
    path.write_bytes(b"[" * 10**5)
    with pytest.raises(LedgerError, match="the first line is damaged"):
        open_ledger(folder)


def test_no_memory_is_taken_for_an_answer_that_claims_to_be_long(folder):
    (path,) = (path for path in (folder / "releases").iterdir() if b"state 3" in path.read_bytes())
    line, _, rest = path.read_bytes().partition(b"\n")
    header = {name: value for name, value in json.loads(line).items() if name != "check"}
    header["release"][0] = 1 << 34
    path.write_bytes(canonical_json({**header, "check": digest(canonical_json(header))}) + b"\n" + rest)
    tracemalloc.start()
    try:
        with open_ledger(folder) as ledger, pytest.raises(LedgerError, match="release"):
            ledger.lookup("job-3")
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("charged", [(), (4,), (4, 5)])
@pytest.mark.parametrize("removed", [2, 3])
def test_a_removed_answer_is_noticed_before_an_older_state_is_used(folder, removed, charged):
    """Charges without an answer, as after a crash, leave the answers of the two rounds before in place."""
    with open_ledger(folder) as ledger:
        for number in charged:
            debit(ledger, number)
    files = [path for path in (folder / "releases").iterdir() if b"bytes %d" % removed in path.read_bytes()]
    (only,) = files
    only.unlink()
    with pytest.raises(LedgerError, match=f"the result of entry {removed} is missing or damaged") as error:
        open_ledger(folder)
    assert error.value.code == "ledger-broken"


def test_a_removed_answer_that_is_no_longer_kept_is_not_missed(folder):
    (old,) = [path for path in (folder / "releases").iterdir() if b"bytes 1" in path.read_bytes()]
    old.unlink()
    with open_ledger(folder) as ledger:
        assert ledger.lookup("job-1") == Expired()
        assert ledger.state("job") == b"state 3"


def test_a_key_put_under_another_debit_is_noticed(folder):
    with open_ledger(folder) as ledger:
        debit(ledger, 4)
        debit(ledger, 5)
    content = bytearray((folder / "journal").read_bytes())
    four, five = slot_start(4) + KEY_AT, slot_start(5) + KEY_AT
    content[four : four + 48] = b"\1" + content[five + 1 : five + 48]
    (folder / "journal").write_bytes(content)
    assert refusal(folder) == "ledger-broken"


# What a crash leaves


@pytest.mark.parametrize("part", [b"bytes 4", b"state 4"])
def test_an_answer_of_which_a_crash_lost_a_part_is_computed_again(folder, part):
    """A device may write the sectors of a file in any order."""
    with open_ledger(folder) as ledger:
        charged = debit(ledger, 4)
        before = (folder / "journal").read_bytes()
        ledger.store(charged.sequence, Stored("release", b"bytes 4"), b"state 4")
    (folder / "journal").write_bytes(before)  # the key is erased after the answer was flushed
    (path,) = (path for path in (folder / "releases").iterdir() if part in path.read_bytes())
    path.write_bytes(path.read_bytes().replace(part, bytes(len(part))))
    with open_ledger(folder) as ledger:
        assert (ledger.lookup("job-4"), ledger.state("job")) == (charged, b"state 3")


def test_a_state_is_read_while_the_next_answer_is_written(folder):
    with open_ledger(folder) as ledger:
        debit(ledger, 4)
        (folder / "releases" / "9.answer").write_bytes(b"cut")
        assert read_state(folder, "job") == b"state 3"


def test_a_cut_answer_is_removed_durably(folder, monkeypatch):
    """It would be back after a crash of the machine, when its request has another answer, and would be taken for an edited one."""
    with open_ledger(folder) as ledger:
        debit(ledger, 4)
    (folder / "releases" / "9.answer").write_bytes(b"cut")
    trail, fsync, unlink = [], os.fsync, os.unlink
    monkeypatch.setattr(os, "fsync", lambda fd: (trail.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)))
    monkeypatch.setattr(os, "unlink", lambda path: (trail.append(os.path.basename(path)), unlink(path)))
    Ledger(folder, owner=OWNER).close()
    assert trail[-2:] == ["9.answer", "releases"]


def test_a_journal_that_is_older_than_the_lines_is_refused(folder):
    behind = (folder / "journal").read_bytes()
    with open_ledger(folder) as ledger:
        debit(ledger, 4)
    (folder / "journal").write_bytes(behind)
    with pytest.raises(LedgerError, match="ledger-broken"):
        open_ledger(folder)
    assert len(read_ledger(folder)) == 5  # a reader may come between the two


@pytest.mark.parametrize("kept", [0, 1, 100, None])
def test_lines_that_a_crash_has_lost_come_back_from_the_journal(folder, kept):
    before = (folder / "ledger.jsonl").read_bytes()
    ledger = open_ledger(folder)
    charged = [debit(ledger, number) for number in (4, 5)]
    killed(ledger)
    whole = (folder / "ledger.jsonl").read_bytes()
    write_lines(folder, [whole[: None if kept is None else len(before) + kept]])
    assert len(read_ledger(folder)) == 6
    with open_ledger(folder) as ledger:
        assert [ledger.lookup(f"job-{number}") for number in (4, 5)] == charged
        assert ledger.truncated("job") == []
    assert (folder / "ledger.jsonl").read_bytes() == whole
    write_lines(folder, lines_of(folder)[:-1])
    assert refusal(folder) == "ledger-rolled-back"


@pytest.mark.parametrize("hole", [1, 300, None])
@pytest.mark.parametrize("written_after", [0, 40])
def test_zeros_where_a_crash_has_lost_the_content_of_lines_come_back_from_the_journal(folder, hole, written_after):
    """File systems may keep the new length of a file whose last bytes never reached the device, or later bytes without earlier ones."""
    before = len((folder / "ledger.jsonl").read_bytes())
    ledger = open_ledger(folder)
    charged = [debit(ledger, number) for number in (4, 5)]
    killed(ledger)
    whole = (folder / "ledger.jsonl").read_bytes()
    end = len(whole) - written_after
    start = before if hole is None else end - hole
    write_lines(folder, [whole[:start], bytes(end - start), whole[end:]])
    assert len(read_ledger(folder)) == 6
    with open_ledger(folder) as ledger:
        assert [ledger.lookup(f"job-{number}") for number in (4, 5)] == charged
    assert (folder / "ledger.jsonl").read_bytes() == whole
    write_lines(folder, [whole[:-1], b"\0"])
    assert refusal(folder) == "ledger-rolled-back"


def test_a_tail_that_is_not_the_begin_of_the_line_that_was_written_is_refused(folder):
    ledger = open_ledger(folder)
    debit(ledger, 4)
    killed(ledger)
    write_lines(folder, [*lines_of(folder)[:-1], b'{"events":[]'])
    assert refusal(folder) == "ledger-broken"


@pytest.mark.parametrize("number", [0, 5, 12, 17])
def test_many_debits_and_a_long_line_leave_the_same_chain(tmp_path, number):
    """More than the journal has slots; a crash after any of them; a line that is longer than a slot."""
    folder, written = tmp_path / "ledger", []
    ledger = open_ledger(folder)
    for t in range(1, 41):
        charged = ledger.debit(job="job", request=f"job-{t}", round=t, kind="train", slots=["s" * (9000 if t == 20 + number else 5)],
                               events=[STEP])  # fmt: skip
        written.append(lines_of(folder)[-1])
        ledger.store(charged.sequence, Stored("release", b"bytes %d" % t), b"state %d" % t)
        if t == 23 + number:
            killed(ledger)
            write_lines(folder, lines_of(folder)[:-2])
            ledger = open_ledger(folder)
        assert ledger.lookup(f"job-{t}") == Stored("release", b"bytes %d" % t)
        assert len(list((folder / "releases").iterdir())) <= 3
    ledger.close()
    assert lines_of(folder)[1:] == written
    assert [entry.round for entry in read_ledger(folder)] == list(range(41))


def test_lines_that_the_journal_has_no_more_are_missed_without_the_number_of_the_last_flushed_one(folder):
    """A crash may leave that number cut short."""
    with open_ledger(folder) as ledger:
        for number in range(4, 2 * SLOTS):
            ledger.store(debit(ledger, number).sequence, Stored("release", b"x"))
    content = bytearray((folder / "journal").read_bytes())
    content[64:72] = b"\xff" * 8
    (folder / "journal").write_bytes(content)
    assert len(read_ledger(folder)) == 2 * SLOTS
    write_lines(folder, lines_of(folder)[: SLOTS - 1])
    assert refusal(folder) == "ledger-rolled-back"


@pytest.mark.parametrize("number", [1, 3])
def test_a_damaged_slot_is_refused(folder, number):
    """Slot 1 is of an earlier line; that of line 3, the newest, is taken for the begin of a debit, which line 3 then is not."""
    content = bytearray((folder / "journal").read_bytes())
    content[slot_start(number) + LINE_AT + 50] ^= 1
    (folder / "journal").write_bytes(content)
    with pytest.raises(LedgerError, match="ledger-broken"):
        open_ledger(folder)


@pytest.mark.parametrize("numbers", [[1], [0, 1, 2, 3]])
def test_a_slot_of_zeros_is_refused(folder, numbers):
    content = bytearray((folder / "journal").read_bytes())
    for number in numbers:
        content[slot_start(number) : slot_start(number + 1)] = bytes(slot_start(1) - slot_start(0))
    (folder / "journal").write_bytes(content)
    assert refusal(folder) == "ledger-broken"


def test_a_request_that_fits_no_slot_is_refused_before_it_is_charged(folder):
    with open_ledger(folder) as ledger, pytest.raises(ValueError, match="kind has 600 characters"):
        ledger.debit(job="job", request="new", round=4, kind="k" * 600, slots=["train"], events=[STEP])
    with open_ledger(folder) as ledger:
        assert ledger.spent("job") == {"train": 3}


def test_an_answer_that_is_not_stored_stays_one_in_a_larger_journal(folder):
    """Without its mark it would be taken for a request that was never answered, and sent with other bits."""
    answer = Stored("release", b"bytes 4")
    with open_ledger(folder) as ledger:
        charged = debit(ledger, 4)
        ledger.store(charged.sequence, answer, repeatable=True)
        ledger.debit(job="job", request="long", round=4, kind="long", slots=["long" * 1000], events=[STEP])
    with open_ledger(folder) as ledger:
        assert ledger.lookup("job-4") == Charged(charged.sequence, charged.key, answer.digest())
    assert answers(folder, read_ledger(folder))[charged.sequence] == answer.digest()
    assert charged.sequence not in answers(folder, read_ledger(folder)[:4])


@pytest.mark.parametrize("size", [100, 4096])
def test_a_place_in_which_no_slot_was_written_yet_is_empty(folder, size):
    content = bytearray((folder / "journal").read_bytes())
    content[slot_start(7) : slot_start(7) + size] = content[slot_start(3) : slot_start(3) + size]
    (folder / "journal").write_bytes(content)
    assert refusal(folder) == "ledger-broken"


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


@pytest.mark.parametrize("cut", [600, 1030, MOST_CUT])
def test_a_truncated_last_line_is_marked_and_waits_for_its_charge(folder, cut):
    tear(folder, cut=cut)
    assert len(read_ledger(folder)) == 4
    for _ in range(2):
        with open_ledger(folder) as ledger:
            (truncated,) = ledger.truncated("job")
            assert (truncated.round, truncated.kind, truncated.id) == (4, "train", "job-4")
            assert ledger.spent("job") == {"train": 3}
            assert ledger.lookup("job-4") is None
            assert ledger.truncated("other") == []
            assert keys_in(folder) == []
    with open_ledger(folder) as ledger:
        ledger.charge_truncated(truncated, ["train"], [STEP])
        assert ledger.truncated("job") == []
        assert ledger.spent("job") == {"train": 4}
        with pytest.raises(ValueError, match="not a truncated line"):
            ledger.charge_truncated(truncated, ["train"], [STEP])
        debit(ledger, 5)
    assert [entry.type for entry in read_ledger(folder)] == ["header", *["debit"] * 3, "torn", "closed", "debit"]


@pytest.mark.parametrize(("begins", "cuts"), [(0, True), (LINE_AT, False)])
def test_a_debit_that_was_cut_over_an_older_slot_is_marked_if_its_note_was_written(folder, begins, cuts):
    """The journal is full: what the cut debit did not overwrite is of an older one, whose line is in ledger.jsonl."""
    with open_ledger(folder) as ledger:
        for number in range(4, 2 * SLOTS):
            ledger.store(debit(ledger, number).sequence, Stored("release", b"x"))
    before, lines, slot = (folder / "journal").read_bytes(), lines_of(folder), slot_start(2 * SLOTS)
    with open_ledger(folder) as ledger:
        debit(ledger, 2 * SLOTS)
    content, written = bytearray(before), (folder / "journal").read_bytes()
    content[slot + begins : slot + MOST_CUT] = written[slot + begins : slot + MOST_CUT]
    (folder / "journal").write_bytes(content)
    write_lines(folder, lines)
    with open_ledger(folder) as ledger:
        assert [entry.round for entry in ledger.truncated("job")] == [2 * SLOTS] * cuts
        assert (ledger.spent("job"), ledger.lookup("job-32"), keys_in(folder)) == ({"train": 2 * SLOTS - 1}, None, [])


def test_a_slot_with_the_key_of_a_debit_that_was_cut_before_is_taken_for_a_cut_one(folder):
    """A device may write the sectors of a page in any order: of one debit only the key, of the next one, after a restart, all but the key."""
    journal, lines, slot = (folder / "journal").read_bytes(), lines_of(folder), slot_start(4)
    content = []
    for number in (4, 5):
        with open_ledger(folder) as ledger:
            debit(ledger, number, key=bytes([number]) * 32)
        content.append(bytearray((folder / "journal").read_bytes()[slot:]))
        (folder / "journal").write_bytes(journal)
        write_lines(folder, lines)
    content[1][KEY_AT:LINE_AT] = content[0][KEY_AT:LINE_AT]
    (folder / "journal").write_bytes(journal[:slot] + content[1])
    assert len(read_ledger(folder)) == 4
    with open_ledger(folder) as ledger:
        (truncated,) = ledger.truncated("job")
        assert (truncated.round, ledger.spent("job"), keys_in(folder)) == (5, {"train": 3}, [])


@pytest.mark.parametrize("left", [bytes(48), bytes(1) + 47 * b"k"])
def test_a_slot_whose_key_alone_is_missing_is_taken_for_a_cut_one(folder, left):
    """In the place of the key are the zeros of an erased one, or another key that begins with a zero: the ledger was refused as edited."""
    journal, lines, slot = (folder / "journal").read_bytes(), lines_of(folder), slot_start(4)
    with open_ledger(folder) as ledger:
        debit(ledger, 4)
    content = bytearray((folder / "journal").read_bytes()[slot:])
    content[KEY_AT:LINE_AT] = left.ljust(LINE_AT - KEY_AT, b"\0")
    (folder / "journal").write_bytes(journal[:slot] + content)
    write_lines(folder, lines)
    assert len(read_ledger(folder)) == 4
    for _ in range(2):
        with open_ledger(folder) as ledger:
            (truncated,) = ledger.truncated("job")
            assert (truncated.round, ledger.spent("job"), keys_in(folder)) == (4, {"train": 3}, [])
    with open_ledger(folder) as ledger:
        ledger.charge_truncated(truncated, ["train"], [STEP])
        debit(ledger, 5)
    assert [entry.type for entry in read_ledger(folder)] == ["header", *["debit"] * 3, "torn", "closed", "debit"]


def test_an_answer_that_is_not_stored_counts_without_its_key_and_its_line(folder):
    """The worker was killed, the keys were erased at the end of the run, and a crash of the machine lost the line."""
    lines, ledger = lines_of(folder), open_ledger(folder)
    ledger.store(debit(ledger, 4).sequence, Stored("release", b"bytes 4"), repeatable=True)
    killed(ledger)
    erase_kept_keys(folder)
    write_lines(folder, lines)
    with open_ledger(folder) as ledger:
        assert (ledger.lookup("job-4"), ledger.truncated("job"), ledger.spent("job")) == (Expired(), [], {"train": 4})


def test_an_answered_debit_without_its_result_is_refused_although_its_line_is_in_the_journal_alone(folder):
    """Its line counted: the file has it, or its result is there."""
    lines, ledger = lines_of(folder), open_ledger(folder)
    ledger.store(debit(ledger, 4).sequence, Stored("release", b"bytes 4"))
    killed(ledger)
    whole = lines_of(folder)
    write_lines(folder, lines)
    with open_ledger(folder) as ledger:
        assert ledger.lookup("job-4") == Stored("release", b"bytes 4")
    assert lines_of(folder) == whole
    next(path for path in (folder / "releases").glob("*.answer") if b"bytes 4" in path.read_bytes()).unlink()
    with pytest.raises(LedgerError, match="the result of entry 4 is missing"):
        open_ledger(folder)


@pytest.mark.parametrize("cut", [0, 1, 60])
def test_a_debit_that_hardly_began_costs_nothing(folder, cut):
    tear(folder, cut=cut)
    for _ in range(2):
        with open_ledger(folder) as ledger:
            assert (ledger.truncated("job"), ledger.lookup("job-4")) == ([], None)
    with open_ledger(folder) as ledger:
        debit(ledger, 4)
    assert [entry.type for entry in read_ledger(folder)] == ["header", *["debit"] * 4]


def test_left_over_temporary_files_are_removed_and_half_erased_keys_erased(folder):
    with open_ledger(folder) as ledger:
        charged = debit(ledger, 4)
        content = bytearray((folder / "journal").read_bytes())
        ledger.store(charged.sequence, Stored("release", b"bytes 4"))
    at = slot_start(4) + KEY_AT
    content[at : at + 5] = bytes(5)
    (folder / "journal").write_bytes(content)
    (folder / f".journal.7{DRAFT}").write_bytes(b"half a journal")
    with open_ledger(folder) as ledger:
        assert ledger.lookup("job-4") == Stored("release", b"bytes 4")
    assert charged.key[5:] not in (folder / "journal").read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["journal", "ledger.jsonl", "lock", "releases"]


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
        trail.clear()
    assert trail == [("fdatasync", "ledger.jsonl"), ("pwritev", "journal"), ("fdatasync", "journal")]


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
