"""The gate when the power fails: any part of what was not flushed is lost, and there is still one charge and one draw."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from gates import CHARGES, JOB, PLAN, TRAIN, Crash, FakeStep, allow, ask, forbidden, open_gate, task, used_ledger
from journals import keys_in

from dpcfl_net.core.errors import LedgerError
from dpcfl_net.core.tensors import unpack
from dpcfl_net.core.types import Release
from dpcfl_net.privacy.ledger.journal import SLOTS
from dpcfl_net.privacy.ledger.ledger import Charged, Ledger
from dpcfl_net.privacy.slots import DPSGDSlot

DRAWS = 6


class StatelessStep(FakeStep):
    """A client step that keeps no state."""

    def __call__(self, charge, state):
        self.keys.append(charge.key)
        self.made.append(np.frombuffer(charge.key, "<i8"))
        events = [slot.event(charge.noise_multiplier, charge.adjacency) for slot in charge.slots.values()]
        return Release(key=self.made[-1]), {}, events


class Unflushed:
    """Writes that a power failure may lose: for each file its last flushed content and the writes after it."""

    def __init__(self):
        self.files, self.fresh, self.replaced = {}, set(), {}

    def wrote(self, fd, offset, data):
        path = os.readlink(f"/proc/self/fd/{fd}")
        with open(path, "rb") as file:
            content = file.read()
        if not content:
            self.fresh.add(path)
        self.files.setdefault(path, (content, []))[1].append((offset, data))

    def flushed(self, fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        self.files.pop(path, None)
        self.fresh -= {name for name in self.fresh if os.path.dirname(name) == path}
        self.replaced = {name: before for name, before in self.replaced.items() if os.path.dirname(name) != path}

    def renamed(self, draft, path):
        assert str(draft) not in self.files, "an unflushed draft replaces a file"
        self.fresh.discard(str(draft))
        self.replaced[str(path)] = path.read_bytes() if path.exists() else None

    def lose(self, rng, share):
        """Leave in the folder what a power failure leaves: of each unflushed write, `share` of the time all of it."""
        for path, (content, writes) in self.files.items():
            kept = bytearray(content)
            for offset, data in writes:
                if rng.random() < share:
                    kept.extend(bytes(max(0, offset + len(data) - len(kept))))
                    kept[offset : offset + len(data)] = data
                elif rng.random() < share:
                    size = rng.randrange(len(data))
                    kept.extend(bytes(max(0, offset + size - len(kept))))
                    kept[offset : offset + size] = data[:size]
            with open(path, "wb") as file:
                file.write(kept)
        for path in self.fresh:
            if rng.random() >= share:
                os.unlink(path)
        for path, before in self.replaced.items():
            if rng.random() >= share:
                os.unlink(path)
                if before is not None:
                    with open(path, "wb") as file:
                        file.write(before)


class FailsOnce(Unflushed):
    """As `Unflushed`, and one flush fails.

    The system takes the content of a file for written then, and the device lacks it. The names in a folder stay unflushed: a file
    system that loses them writes nothing more until it is mounted again.

    Args:
        failing: Number of the flush that fails, from 1.
    """

    def __init__(self, failing):
        super().__init__()
        self.flushes, self.failing, self.device = 0, failing, {}

    @property
    def has_failed(self):
        return self.flushes >= self.failing

    def flushed(self, fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path in {os.path.dirname(name) for name in (*self.fresh, *self.replaced)}:
            self.flushes += 1
            if self.flushes == self.failing:
                raise OSError(errno.EIO, "Input/output error")
        if path in self.files:
            self.flushes += 1
            content, writes = self.files[path]
            if self.flushes == self.failing:
                self.device[path] = bytearray(content)
                super().flushed(fd)
                raise OSError(errno.EIO, "Input/output error")
            for offset, data in writes if path in self.device else ():
                self.device[path][offset : offset + len(data)] = data
        super().flushed(fd)

    def lose_all(self):
        """Leave in the folder what a power failure leaves of it."""
        self.lose(random.Random(0), 0.0)
        for path, content in self.device.items():
            if os.path.exists(path):
                with open(path, "wb") as file:
                    file.write(content)


@contextmanager
def power(step, lost):
    """End the process before file operation `step`; `lost` collects what is not flushed then."""
    real = {name: getattr(os, name) for name in ("write", "pwritev", "fsync", "fdatasync", "replace")}
    count = itertools.count(1)

    def guarded(name):
        def call(fd, *rest):
            if step is not None and next(count) >= step:
                raise Crash
            if "sync" in name:
                return lost.flushed(fd)
            if name == "replace":
                lost.renamed(fd, *rest)
                return real[name](fd, *rest)
            if name == "write":
                lost.wrote(fd, os.fstat(fd).st_size, bytes(rest[0]))
            else:
                lost.wrote(fd, rest[1], b"".join(rest[0]))
            return real[name](fd, *rest)

        return call

    for name in real:
        setattr(os, name, guarded(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def ask_until_killed(folder, request, fake, step, lost, before_final=None, **changes):
    """One process: open and ask; it is killed at `step`, or once the answer was sent. The answer; None if none was sent."""
    answer = None
    with power(step, lost), suppress(Crash):
        ledger, gate = open_gate(folder, durable=True, **changes)
        try:
            answer = gate.answer(request, allow, fake, before_final)
        finally:
            end_without_flushes(ledger)
    return answer


def end_without_flushes(ledger):
    """End the process that holds a ledger, without the flushes of `close`."""
    ledger._usable, ledger._journal._dirty = False, False
    ledger.close()


def ask_until_failure(folder, request, fake, step, rng, share, **changes):
    """As `ask_until_killed`; what was not flushed is lost."""
    lost = Unflushed()
    answer = ask_until_killed(folder, request, fake, step, lost, **changes)
    lost.lose(rng, share)
    return answer


def after_each_failure(tmp_path, step_type, rounds, **changes):
    """Yields (folder, fake step, answer that was sent before the failure) for each point of failure and what it lost."""
    before = used_ledger(tmp_path / "before", rounds, step_type)
    yield from after_each_failure_of(before, step_type, rounds + 1, **changes)


def after_each_failure_of(before, step_type, round, **changes):
    """As `after_each_failure`, for a task of a round and a copy of the ledger in `before`."""
    for share in (0.0, 0.3, 0.5, 0.7, 1.0):
        for step in itertools.count(1):
            for draw in range(1 if share in (0.0, 1.0) else DRAWS):
                folder, fake = before.parent / f"{share} {step} {draw}", step_type()
                shutil.copytree(before, folder)
                rng = random.Random(f"{share} {step} {draw}")
                sent = ask_until_failure(folder, task(round), fake, step, rng, share, **changes)
                yield folder, fake, sent
                shutil.rmtree(folder)
            if sent is not None:
                break


@pytest.mark.parametrize(
    ("rounds", "before_final"), [(2, None), (3, None), (3, lambda: None)], ids=["new", "again", "final later"]
)
def test_whatever_a_power_failure_loses_there_is_one_charge_and_one_draw(tmp_path, rounds, before_final):
    """With two rounds before, the answer's file is new; with three, it is one that is used again."""
    outcomes = set()
    for folder, fake, sent in after_each_failure(tmp_path, FakeStep, rounds, before_final=before_final):
        ledger, gate = open_gate(folder)
        answer = gate.answer(task(rounds + 1), allow, fake)
        assert len(ledger.charges(JOB)) == rounds + 1
        assert len(set(fake.keys)) <= 1
        assert answer.status == "release" or (answer.status, sent, fake.keys) == ("lost", None, [])
        if answer.status == "release":
            assert gate.state()["count"].tolist() == [rounds + 1]
        if sent is not None:
            assert (answer.status, answer.cached, answer.release) == ("release", True, sent.release)
        assert gate.answer(task(rounds), allow, forbidden).status == "release"
        assert keys_in(folder) == []
        ledger.close()
        outcomes.add((answer.status, len(fake.keys)))
    assert outcomes >= {("lost", 0), ("release", 1), ("release", 2)}


def test_whatever_a_power_failure_loses_an_answer_that_is_not_stored_repeats_its_bytes(tmp_path):
    computed = set()
    for folder, fake, sent in after_each_failure(tmp_path, StatelessStep, 2, most_stored=0):
        ledger, gate = open_gate(folder, most_stored=0)
        for _ in range(2):
            answer = gate.answer(task(3), allow, fake)
            assert len(ledger.charges(JOB)) == 3
            assert len(set(fake.keys)) <= 1
            assert answer.status == "release" or (answer.status, sent, fake.keys) == ("lost", None, [])
            if sent is not None:
                assert (answer.status, answer.cached, answer.release) == ("release", True, sent.release)
        ledger.close()
        computed.add((sent is not None, len(fake.keys)))
    assert (True, 3) in computed


def test_no_key_of_an_answer_outlives_the_run_and_its_ledger_opens_without_it(tmp_path):
    """A ledger is copied to say what was spent: with the keys of the last two rounds went the noise of their releases."""
    folder, step = tmp_path / "ledger", StatelessStep()
    ledger, gate = open_gate(folder, most_stored=0, rounds=3)
    for round in (1, 2):
        ask(gate, round, compute=step)
    gate.end()  # not yet: a server that crashed may ask again
    assert ask(gate, 2, compute=step).status == "release"
    ask(gate, 3, compute=step)
    ledger.close()
    written = (folder / "journal").read_bytes()
    assert [key in written for key in step.keys] == [False, True, True, True]
    for _ in range(2):
        ledger, gate = open_gate(folder, most_stored=0, rounds=3)
        gate.end()
        assert ask(gate, 3, compute=forbidden).status == "stale"
        ledger.close()
        written = (folder / "journal").read_bytes()
        assert not any(key in written for key in step.keys)


def test_no_key_of_an_answer_outlives_a_plan_that_is_used_up_before_the_last_round(tmp_path):
    ledger, gate = open_gate(tmp_path / "ledger", most_stored=0, plan=[TRAIN] * 2, charges={"train": ("train",)})
    for round, kept in ((1, [1]), (2, [])):
        ask(gate, round, compute=StatelessStep())
        gate.end()
        assert keys_in(tmp_path / "ledger") == kept
    assert ask(gate, 2, compute=forbidden).status == "stale"
    ledger.close()


class UnsteadyStep(StatelessStep):
    """A client step whose bits are those of no earlier computation, as after a move to another processor."""

    def __call__(self, charge, state):
        release, state, events = super().__call__(charge, state)
        return Release(key=release.tensors["key"] + 1), state, events


def test_whatever_a_power_failure_loses_an_answer_whose_bits_do_not_repeat_is_lost(tmp_path):
    ledger, gate = repeating_gate(tmp_path / "before")
    ask(gate, 1, compute=StatelessStep())
    ledger.close()
    computed = set()
    for folder, fake, sent in after_each_failure_of(tmp_path / "before", UnsteadyStep, 1, most_stored=0):
        assert sent is None or (sent.status, sent.release) == ("lost", b"")
        ledger, gate = repeating_gate(folder)
        answer = ask(gate, 1, compute=fake)
        assert (answer.status, answer.release, len(gate.spent())) == ("lost", b"", 1)
        assert not list((folder / "releases").glob(".*"))
        ledger.close()
        assert keys_in(folder) == []
        computed.add((sent is not None, len(fake.keys)))
    assert computed >= {(False, 2), (True, 1)}


def kills_before_a_failure(tmp_path, step_type, rounds, **changes):
    """Yields as `after_each_failure`: a process is killed at each point, and the power fails while the next one runs, or after it."""
    before = used_ledger(tmp_path / "before", rounds, step_type)
    for share, next_step in itertools.product((0.0, 0.5), (None, 3, 6, 9)):
        for step in itertools.count(1):
            folder, fake, lost = tmp_path / f"{share} {step} {next_step}", step_type(), Unflushed()
            shutil.copytree(before, folder)
            sent = ask_until_killed(folder, task(rounds + 1), fake, step, lost, **changes)
            again = ask_until_killed(folder, task(rounds + 1), fake, next_step, lost, **changes)
            lost.lose(random.Random(folder.name), share)
            yield folder, fake, sent or again
            shutil.rmtree(folder)
            if sent is not None:
                break


@pytest.mark.parametrize(
    ("step_type", "changes"), [(FakeStep, {}), (StatelessStep, {"most_stored": 0})], ids=["stored", "computed again"]
)
def test_whatever_a_power_failure_loses_of_a_killed_process_there_is_one_charge_and_one_draw(tmp_path, step_type, changes):
    """The next process reads what a killed one wrote without a flush. It must make this durable before it uses it."""
    answered = set()
    for folder, fake, sent in kills_before_a_failure(tmp_path, step_type, 2, **changes):
        ledger, gate = open_gate(folder, **changes)
        answer = gate.answer(task(3), allow, fake)
        assert len(ledger.charges(JOB)) == 3
        assert len(set(fake.keys)) <= 1
        if sent is not None and sent.status == "release":
            assert (answer.status, answer.cached, answer.release) == ("release", True, sent.release)
        ledger.close()
        answered.add(sent is not None)
    assert answered == {True, False}


@pytest.mark.parametrize("rounds", [0, 2], ids=["a new ledger", "a used one"])
@pytest.mark.parametrize(
    ("step_type", "changes"), [(FakeStep, {}), (StatelessStep, {"most_stored": 0})], ids=["stored", "computed again"]
)
def test_a_flush_that_fails_loses_no_charge_of_the_process_that_comes_after_it(tmp_path, step_type, changes, rounds):
    """The next process took the content for written. Its answer left, and a power failure took the charge along, or the ledger."""
    before = used_ledger(tmp_path / "before", rounds, step_type) if rounds else tmp_path
    for failing in itertools.count(1):
        folder, fake, lost = tmp_path / str(failing), step_type(), FailsOnce(failing)
        if rounds:
            shutil.copytree(before, folder)
        with suppress(OSError):
            ask_until_killed(folder, task(rounds + 1), fake, None, lost, **changes)
        if not lost.has_failed:
            break
        sent = ask_until_killed(folder, task(rounds + 1), fake, None, lost, **changes)
        lost.lose_all()
        ledger, gate = open_gate(folder, **changes)
        assert gate.answer(task(rounds + 1), allow, fake).release == sent.release
        assert (len(ledger.charges(JOB)), len(set(fake.keys))) == (rounds + 1, 1)
        ledger.close()
    assert failing > 2


def test_a_flush_that_fails_when_a_ledger_is_closed_brings_no_key_of_an_answer_back(tmp_path):
    """The ledger looked closed. After a power failure the key of an answer that had left was there, and the task was lost."""
    changes = {"plan": [TRAIN] * 5, "charges": {"train": ("train",)}}
    for failing in itertools.count(1):
        folder, lost = used_ledger(tmp_path / str(failing), 1), FailsOnce(failing)
        with power(None, lost):
            ledger, gate = open_gate(folder, durable=True, **changes)
            with suppress(OSError):
                ask(gate, 2)
            with suppress(OSError):
                ledger.close()
            if not lost.has_failed:
                break
            ledger, gate = open_gate(folder, durable=True, **changes)
            sent = [ask(gate, round) for round in (2, 3, 4, 5)]
            end_without_flushes(ledger)
        lost.lose_all()
        ledger, gate = open_gate(folder, **changes)
        assert keys_in(folder) == []
        assert ask(gate, 5, compute=forbidden).release == sent[-1].release
        assert ask(gate, 2, compute=forbidden).status == "stale"
        ledger.close()
    assert failing == 6  # debit, result, its name, lines and journal


LONG = DPSGDSlot("long" * 1000, 0.1, 7)  # its line does not fit a slot of the journal: the journal is replaced


@pytest.mark.parametrize("rounds", [0, 2], ids=["a new ledger", "a larger journal"])
def test_whatever_a_power_failure_loses_of_a_process_that_was_killed_as_it_made_files_there_is_one_charge_and_one_draw(
    tmp_path, rounds
):
    """A journal whose name the device does not have yet would take the charge of the next process along."""
    changes = {"plan": [*PLAN, LONG], "charges": {**CHARGES, "long": (LONG.name,)}}
    before, request = tmp_path / "before", task(rounds + 1, "long" if rounds else "train")
    if rounds:
        used_ledger(before, rounds)
    for step in itertools.count(1):
        folder, fake, lost = tmp_path / str(step), FakeStep(), Unflushed()
        if rounds:
            shutil.copytree(before, folder)
        sent = ask_until_killed(folder, request, fake, step, lost, **changes)
        again = ask_until_killed(folder, request, fake, None, lost, **changes)
        lost.lose(random.Random(0), 0.0)
        ledger, gate = open_gate(folder, **changes)
        answer = gate.answer(request, allow, fake)
        assert (answer.status, answer.release) == (again.status, again.release)
        assert (len(ledger.charges(JOB)), len(set(fake.keys))) == (rounds + 1, len(fake.keys[:1]))
        ledger.close()
        if sent is not None:
            assert answer.release == sent.release
            break


def test_the_device_has_an_answer_that_a_killed_process_left_before_its_key_is_erased(tmp_path):
    """The process that charged it closed the ledger: the next one writes no line, and the ledger still looked closed after its end."""
    ledger, gate = open_gate(tmp_path / "before")
    with suppress(Crash):
        ask(gate, 1, compute=crash)
    ledger.close()
    statuses = set()
    for step in itertools.count(1):
        folder, fake, lost = tmp_path / str(step), FakeStep(), Unflushed()
        shutil.copytree(tmp_path / "before", folder)
        sent = ask_until_killed(folder, task(1), fake, step, lost)
        ask_until_killed(folder, task(2), FakeStep(), None, lost)
        lost.lose(random.Random(0), 0.0)
        ledger, gate = open_gate(folder)
        answer = gate.answer(task(1), allow, fake)
        assert (len(ledger.charges(JOB)), len(set(fake.keys))) == (2, len(fake.keys[:1]))
        ledger.close()
        statuses.add(answer.status)
        if sent is not None:
            assert answer.release == sent.release
            break
    assert statuses == {"release", "lost"}


def crash(charge, state):
    raise Crash


def test_a_ledger_opens_after_a_power_failure_that_brings_a_key_back_when_older_results_are_overwritten(tmp_path):
    """The answer of round 4 makes room for that of round 3, which comes late; the device does not know yet that the key of 4 is erased."""
    folder, lost = tmp_path / "ledger", Unflushed()
    with power(None, lost):
        ledger, gate = open_gate(folder, durable=True)
        for round in (1, 2):
            ask(gate, round)
        with suppress(Crash):
            ask(gate, 3, compute=crash)
        sent = {round: ask(gate, round) for round in (4, 3)}
        end_without_flushes(ledger)
    assert [sent[round].status for round in (4, 3)] == ["release", "lost"]
    lost.lose(random.Random(0), 0.0)
    assert keys_in(folder) == [3, 4]
    ledger, gate = open_gate(folder)
    for round, answer in sent.items():
        assert gate.answer(task(round), allow, forbidden).release == answer.release
    assert gate.state()["count"].tolist() == [3]
    ledger.close()


@pytest.mark.parametrize("rounds", [SLOTS, SLOTS + 1, SLOTS + 2, 2 * SLOTS + 1])
def test_a_power_failure_loses_no_charge_of_a_process_that_has_charged_more_than_the_journal_holds(tmp_path, rounds):
    """A slot of the journal is overwritten only once the device holds its line in ledger.jsonl."""
    changes, lost = {"rounds": rounds, "plan": [TRAIN] * rounds, "charges": {"train": ("train",)}}, Unflushed()
    with power(None, lost):
        ledger, gate = open_gate(tmp_path / "ledger", durable=True, **changes)
        for round in range(1, rounds + 1):
            assert ask(gate, round).status == "release"
        end_without_flushes(ledger)
    lost.lose(random.Random(0), 0.0)
    ledger, gate = open_gate(tmp_path / "ledger", **changes)
    assert [entry.round for entry in ledger.charges(JOB)] == list(range(1, rounds + 1))
    ledger.close()


def test_without_a_flush_before_the_data_a_power_failure_draws_twice(tmp_path, monkeypatch):
    """Control: the failures of this file find a gate that touches data before the charge is durable."""
    whole = Ledger.debit

    def hasty(self, **how):
        durable, self._disk.durable = self._disk.durable, False
        charged: Charged = whole(self, **how)
        self._disk.durable = durable
        return charged

    monkeypatch.setattr(Ledger, "debit", hasty)
    draws = set()
    for folder, fake, _ in after_each_failure(tmp_path, StatelessStep, 2):
        with suppress(LedgerError):
            ledger, gate = open_gate(folder)
            gate.answer(task(3), allow, fake)
            ledger.close()
        draws.add(len(set(fake.keys)))
    assert 2 in draws


# Answers that are not stored


def repeating_gate(folder, **changes):
    return open_gate(folder, most_stored=0, **changes)


def test_a_large_answer_is_computed_again_from_the_same_key_while_it_would_be_kept(tmp_path):
    fakes = {number: StatelessStep() for number in (1, 2, 3)}
    ledger, gate = repeating_gate(tmp_path / "ledger")
    sent = {number: ask(gate, number, compute=fake) for number, fake in fakes.items()}
    assert list((tmp_path / "ledger" / "releases").iterdir()) == []
    assert keys_in(tmp_path / "ledger") == [2, 3]
    ledger.close()
    ledger, gate = repeating_gate(tmp_path / "ledger")
    assert ask(gate, 1, compute=forbidden).status == "stale"
    for number in (2, 3, 2):
        again = ask(gate, number, compute=fakes[number])
        assert (again.release, again.blake3, again.cached) == (sent[number].release, sent[number].blake3, True)
    assert [len(set(fake.keys)) for fake in fakes.values()] == [1, 1, 1]
    assert len(gate.spent()) == 3
    ledger.close()


def test_an_answer_whose_bits_do_not_repeat_is_never_sent_a_second_time(tmp_path):
    ledger, gate = repeating_gate(tmp_path / "ledger")
    ask(gate, 1, compute=StatelessStep())

    def other(charge, state):
        release, state, events = StatelessStep()(charge, state)
        return Release(key=release.tensors["key"] + 1), state, events

    answer = ask(gate, 1, compute=other)
    assert (answer.status, answer.release) == ("lost", b"")
    assert ask(gate, 1, compute=forbidden).status == "lost"
    assert keys_in(tmp_path / "ledger") == []
    ledger.close()


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        pytest.param(FakeStep, {}, id="with a new state"),
        pytest.param(StatelessStep, {"deterministic": False}, id="not deterministic"),
        pytest.param(StatelessStep, {"most_stored": None}, id="all are stored"),
        pytest.param(StatelessStep, {"most_stored": 1 << 20}, id="small"),
    ],
)
def test_other_answers_are_stored(tmp_path, step, changes):
    ledger, gate = open_gate(tmp_path / "ledger", **{"most_stored": 0, **changes})
    sent = ask(gate, 1, compute=step())
    again = ask(gate, 1, compute=forbidden)
    assert (again.release, again.blake3) == (sent.release, sent.blake3)
    assert keys_in(tmp_path / "ledger") == []
    ledger.close()


def test_an_answer_is_computed_again_from_the_state_before_it(tmp_path):
    """The state of round 1 is kept for the answer of round 2, though round 3 has left a newer one."""
    seen = []

    def steady(charge, state):
        release, _, events = StatelessStep()(charge, state)
        seen.append(state["count"].tolist())
        return release, state, events

    ledger, gate = repeating_gate(tmp_path / "ledger")
    ask(gate, 1)
    sent = ask(gate, 2, compute=steady)
    ask(gate, 3)
    ledger.close()
    ledger, gate = repeating_gate(tmp_path / "ledger")
    assert ask(gate, 2, compute=steady).release == sent.release
    assert seen == [[1], [1]]
    assert gate.state()["count"].tolist() == [2]
    assert set(unpack(sent.release)) == {"key"}
    ledger.close()
