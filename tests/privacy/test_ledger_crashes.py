"""What a crash leaves in a ledger: cut debits and answers, lost lines, half-written slots."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
from journals import MOST_CUT, keys_in, slot_start
from ledgers import OWNER, STEP, answered, debit, killed, lines_of, open_ledger, refusal, tear, write_lines

from dpcfl_net.core.atomic import DRAFT
from dpcfl_net.core.errors import LedgerError
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.ledger.durable import Disk
from dpcfl_net.privacy.ledger.journal import KEY_AT, LINE_AT, SLOTS
from dpcfl_net.privacy.ledger.ledger import Charged, Expired, Ledger
from dpcfl_net.privacy.ledger.ledger_folder import erase_kept_keys, read_state
from dpcfl_net.privacy.ledger.release_store import Stored, answers


@pytest.fixture
def folder(tmp_path):
    return answered(tmp_path / "ledger")


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


@pytest.mark.parametrize("repeatable", [False, True], ids=["stored", "repeatable"])
def test_a_crash_before_an_answer_is_final_leaves_its_debit_without_one(folder, tmp_path, repeatable):
    """Its file has no first line until then, whatever file is used again, and an answer that is not stored has no mark."""
    answer, state = Stored("release", b"bytes 4"), None if repeatable else b"state 4"

    def crashed():
        shutil.copytree(folder, tmp_path / "crashed")

    with open_ledger(folder) as ledger:
        charged = debit(ledger, 4)
        ledger.store(charged.sequence, answer, state, repeatable=repeatable, before_final=crashed)
        final = Charged(charged.sequence, charged.key, answer.digest()) if repeatable else answer
        assert ledger.lookup("job-4") == final
    with open_ledger(folder) as ledger:
        assert ledger.lookup("job-4") == final
    assert charged.sequence not in answers(tmp_path / "crashed", read_ledger(tmp_path / "crashed"))
    with open_ledger(tmp_path / "crashed") as ledger:
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


def test_a_charge_that_the_system_drops_after_a_failed_flush_is_not_acted_upon(folder, monkeypatch):
    """Read before it was dropped, it was computed on; the device never held it, and the ledger did not open with the result."""
    journal, whole = folder / "journal", Disk.sync_tree
    held = journal.read_bytes()

    def broken(fd):
        raise OSError(errno.EIO, "Input/output error")

    def drop_and_flush(disk, tree):
        journal.write_bytes(held)
        whole(disk, tree)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        ledger = Ledger(folder, owner=OWNER)
        with pytest.raises(OSError, match="Input/output"):
            debit(ledger, 4)
        killed(ledger)
    assert journal.read_bytes() != held
    monkeypatch.setattr(Disk, "sync_tree", drop_and_flush)
    with Ledger(folder, owner=OWNER) as ledger:
        assert (ledger.lookup("job-4"), ledger.spent("job")) == (None, {"train": 3})
    assert len(read_ledger(folder)) == 4


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
