"""The gate: one charge and one draw for one request, whatever the server asks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from gates import (
    FIRST,
    JOB,
    ROUNDS,
    SECURE,
    SELECT,
    TRAIN,
    FakeStep,
    Z,
    allow,
    ask,
    crash,
    forbidden,
    make_gate,
    open_gate,
    task,
    torn_gate,
)
from journals import cut_debit, keys_in

from dpcfl_net.core.errors import ConfigError, LedgerError, Refused
from dpcfl_net.core.tensors import unpack
from dpcfl_net.core.types import Release, Task
from dpcfl_net.federation.gate import request_id, seeded_key
from dpcfl_net.privacy.accounting.accountant import epsilon
from dpcfl_net.privacy.events.data_free import DataFree
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.ledger.ledger import Ledger
from dpcfl_net.privacy.slots import (
    DPSGDSlot,
    ParticipationSlot,
    for_clients,
    slot_of,
)


@pytest.fixture
def gate(tmp_path):
    ledger, gate = open_gate(tmp_path / "ledger")
    yield gate
    ledger.close()


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
