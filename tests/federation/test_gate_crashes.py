"""The gate wherever a crash falls: one charge and one draw for one request, and never more than the plan."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

import pytest
from gates import (
    PLAN,
    ROUNDS,
    SLOTS,
    FakeStep,
    allow,
    ask,
    crash,
    forbidden,
    one_charge_and_one_draw,
    open_gate,
    task,
    torn_gate,
    try_ask,
    used_ledger,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from journals import cut_debit, keys_in

from dpcfl_net.core.tensors import unpack
from dpcfl_net.core.types import Release
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.ledger.ledger import Ledger


@pytest.fixture
def gate(tmp_path):
    ledger, gate = open_gate(tmp_path / "ledger")
    yield gate
    ledger.close()


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
