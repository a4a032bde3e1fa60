"""What no crash leaves in a ledger is refused: edited lines, answers and states, rolled back and removed files."""

from __future__ import annotations

import json
import shutil
import tracemalloc

import pytest
from journals import slot_start
from ledgers import STEP, answered, debit, lines_of, open_ledger, refusal, write_lines

from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.errors import LedgerError
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.ledger.entries import FIRST_PREV, Entry, counter_line, digest, verify_lines
from dpcfl_net.privacy.ledger.journal import KEY_AT, SLOTS
from dpcfl_net.privacy.ledger.ledger import Expired
from dpcfl_net.privacy.ledger.release_store import Stored, answers


@pytest.fixture
def folder(tmp_path):
    return answered(tmp_path / "ledger")


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
