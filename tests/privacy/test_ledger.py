"""The privacy ledger: what it refuses to open, what a crash may leave, what survives a restart."""

from __future__ import annotations

import os
import signal
import stat

import pytest

from dpcfl_net.core.atomic import DRAFT
from dpcfl_net.core.errors import LedgerError
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.privacy.ledger.entries import FIRST_PREV, Entry, digest, verify_lines
from dpcfl_net.privacy.ledger.ledger import Charged, Expired, Ledger, read_ledger
from dpcfl_net.privacy.ledger.release_store import Stored

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


def test_what_was_written_is_there_after_a_restart(folder):
    with open_ledger(folder) as ledger:
        assert ledger.spent("job") == {"train": 3}
        assert [e.events for e in ledger.charges("job")] == [(STEP,)] * 3
        assert ledger.lookup("job-3") == Stored("release", b"bytes 3")
        assert ledger.lookup("job-2") == Stored("release", b"bytes 2")
        assert ledger.lookup("job-1") == Expired()
        assert ledger.lookup("job-4") is None
        assert ledger.state("job") == b"state 3"
        assert ledger.state("other") is None
        assert read_ledger(folder) == list(ledger.entries)


def test_a_charged_request_keeps_its_key_until_its_answer_is_stored(folder):
    with open_ledger(folder) as ledger:
        charged = debit(ledger, 4)
        (path,) = (folder / "keys").iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert ledger.lookup("job-4") == charged
    with open_ledger(folder) as ledger:
        assert ledger.lookup("job-4") == charged
        ledger.store(charged.sequence, Stored("release", b"x"))
        assert list((folder / "keys").iterdir()) == []
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


def test_one_request_or_one_round_and_kind_is_never_debited_twice(folder):
    with open_ledger(folder) as ledger:
        with pytest.raises(ValueError, match="second time"):
            debit(ledger, 3)
        with pytest.raises(ValueError, match="second time"):
            ledger.debit(job="job", request="new", round=3, kind="train", slots=["train"], events=[STEP])
        assert ledger.spent("job") == {"train": 3}
    assert len(read_ledger(folder)) == 4


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


def test_a_closed_ledger_takes_no_debit(folder):
    ledger = open_ledger(folder)
    ledger.close()
    with pytest.raises(LedgerError, match="ledger-closed"):
        debit(ledger, 4)
    assert len(read_ledger(folder)) == 4


def test_a_failed_write_stops_this_opening_and_the_next_one_recovers(folder, monkeypatch):
    def full(fd, data):
        raise OSError(28, "No space left on device")

    with open_ledger(folder) as ledger:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(OSError, match="No space"):
                debit(ledger, 4)
        with pytest.raises(LedgerError, match="ledger-closed"):
            debit(ledger, 5)
    with open_ledger(folder) as ledger:
        assert ledger.spent("job") == {"train": 3}
        debit(ledger, 4)


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
    "entries",
    [
        pytest.param([Entry(0, "header"), Entry(2, "torn", job="a")], id="number left out"),
        pytest.param([Entry(0, "torn", job="a")], id="no header"),
        pytest.param([Entry(0, "header"), Entry(1, "header")], id="two headers"),
        pytest.param([Entry(0, "header"), Entry(1, "debit", slots=("a",), events=(STEP,), spent={"a": 2})], id="wrong sum"),
        pytest.param([Entry(0, "header"), Entry(1, "debit", slots=("a",), spent={"a": 1})], id="slot without event"),
        pytest.param([Entry(0, "header"), Entry(1, "closed", torn=0)], id="nothing truncated"),
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


def test_a_removed_ledger_or_counter_is_refused(folder):
    saved = (folder / "counter").read_bytes()
    (folder / "counter").unlink()
    assert refusal(folder) == "ledger-broken"
    (folder / "counter").write_bytes(b"3 nonsense\n")
    assert refusal(folder) == "ledger-broken"
    (folder / "counter").write_bytes(saved)
    (folder / "ledger.jsonl").unlink()
    assert refusal(folder) == "ledger-rolled-back"
    (folder / "counter").unlink()
    assert refusal(folder) == "ledger-broken"


def test_a_changed_answer_is_noticed_before_it_is_used(folder):
    path = folder / "releases" / "00000003.answer"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"!")
    with open_ledger(folder) as ledger, pytest.raises(LedgerError, match="ledger-broken"):
        ledger.lookup("job-3")
    path.write_bytes(whole.replace(b"state 3", b"state 4"))
    with open_ledger(folder) as ledger, pytest.raises(LedgerError, match="ledger-broken"):
        ledger.state("job")
    path.write_bytes(whole)
    path.rename(folder / "releases" / "00000001.answer")
    with pytest.raises(LedgerError, match="ledger-broken"):
        open_ledger(folder)


def test_a_key_put_under_another_debit_is_noticed(folder):
    with open_ledger(folder) as ledger:
        debit(ledger, 4)
        debit(ledger, 5)
    (folder / "keys" / "00000004.key").write_bytes((folder / "keys" / "00000005.key").read_bytes())
    with open_ledger(folder) as ledger, pytest.raises(LedgerError, match="ledger-broken"):
        ledger.lookup("job-4")


# What a crash leaves


def test_more_lines_than_counted_are_accepted_and_the_counter_is_repaired(folder):
    behind = (folder / "counter").read_bytes()
    with open_ledger(folder) as ledger:
        charged = debit(ledger, 4)
    ahead = (folder / "counter").read_bytes()
    (folder / "counter").write_bytes(behind)
    with open_ledger(folder) as ledger:
        assert ledger.lookup("job-4") == charged
    assert (folder / "counter").read_bytes() == ahead
    write_lines(folder, lines_of(folder)[:-1])
    assert refusal(folder) == "ledger-rolled-back"


def tear(folder, number=4, cut=-1):
    """Leave what a crash in the middle of appending a debit leaves."""
    behind = (folder / "counter").read_bytes()
    with open_ledger(folder) as ledger:
        debit(ledger, number)
    (folder / "counter").write_bytes(behind)
    lines = lines_of(folder)
    write_lines(folder, [*lines[:-1], lines[-1][:cut]])


@pytest.mark.parametrize("cut", [1, 100, -1])
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
            assert list((folder / "keys").iterdir()) == []
    with open_ledger(folder) as ledger:
        ledger.charge_truncated(truncated, ["train"], [STEP])
        assert ledger.truncated("job") == []
        assert ledger.spent("job") == {"train": 4}
        with pytest.raises(ValueError, match="not a truncated line"):
            ledger.charge_truncated(truncated, ["train"], [STEP])
        debit(ledger, 5)
    assert [entry.type for entry in read_ledger(folder)] == ["header", *["debit"] * 3, "torn", "closed", "debit"]


def test_left_over_temporary_files_and_keys_are_removed(folder):
    (folder / "keys" / "00000009.key").write_bytes(b"{}")
    (folder / "keys" / f".00000004.key.7{DRAFT}").write_bytes(b"half a k")
    (folder / "releases" / f".00000004.answer.7{DRAFT}").write_bytes(b"half an answer")
    open_ledger(folder).close()
    assert list((folder / "keys").iterdir()) == []
    assert sorted(path.name for path in (folder / "releases").iterdir()) == ["00000002.answer", "00000003.answer"]


def test_durable_writes_reach_the_disk_in_the_order_that_the_charge_needs(tmp_path, monkeypatch):
    """Key before line, line before counter, answer before the key is erased; each flushed before the next begins."""
    trail = []
    names = {}
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "replace", "unlink")}

    def opened(path, *rest, **more):
        fd = real["open"](path, *rest, **more)
        names[fd] = os.path.basename(path).removeprefix(".").removesuffix(f".{os.getpid()}{DRAFT}")
        return fd

    def noted(name):
        def call(fd, *rest):
            trail.append((name, names.get(fd)))
            return real[name](fd, *rest)

        return call

    def moved(source, target):
        trail.append(("replace", os.path.basename(target)))
        real["replace"](source, target)

    def unlinked(path):
        trail.append(("unlink", os.path.basename(path)))
        real["unlink"](path)

    fakes = {"open": opened, "write": noted("write"), "fsync": noted("fsync"), "replace": moved, "unlink": unlinked}
    for name, fake in fakes.items():
        monkeypatch.setattr(os, name, fake)
    with Ledger(tmp_path / "ledger", owner=OWNER) as ledger:
        trail.clear()
        debit(ledger, 1)
        key, answer = "00000001.key", "00000001.answer"

        def written(name, folder):
            return [("write", name), ("fsync", name), ("replace", name), ("fsync", folder)]

        line = [("write", "ledger.jsonl"), ("fsync", "ledger.jsonl"), ("fsync", "ledger")]
        assert trail == [*written(key, "keys"), *line, *written("counter", "ledger")]
        trail.clear()
        ledger.store(1, Stored("release", b"x"))
        erased = [("write", key), ("fsync", key), ("unlink", key), ("fsync", "keys")]
        assert trail == [("write", answer), *written(answer, "releases"), *erased]


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
