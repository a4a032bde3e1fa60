"""The gate: one charge and one draw for one request, whatever the server asks and wherever a crash falls."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from journals import cut_debit, keys_in

from dpcfl_net.core.errors import ConfigError, LedgerError, Refused
from dpcfl_net.core.tensors import unpack
from dpcfl_net.core.types import Release, Task
from dpcfl_net.federation.client import Client, slot_key
from dpcfl_net.federation.gate import Charge, Gate, GateSpec, request_id, seeded_key
from dpcfl_net.privacy.accounting.accountant import epsilon
from dpcfl_net.privacy.events.data_free import DataFree
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.ledger.ledger import Ledger
from dpcfl_net.privacy.mechanisms import exponential_mechanism
from dpcfl_net.privacy.randomness import stream
from dpcfl_net.privacy.slots import (
    DPSGDSlot,
    GaussianSlot,
    ParticipationSlot,
    SecureSlot,
    SelectionSlot,
    StageSlot,
    for_clients,
    slot_of,
)

JOB = "a" * 64
Z = 1.25
ROUNDS = 6
FIRST, TRAIN, SELECT = DPSGDSlot("first", 1.0, 1), DPSGDSlot("train", 0.1, 7), SelectionSlot("select", 0.15)
SLOTS = {slot.name: slot for slot in (FIRST, TRAIN, SELECT)}
PLAN = [FIRST] + [TRAIN] * 4 + [SELECT] * 2
CHARGES = {"first": ("first",), "train": ("train",), "window": ("select", "train"), "ask": ()}


def open_gate(folder, **changes):
    ledger = Ledger(folder, owner={"run": "r", "client": 1}, durable=changes.pop("durable", False))
    try:
        return ledger, make_gate(ledger, **changes)
    except BaseException:
        ledger.close()
        raise


def make_gate(ledger, **changes):
    fields = {
        "job_hash": JOB,
        "client": 1,
        "rounds": ROUNDS,
        "plan": PLAN,
        "charges": CHARGES,
        "noise_multiplier": Z,
        "adjacency": "zero-out",
    }
    return Gate(GateSpec(**{**fields, **changes}), ledger)


SECURE = {
    "plan": [StageSlot("keys"), StageSlot("unmask"), SecureSlot("masked", 0.1)] * 2,
    "charges": {"keys": ("keys",), "masked": ("masked",), "unmask": ("unmask",)},
}


@pytest.fixture
def gate(tmp_path):
    ledger, gate = open_gate(tmp_path / "ledger")
    yield gate
    ledger.close()


def task(round, kind="train", content=0.0):
    return Task(round, kind, {"model": np.full(3, content, "<f4")})


def allow(task):
    pass


class FakeStep:
    """A client step that releases its key and counts its runs in the client's state; `made` holds what it returned."""

    def __init__(self):
        self.keys, self.made = [], []

    def __call__(self, charge, state):
        self.keys.append(charge.key)
        count = state.get("count", np.zeros(1, "<i8")) + 1
        self.made.append(np.frombuffer(charge.key + count.tobytes(), "<i8"))
        events = [slot.event(charge.noise_multiplier, charge.adjacency) for slot in charge.slots.values()]
        return Release(key=self.made[-1]), {"count": count}, events


def ask(gate, *args, compute=None, **more):
    return gate.answer(task(*args, **more), allow, compute or FakeStep())


def forbidden(charge, state):
    raise AssertionError("data was touched")


def test_a_task_is_charged_once_and_answered_with_the_same_bytes(gate):
    fake = FakeStep()
    first = ask(gate, 1, compute=fake)
    again = ask(gate, 1, compute=forbidden)
    assert (first.status, first.cached, again.status, again.cached) == ("release", False, "release", True)
    assert first.release == again.release
    assert np.array_equal(unpack(first.release)["key"], fake.made[0])
    assert gate.spent() == [SampledGaussian(Z, 0.1, 7)]
    assert gate.remaining() == {"first": 1, "train": 3, "select": 2}


def test_the_debit_is_on_disk_before_the_data_is_touched(tmp_path):
    ledger, gate = open_gate(tmp_path / "ledger")
    seen = []

    def compute(charge, state):
        seen.extend(read_ledger(tmp_path / "ledger")[1].slots)
        assert charge.slots == {"select": SELECT, "train": TRAIN}
        assert charge.noise_multiplier == Z
        return FakeStep()(charge, state)

    assert ask(gate, 1, "window", compute=compute).status == "release"
    assert seen == ["select", "train"]
    ledger.close()


def test_state_commits_with_the_release(tmp_path):
    ledger, gate = open_gate(tmp_path / "ledger")
    assert gate.state() == {}
    for number in (1, 2, 2, 3):
        ask(gate, number)
    ledger.close()
    ledger, gate = open_gate(tmp_path / "ledger")
    assert gate.state()["count"].tolist() == [3]
    ledger.close()


def test_a_state_that_a_step_empties_is_empty(tmp_path):
    ledger, gate = open_gate(tmp_path / "ledger")
    ask(gate, 1)
    ask(gate, 2, compute=lambda charge, state: (Release(), {}, FakeStep()(charge, state)[2]))
    assert gate.state() == {}
    ledger.close()
    ledger, gate = open_gate(tmp_path / "ledger")
    assert gate.state() == {}
    ledger.close()


@pytest.mark.parametrize(
    "other",
    [
        {"job_hash": "b" * 64}, {"client": 2}, {"round": 2}, {"kind": "first"}, {"content": "2"},
        {"rows": [("centre", "f4", [3], 12)]}, {"rows": [("model", "i4", [3], 12)]}, {"rows": [("model", "f4", [1, 3], 12)]},
    ],
)  # fmt: skip
def test_requests_that_differ_have_other_ids(other):
    one = {"job_hash": JOB, "client": 1, "round": 1, "kind": "train", "rows": [("model", "f4", [3], 12)], "content": "1"}
    assert request_id(**one) == request_id(**one) != request_id(**{**one, **other})


def test_equal_bytes_under_another_name_are_another_request(gate):
    ask(gate, 1)
    answer = gate.answer(Task(1, "train", {"centre": task(1).tensors["model"]}), allow, forbidden)
    assert answer.code == "other-content"


def test_old_answers_are_stale_and_the_last_two_rounds_are_not(gate):
    for number in (1, 2, 3, 4):
        ask(gate, number)
    assert [ask(gate, number, compute=forbidden).status for number in (1, 2, 3, 4)] == ["stale", "stale", "release", "release"]
    assert gate.remaining()["train"] == 0


# What is refused, with nothing spent


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (task(2, content=1.0), "other-content"),
        (task(1), "round-order"),
        (task(0), "round"),
        (task(ROUNDS + 1), "round"),
        (task(-1), "round"),
        (task(True), "task"),
        (task(3.0), "task"),
        (task(3, kind=7), "task"),
        (task(3, "steal"), "unknown-kind"),
        (task(3, "first"), "quota"),
        (Task(3, "train", {"model": np.zeros(3)}), "tensors"),
        (Task(3, "train", {"model": np.array([object()])}), "tensors"),
    ],
)
def test_what_the_job_does_not_hold_is_refused(gate, request_, code):
    ask(gate, 2, "first")
    ask(gate, 2)
    before = gate.spent()
    answer = gate.answer(request_, allow, forbidden)
    assert (answer.status, answer.code, answer.release) == ("refused", code, b"")
    assert gate.spent() == before


def test_more_rounds_than_the_plan_pays_for_are_refused_and_types_are_not_exchanged(gate):
    assert [ask(gate, number).status for number in (1, 2, 3, 4)] == ["release"] * 4
    for number, kind in itertools.product((5, 6), ("train", "window")):
        answer = gate.answer(task(number, kind), allow, forbidden)
        assert (answer.status, answer.code) == ("refused", "quota")
    assert gate.remaining() == {"first": 1, "train": 0, "select": 2}
    assert ask(gate, 6, "first").status == "release"


def test_rounds_may_be_skipped_and_kinds_share_a_round(gate):
    assert [ask(gate, 3, kind).status for kind in ("ask", "first", "train", "window")] == ["release"] * 4
    assert ask(gate, 5).status == "release"


def test_the_check_comes_before_the_charge_and_not_for_an_answer_that_is_kept(gate):
    def check(task):
        raise Refused("non-finite", "tensor 'model' holds a value that is not finite")

    answer = gate.answer(task(1), check, forbidden)
    assert (answer.status, answer.code) == ("refused", "non-finite")
    assert gate.spent() == []
    kept = ask(gate, 1)
    assert gate.answer(task(1), check, forbidden).release == kept.release


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (lambda good: (good[0].tensors, *good[1:]), "not-a-release"),
        (lambda good: good[0], "not-a-release"),
        (lambda good: None, "not-a-release"),
        (lambda good: (good[0], [], good[2]), "not-a-release"),
        (lambda good: (Release(x=np.zeros(2)), *good[1:]), "not-a-release"),
        (lambda good: (Release(x=np.array("text")), *good[1:]), "not-a-release"),
        (lambda good: (good[0], {"x": 3.5}, good[2]), "not-a-release"),
        (lambda good: (*good[:2], []), "mechanism-mismatch"),
        (lambda good: (*good[:2], good[2] * 2), "mechanism-mismatch"),
        (lambda good: (*good[:2], good[2][:1]), "mechanism-mismatch"),
        (lambda good: (*good[:2], [SampledGaussian(Z, 0.1, 8), good[2][0]]), "mechanism-mismatch"),
        (lambda good: (*good[:2], [SampledGaussian(Z * 0.99, 0.1, 7), good[2][0]]), "mechanism-mismatch"),
        (lambda good: (*good[:2], [SampledGaussian(Z, 0.11, 7), good[2][0]]), "mechanism-mismatch"),
        (lambda good: (*good[:2], None), "mechanism-mismatch"),
        (lambda good: (*good[:2], [["unhashable"]]), "mechanism-mismatch"),
    ],
)
def test_what_was_not_charged_is_withheld_for_ever(tmp_path, result, code):
    ledger, gate = open_gate(tmp_path / "ledger")
    ask(gate, 1)
    answer = ask(gate, 2, "window", compute=lambda charge, state: result(FakeStep()(charge, state)))
    assert (answer.status, answer.code, answer.release) == ("refused", code, b"")
    assert gate.remaining() == {"first": 1, "train": 2, "select": 1}
    ledger.close()
    ledger, gate = open_gate(tmp_path / "ledger")
    again = ask(gate, 2, "window", compute=forbidden)
    assert (again.status, again.code, again.release) == ("refused", code, b"")
    assert gate.state()["count"].tolist() == [1]
    assert keys_in(tmp_path / "ledger") == []
    ledger.close()


def test_a_stage_without_data_is_answered_once_and_costs_nothing(tmp_path):
    ledger, gate = open_gate(tmp_path / "ledger", **SECURE)
    first, again = ask(gate, 1, "unmask"), ask(gate, 1, "unmask", compute=forbidden)
    assert first.release == again.release
    assert ask(gate, 1, "unmask", content=1.0, compute=forbidden).code == "other-content"
    ask(gate, 1, "masked")
    assert gate.spent() == [DataFree(), SampledGaussian(Z, 0.1, 1)]
    assert epsilon(gate.spent(), 1e-5) == epsilon([SampledGaussian(Z, 0.1, 1)], 1e-5)
    ledger.close()
    ledger, gate = open_gate(tmp_path / "ledger", **SECURE)
    assert ask(gate, 1, "unmask", compute=forbidden).release == first.release
    assert gate.remaining() == {"keys": 2, "unmask": 1, "masked": 1}
    ledger.close()


def test_a_torn_line_among_stages_costs_a_masked_vector(tmp_path):
    ledger, gate = torn_gate(tmp_path / "ledger", 1, "keys", **SECURE)
    assert gate.spent() == [SampledGaussian(Z, 0.1, 1)]
    assert ask(gate, 1, "masked", compute=forbidden).status == "lost"
    ledger.close()


BUFFER = {
    "plan": for_clients([ParticipationSlot("part")] * 2, (0, 1, 2)),
    "charges": {"buffer": ("part",)},
    "clients_in": {"buffer": "clients"},
}


def buffer_of(round, *clients):
    return Task(round, "buffer", {"clients": np.array(clients, np.int64)})


@pytest.mark.parametrize("clients", [(), (1, 1), (0, 1, 0), ((0, 1),)])
def test_a_buffer_must_list_each_of_its_clients_once(tmp_path, clients):
    ledger, gate = open_gate(tmp_path / "ledger", **BUFFER)
    answer = gate.answer(buffer_of(1, *clients), allow, forbidden)
    assert (answer.status, answer.code, gate.spent()) == ("refused", "tensors", [])
    ledger.close()


def test_a_torn_line_of_a_buffer_costs_a_participation_of_each_client_that_has_one_left(tmp_path):
    folder = tmp_path / "ledger"
    mixed = {"plan": [*BUFFER["plan"], SELECT], "charges": {**BUFFER["charges"], "choose": ("select",)}}
    buffer = {**BUFFER, **mixed}
    ledger, gate = open_gate(folder, **buffer)
    for round in (1, 2):
        assert gate.answer(buffer_of(round, 0, 2), allow, FakeStep()).status == "release"
    ledger.close()

    def debit():
        ledger, gate = open_gate(folder, **buffer)
        with pytest.raises(RuntimeError):
            gate.answer(buffer_of(3, 1), allow, crash)
        ledger.close()

    cut_debit(folder, debit)
    ledger, gate = open_gate(folder, **buffer)
    own = {slot_of("part", client): left for client, left in ((0, 0), (1, 1), (2, 0))}
    assert gate.remaining() == {**own, "select": 1}
    assert gate.answer(buffer_of(4, 1, 2), allow, forbidden).code == "quota"
    ledger.close()
    open_gate(folder, **buffer)[0].close()


def test_a_ledger_that_charges_a_client_of_a_buffer_twice_is_refused(tmp_path):
    names = [slot_of("part", client) for client in (0, 0)]
    with Ledger(tmp_path / "ledger", owner={"run": "r", "client": 1}, durable=False) as ledger:
        event = ParticipationSlot("part").event(Z)
        ledger.debit(job=JOB, request="b" * 64, round=1, kind="buffer", slots=names, events=[event] * 2)
    with pytest.raises(LedgerError, match="does not hold"):
        open_gate(tmp_path / "ledger", **BUFFER)


def test_the_order_of_events_is_free(gate):
    def compute(charge, state):
        release, state, events = FakeStep()(charge, state)
        return release, state, events[::-1]

    assert ask(gate, 1, "window", compute=compute).status == "release"


def test_replace_one_charges_the_doubled_range(tmp_path):
    ledger, gate = open_gate(tmp_path / "ledger", adjacency="replace-one")
    assert ask(gate, 1, "window").status == "release"
    assert gate.spent()[0].epsilon == pytest.approx(0.30)
    ledger.close()


# Keys


def test_no_two_tasks_and_no_two_clients_share_a_key(tmp_path):
    fake = FakeStep()
    for name in ("one", "two"):
        ledger, gate = open_gate(tmp_path / name)
        for number, kind in itertools.product((1, 2), ("train", "window")):
            ask(gate, number, kind, compute=fake)
        ledger.close()
    assert len(set(fake.keys)) == 8


def test_seeded_keys_repeat_and_differ_by_seed_client_round_and_kind(tmp_path):
    def keys(name, **changes):
        fake = FakeStep()
        ledger, gate = open_gate(tmp_path / name, **changes)
        for number, kind in itertools.product((1, 2), ("train", "window")):
            ask(gate, number, kind, compute=fake)
        ledger.close()
        return fake.keys

    one = keys("one", noise_seed=b"s" * 32)
    assert one == keys("two", noise_seed=b"s" * 32)
    others = keys("three", noise_seed=b"t" * 32) + keys("four", noise_seed=b"s" * 32, client=2)
    assert len({*one, *others}) == 12
    assert seeded_key(b"s" * 32, 1, 1, "train", ["slot"]) != seeded_key(b"s" * 32, 1, 1, "window", ["slot"])


# Crashes


def crash(charge, state):
    raise RuntimeError("worker died")


def test_a_task_that_died_is_computed_again_from_the_same_key(tmp_path):
    fake = FakeStep()

    def dies(charge, state):
        fake(charge, state)
        raise RuntimeError("worker died")

    ledger, gate = open_gate(tmp_path / "ledger")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="worker died"):
            ask(gate, 1, compute=dies)
    ledger.close()
    ledger, gate = open_gate(tmp_path / "ledger")
    answer = ask(gate, 1, compute=fake)
    assert answer.status == "release"
    assert len(fake.keys) == 3
    assert len(set(fake.keys)) == 1
    assert len(gate.spent()) == 1
    ledger.close()


def test_a_task_that_died_is_lost_where_bits_do_not_repeat(tmp_path):
    ledger, gate = open_gate(tmp_path / "ledger", deterministic=False)
    with pytest.raises(RuntimeError):
        ask(gate, 1, compute=crash)
    for cached in (False, True):
        answer = ask(gate, 1, compute=forbidden)
        assert (answer.status, answer.cached) == ("lost", cached)
    assert len(gate.spent()) == 1
    assert keys_in(tmp_path / "ledger") == []
    assert ask(gate, 2).status == "release"
    ledger.close()


def test_a_task_that_died_is_lost_once_a_later_one_has_moved_the_state(gate):
    with pytest.raises(RuntimeError):
        ask(gate, 1, compute=crash)
    assert ask(gate, 2).status == "release"
    assert ask(gate, 1, compute=forbidden).status == "lost"
    assert len(gate.spent()) == 2


def torn_gate(folder, number=1, kind="train", **changes):
    """A gate whose ledger's last debit was cut in the middle of its line."""

    def debit():
        ledger, gate = open_gate(folder, **changes)
        with pytest.raises(RuntimeError):
            ask(gate, number, kind, compute=crash)
        ledger.close()

    open_gate(folder, **changes)[0].close()
    cut_debit(folder, debit)
    return open_gate(folder, **changes)


def test_a_crash_while_a_torn_line_is_entered_leaves_its_charge(tmp_path):
    folder = tmp_path / "ledger"

    def debit():
        ledger, gate = open_gate(folder)
        with pytest.raises(RuntimeError):
            ask(gate, 1, compute=crash)
        ledger.close()

    def enter_torn():
        Ledger(folder, owner={"run": "r", "client": 1}, durable=False).close()

    open_gate(folder)[0].close()
    for interrupted in (debit, enter_torn):
        cut_debit(folder, interrupted)
    ledger, gate = open_gate(folder)
    assert [entry.type for entry in ledger.entries] == ["header", "torn", "closed"]
    assert ask(gate, 1, compute=forbidden).status == "lost"
    ledger.close()


def test_a_torn_line_costs_the_costliest_request_and_closes_its_round(tmp_path):
    ledger, gate = torn_gate(tmp_path / "ledger", 2, "ask")
    assert gate.remaining() == {"first": 0, "train": 4, "select": 2}
    for kind, content in itertools.product(("train", "ask"), (0.0, 1.0)):
        answer = gate.answer(task(2, kind, content), allow, forbidden)
        assert answer.status == "lost"
    assert gate.answer(task(1), allow, forbidden).code == "round-order"
    assert ask(gate, 3).status == "release"
    ledger.close()
    ledger, gate = open_gate(tmp_path / "ledger")
    assert len(gate.spent()) == 2
    assert ask(gate, 2, compute=forbidden).status == "lost"
    ledger.close()


def test_the_costliest_remaining_request_is_chosen_among_what_is_left(tmp_path):
    ledger, gate = open_gate(tmp_path / "ledger")
    ask(gate, 1, "first")
    ledger.close()
    ledger, gate = torn_gate(tmp_path / "ledger", 2, "train")
    assert gate.remaining() == {"first": 0, "train": 3, "select": 1}
    ledger.close()


def test_a_torn_line_after_the_plan_is_used_up_costs_nothing_more(tmp_path):
    ledger, gate = open_gate(tmp_path / "ledger")
    ask(gate, 1, "first")
    for number in range(1, 5):
        ask(gate, number, "window" if number < 3 else "train")
    ledger.close()
    ledger, gate = torn_gate(tmp_path / "ledger", 5, "ask")
    assert set(gate.remaining().values()) == {0}
    assert ask(gate, 5, "ask", compute=forbidden).status == "lost"
    ledger.close()


def test_the_charge_of_a_lost_line_is_no_round_s_own(tmp_path):
    """A central server reads who was charged for a round, and what was left before it."""
    ledger, gate = open_gate(tmp_path / "ledger")
    ask(gate, 1)
    ledger.close()
    ledger, gate = torn_gate(tmp_path / "ledger", 2, "train")
    ask(gate, 3, "window")
    assert [gate.charged(round) for round in (1, 2, 3, 4)] == [("train",), None, ("select", "train"), None]
    left = [gate.remaining(before) for before in (1, 2, 3, 4)]
    assert [each["train"] for each in left] == [4, 3, 3, 2]
    assert [each["first"] for each in left] == [1, 1, 0, 0]
    assert left[-1] == gate.remaining()
    ledger.close()


@pytest.mark.parametrize("most_stored", [None, 0])
def test_a_round_counts_as_answered_by_its_answer_and_not_by_its_charge(tmp_path, most_stored):
    """A worker that is started again reports the personal model of that round."""

    def stateless(charge, state):
        return Release(), {}, FakeStep()(charge, {})[2]

    ledger, gate = open_gate(tmp_path / "ledger", most_stored=most_stored)
    assert gate.answered_round() == 0
    for number in (1, 2):
        ask(gate, number, compute=stateless)
        assert gate.answered_round() == number
    with pytest.raises(RuntimeError):
        ask(gate, 3, compute=crash)
    assert gate.answered_round() == 2
    ledger.close()
    ledger, gate = open_gate(tmp_path / "ledger", most_stored=most_stored)
    assert gate.answered_round() == 2
    ledger.close()


class Crash(BaseException):
    """The process ends here."""


@contextmanager
def crash_at(step, share=0.5):
    """End the process in file operation `step` (from 1); of a write, a share of its bytes gets through. Yields the operations.

    Nothing that follows in the process, such as the end of a `with` block, reaches a file.
    """
    real = {name: getattr(os, name) for name in ("write", "pwritev", "fsync", "fdatasync", "replace", "unlink", "mkdir")}
    count = itertools.count(1)
    seen = []

    def guarded(name):
        def call(*args, **more):
            seen.append(name)
            number = next(count)
            if step is not None and number >= step:
                if number == step and name == "write":
                    real["write"](args[0], args[1][: int(len(args[1]) * share)])
                if number == step and name == "pwritev":
                    whole = b"".join(args[1])
                    os.pwrite(args[0], whole[: int(len(whole) * share)], args[2])
                raise Crash
            return None if "sync" in name else real[name](*args, **more)

        return call

    for name in real:
        setattr(os, name, guarded(name))
    try:
        yield seen
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def try_ask(folder, request, fake, step=None, share=0.5, **changes):
    """One process: open, ask, close; None if it crashed."""
    with crash_at(step, share), suppress(Crash):
        ledger, gate = open_gate(folder, durable=True, **changes)
        try:
            return gate.answer(request, allow, fake)
        finally:
            ledger.close()
    return None


def one_charge_and_one_draw(folder, request, fake, answer, charges_before):
    ledger, gate = open_gate(folder)
    assert len(ledger.charges(JOB)) == charges_before + 1
    assert len(set(fake.keys)) <= 1
    assert answer.status in ("release", "lost")
    if answer.status == "lost":
        assert fake.keys == []
    else:
        assert {made.tobytes() for made in fake.made} <= {unpack(answer.release)["key"].tobytes()}
        assert gate.state()["count"].tolist() == [charges_before + 1]
    again = gate.answer(request, allow, forbidden)
    assert (again.status, again.release) == (answer.status, answer.release)
    assert keys_in(folder) == []
    assert ask(gate, request.round + 1).status == "release"
    ledger.close()


def used_ledger(folder, rounds=2, step_type=FakeStep):
    """Two answered rounds, so that the third also prunes."""
    ledger, gate = open_gate(folder)
    for number in range(1, rounds + 1):
        ask(gate, number, compute=step_type())
    ledger.close()
    return folder


@pytest.mark.parametrize(("share", "torn"), [(0.0, 0), (0.1, 0), (0.3, 1), (0.5, 1), (0.9, 1)])
def test_wherever_one_crash_falls_there_is_one_charge_and_one_draw(tmp_path, share, torn):
    before = used_ledger(tmp_path / "before")
    outcomes = []
    for step in itertools.count(1):
        folder = Path(shutil.copytree(before, tmp_path / str(step)))
        fake = FakeStep()
        answer = try_ask(folder, task(3), fake, step, share)
        if answer is not None:
            break
        answer = try_ask(folder, task(3), fake)
        one_charge_and_one_draw(folder, task(3), fake, answer, 2)
        outcomes.append((answer.status, len(fake.keys)))
    # A truncated line is one point; the others are before the charge, before the answer (two runs), and after it (one).
    assert outcomes.count(("lost", 0)) == torn
    assert {("release", 1), ("release", 2)} <= set(outcomes)
    assert step > 10  # the writes and flushes of a task and of `close`


@pytest.mark.slow
def test_wherever_two_crashes_fall_there_is_one_charge_and_one_draw(tmp_path):
    before = used_ledger(tmp_path / "before")
    for first in itertools.count(1):
        crashed = Path(shutil.copytree(before, tmp_path / f"{first}"))
        fake = FakeStep()
        if try_ask(crashed, task(3), fake, first) is not None:
            break
        for second in itertools.count(1):
            folder = Path(shutil.copytree(crashed, tmp_path / f"{first}-{second}"))
            both = FakeStep()
            both.keys, both.made = list(fake.keys), list(fake.made)
            whole = try_ask(folder, task(3), both, second) is not None
            answer = try_ask(folder, task(3), both)
            one_charge_and_one_draw(folder, task(3), both, answer, 2)
            shutil.rmtree(folder)
            if whole:
                break


def test_wherever_the_first_opening_ends_the_next_one_works(tmp_path):
    for step in itertools.count(1):
        folder = tmp_path / str(step)
        if try_ask(folder, task(1), FakeStep(), step) is not None:
            break
        fake = FakeStep()
        answer = try_ask(folder, task(1), fake)
        one_charge_and_one_draw(folder, task(1), fake, answer, 0)
    assert step > 25


# What a gate does not start with


def test_a_plan_and_charges_that_disagree_are_refused(tmp_path):
    charges = {"a": ("train", "train"), "b": ("gone",)}
    with pytest.raises(ConfigError) as error:
        open_gate(tmp_path / "ledger", charges=charges, plan=[TRAIN, DPSGDSlot("train", 0.2, 7)])
    assert len(error.value.problems) == 3


def test_a_ledger_that_charged_what_the_plan_does_not_hold_is_refused(tmp_path):
    ledger, gate = open_gate(tmp_path / "ledger")
    ask(gate, 1)
    ask(gate, 2)
    for changes in ({"noise_multiplier": 2.0}, {"plan": [FIRST, TRAIN, SELECT]}, {"charges": {"train": ("train", "select")}}):
        with pytest.raises(LedgerError, match="ledger-broken"):
            make_gate(ledger, **changes)
    ledger.close()


def test_a_damaged_answer_stops_the_client_and_is_no_answer_to_the_server(gate, tmp_path):
    ask(gate, 1)
    path = tmp_path / "ledger" / "releases" / "0.answer"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(LedgerError, match="ledger-broken"):
        ask(gate, 1, compute=forbidden)


def test_a_ledger_is_of_one_job(tmp_path):
    ledger, gate = open_gate(tmp_path / "ledger")
    ask(gate, 1)
    with pytest.raises(LedgerError, match="ledger-foreign"):
        make_gate(ledger, job_hash="b" * 64)
    ledger.close()


class GateMachine(RuleBasedStateMachine):
    """Any tasks, crashes and restarts: the plan is never exceeded, no request is charged or drawn for twice."""

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.client_steps = {}
        self.released = {}

    def teardown(self):
        shutil.rmtree(self.root)

    @rule(
        number=st.integers(0, ROUNDS + 1),
        kind=st.sampled_from(["first", "train", "train", "window", "steal"]),
        content=st.sampled_from([0.0, 0.0, 0.0, 1.0]),
        step=st.one_of(st.none(), st.none(), st.integers(1, 70)),
    )
    def request(self, number, kind, content, step):
        fake = self.client_steps.setdefault((number, kind, content), FakeStep())
        answer = try_ask(self.root / "ledger", task(number, kind, content), fake, step)
        assert len(set(fake.keys)) <= 1
        if answer is None or answer.status != "release":
            return
        first = self.released.setdefault((number, kind, content), answer.release)
        assert answer.release == first
        assert {made.tobytes() for made in fake.made} == {unpack(first)["key"].tobytes()}

    @invariant()
    def the_ledger_holds(self):
        if not (self.root / "ledger" / "journal").exists():
            return
        debits = [entry for entry in read_ledger(self.root / "ledger") if entry.type == "debit"]
        spent = [name for entry in read_ledger(self.root / "ledger") for name in entry.slots]
        assert all(spent.count(slot.name) <= PLAN.count(slot) for slot in SLOTS.values())
        assert len({(entry.round, entry.kind) for entry in debits}) == len({entry.id for entry in debits}) == len(debits)
        drawn = [request for request, fake in self.client_steps.items() if fake.keys]
        assert len(drawn) <= len(debits)
        assert len({key for fake in self.client_steps.values() for key in fake.keys}) == len(drawn)


GateMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=20,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)
TestGateMachine = GateMachine.TestCase


@pytest.mark.parametrize(
    ("call", "slot", "kind"),
    [
        (lambda me: me.dpsgd("trian", np.zeros(2)), "trian", "DPSGDSlot"),
        (lambda me: me.select("train", np.zeros((1, 2))), "train", "SelectionSlot"),
        (lambda me: me.sgd("train", np.zeros(2)), "train", "UnprotectedSlot or RawSlot"),
    ],
)
def test_a_mechanism_without_its_slot_names_those_that_are_charged(call, slot, kind):
    me = Client(None, {}, None, None, lambda: None, Charge(bytes(32), {"train": TRAIN}, Z, "zero-out"))
    words = f"slot is '{slot}': this client step must charge a slot of this name and of type {kind}; it charges 'train'"
    with pytest.raises(ValueError, match=words):
        call(me)


@pytest.mark.parametrize("name", ["train", "select", "sum", "loss"])
def test_a_slot_pays_for_one_result_as_a_second_one_would_have_the_same_noise(tmp_path, name):
    """Two slots with one event, and a step that names the first twice: the gate must not take that for both."""
    slots = {"train": TRAIN, "select": SELECT, "sum": GaussianSlot("sum"), "loss": GaussianSlot("loss", doubles=False)}
    twins = {key: dataclasses.replace(slots[name], name=key) for key in ("one", "two")}
    charged, made = [slot.event(Z, "zero-out") for slot in twins.values()], []
    calls = {
        "train": lambda me, slot: me.dpsgd(slot, np.zeros(2, np.float32)),
        "select": lambda me, slot: me.select(slot, np.zeros((2, 2), np.float32)),
        "sum": lambda me, slot: me.noisy_sum(slot, lambda x: x, 1.0),
        "loss": lambda me, slot: me.noisy_loss(slot, np.zeros(2, np.float32), 1.0),
    }
    for second in ("one", "two"):
        me = FakeMechanisms.client(Charge(bytes(32), twins, Z, "zero-out"))
        for slot in ("one", second):
            calls[name](me, slot)
        made.append(me.ran)
    assert sorted(made[0], key=repr) != sorted(charged, key=repr)
    assert made[1] == charged
    for ran, status in zip(made, ("refused", "release"), strict=True):
        plan, charges = [*twins.values()], {"both": ("one", "two")}
        ledger, gate = open_gate(tmp_path / status, plan=plan, charges=charges)
        answer = ask(gate, 1, "both", compute=lambda charge, state, ran=ran: (Release(), {}, ran))
        assert (answer.status, answer.code) == (status, "mechanism-mismatch" if status == "refused" else "")
        ledger.close()


def test_two_slots_of_a_task_have_noise_of_their_own():
    """The difference of two results with one noise has none."""
    twins = {name: GaussianSlot(name) for name in ("one", "two")}
    (one, two), (again, _) = (
        [FakeMechanisms.client(charge).noisy_sum(name, lambda x: x, 1.0) for name in twins]
        for charge in [Charge(bytes(32), twins, Z, "zero-out")] * 2
    )
    assert one.tolist() == again.tolist()
    assert np.abs(one - two).min() > 1e-3


def test_a_choice_is_the_draw_of_its_slot_at_the_eta_of_its_slot():
    slot, counts, chosen = SelectionSlot("select", 0.5), [3, 4, 5], []
    for number in range(200):
        key = number.to_bytes(32, "big")
        me = FakeMechanisms.client(Charge(key, {"select": slot}, Z, "zero-out"))
        me._engine.count_correct = lambda models, data: counts
        chosen.append(me.select("select", np.zeros((3, 2), np.float32)))
        assert chosen[-1] == exponential_mechanism(counts, 0.5, stream(slot_key(key, "select"), "selection"))
        assert me.ran == [slot.event(Z, "zero-out")]
    assert len(set(chosen)) == 3


def test_noise_for_a_number_does_not_pay_for_a_vector():
    """Under replace-one a clipped vector moves by twice its bound, a number between 0 and a bound by the bound."""
    slot = GaussianSlot("sum", doubles=False)
    me = FakeMechanisms.client(Charge(bytes(32), {"sum": slot}, Z, "replace-one"))
    with pytest.raises(ValueError, match="slot 'sum' has doubles=False"):
        me.noisy_sum("sum", lambda x: x, 1.0)
    with pytest.raises(ValueError, match=r"to one row, \(1, m\), got the shape \(2, 2\)"):
        FakeMechanisms.client(Charge(bytes(32), {"sum": GaussianSlot("sum")}, Z, "replace-one")).noisy_sum(
            "sum", lambda x: np.concatenate([x, x]), 1.0
        )
    me.protocol.privacy.unit, me.protocol.local = "client", SimpleNamespace(clip=1.0)
    me._engine = SimpleNamespace(sgd=SimpleNamespace(train=lambda model, data, order: model))
    with pytest.raises(ValueError, match="slot 'sum' has doubles=False"):
        me.noisy_update("sum", np.zeros(2, np.float32))


@pytest.mark.parametrize("bound", [math.inf, -1.0, 0.0, 1e-170, math.nan])
def test_a_bound_whose_noise_is_infinite_or_vanishes_is_refused(bound):
    """With an infinite one the result was NaN if the loss of one record was infinite; to 1e-170 a longer row was not clipped."""
    slots = {"loss": GaussianSlot("loss", doubles=False), "sum": GaussianSlot("sum")}
    me = FakeMechanisms.client(Charge(bytes(32), slots, Z, "zero-out"))
    with pytest.raises(ValueError, match=r"the noise of slot 'loss', .* is .*: must be 1e-100 to 1e\+100"):
        me.noisy_loss("loss", np.zeros(2, np.float32), bound)
    with pytest.raises(ValueError, match=r"the noise of slot 'sum', .* is .*: must be 1e-100 to 1e\+100"):
        me.noisy_sum("sum", lambda x: x, bound)
    assert me.ran == []


def test_a_secure_sum_of_another_unit_or_without_a_group_is_refused():
    me = FakeMechanisms.client(Charge(bytes(32), {"sum": SecureSlot("sum", 1.0)}, Z, "zero-out"))
    with pytest.raises(
        ValueError, match=r"me\.masked_update protects a client, and privacy.unit is 'sample': use me.masked_gradient"
    ):
        me.masked_update("sum", lambda: np.zeros(2))
    with pytest.raises(ValueError, match="slot 'sum' adds to a secure sum: the task must come with the group of a sum"):
        me.masked_gradient("sum", np.zeros(2, np.float32))
    assert me.ran == []


def test_a_sum_over_records_does_not_protect_a_whole_client():
    slots = {"sum": GaussianSlot("sum"), "masked": SecureSlot("masked", 1.0)}
    me = FakeMechanisms.client(Charge(bytes(32), slots, Z, "zero-out"))
    me.protocol.privacy.unit = "client"
    with pytest.raises(ValueError, match=r"me\.noisy_sum protects a sample, and privacy.unit is 'client': use me.noisy_update"):
        me.noisy_sum("sum", lambda x: x, 1.0)
    with pytest.raises(ValueError, match=r"me\.masked_gradient protects a sample, .* is 'client': use me.masked_update"):
        me.masked_gradient("masked", np.zeros(2, np.float32))
    assert me.ran == []


def test_raw_methods_use_a_secure_slot_inside_its_contribution_only():
    """A step that caught an error of its contribution could then compute raw losses that no event counted, and release them."""
    me = FakeMechanisms.client(Charge(bytes(32), {"sum": SecureSlot("sum", 1.0)}, Z, "zero-out"))
    me.protocol.privacy.unit, me._masking = (
        "client",
        SimpleNamespace(code=SimpleNamespace(d=2), words=lambda vector, key: vector),
    )
    losses = functools.partial(me.losses, "sum", np.zeros((2, 2), np.float32))
    assert me.masked_update("sum", losses).tolist() == [0.5, 0.5]
    for contribute in (losses, lambda: 1 / 0):
        with suppress(ZeroDivisionError):
            me.masked_update("sum", contribute)
        with pytest.raises(ValueError, match="of type UnprotectedSlot or RawSlot; it charges 'sum'"):
            losses()


class FakeMechanisms:
    """Engine and four records of a client, for mechanisms that only count calls."""

    def __len__(self):
        return 4

    def batch(self, rows, size):
        return torch.ones(size, 2), torch.zeros(size, dtype=torch.int64)

    @property
    def trainer(self):
        return self

    evaluator = sgd = trainer

    def mean_losses(self, models, data, base_model):
        return np.full(len(models), 0.5)

    def train(self, model, data, spec, z, *rest):
        return model, spec.event(z)

    def count_correct(self, models, data):
        return [3] * len(models)

    def each(self, model, data):
        return np.zeros(4), np.ones(4, bool)

    @classmethod
    def client(cls, charge):
        protocol = SimpleNamespace(privacy=SimpleNamespace(unit="sample", adjacency=charge.adjacency))
        return Client(protocol, {}, cls(), cls(), cls, charge)
