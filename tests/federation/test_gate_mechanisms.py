"""Mechanisms and the slots that pay for them: which slot, one result for each, and noise that covers its range."""

from __future__ import annotations

import dataclasses
import functools
import math
from contextlib import suppress
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gates import (
    SELECT,
    TRAIN,
    Z,
    ask,
    open_gate,
)

from dpcfl_net.core.types import Release
from dpcfl_net.federation import client as client_module
from dpcfl_net.federation.client import Client, slot_key
from dpcfl_net.federation.gate import Charge
from dpcfl_net.privacy.mechanisms import exponential_mechanism
from dpcfl_net.privacy.randomness import stream
from dpcfl_net.privacy.slots import (
    GaussianSlot,
    SecureSlot,
    SelectionSlot,
)


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


def test_no_rounding_makes_a_row_longer_than_its_bound(totals):
    """Rows at their bound were longer than it by the rounding of norm and product, in about a third of the cases."""
    rng = np.random.default_rng(0)
    for bound in (0.1, 1.0, 3.0):
        for row in rng.normal(size=(20, 12)):
            (total,) = totals([row * 100], bound)
            assert sum(Fraction(float(x)) ** 2 for x in total) <= Fraction(bound) ** 2


def test_no_rounding_makes_a_record_move_a_sum_by_more_than_its_bound(totals):
    """Half a unit in the last place of the sum is rounded up at 4,096 and not below it, as often as there are records."""
    ones, tiny = np.ones((4097, 1)), np.full((4096, 1), 2.0**-41 * (1 + 1e-9))
    for bound in (1.0, 1 - 2.0**-20):
        without, held = totals([0 * ones[:1], *ones[1:], *tiny], bound), totals([*ones, *tiny], bound)
        assert Fraction(float(held[0, 0])) - Fraction(float(without[0, 0])) <= Fraction(bound)


def test_no_rounding_makes_a_record_move_a_mean_loss_by_more_than_the_noise_covers(monkeypatch):
    """1 - 2 / 3 is more than 1 / 3 in float64, whose noise is that of 1 / 3."""
    released = []
    monkeypatch.setattr(client_module, "gaussian_on_grid", lambda value, *rest: released.append((value, *rest[:1])) or value)
    for losses in ([5.0, 5.0, 5.0], [0.0, 5.0, 5.0]):
        me = FakeMechanisms.client(Charge(bytes(32), {"loss": GaussianSlot("loss", doubles=False)}, 1.0, "zero-out"))
        me._engine = SimpleNamespace(evaluator=SimpleNamespace(each=lambda *given, losses=losses: (np.array(losses), None)))
        me._validation = lambda: [0, 1, 2]
        me.noisy_loss("loss", np.zeros(2, np.float32), 1.0)
    (held, deviation), (without, _) = released
    assert Fraction(float(held[0])) - Fraction(float(without[0])) <= Fraction(deviation)


@pytest.fixture
def totals(monkeypatch):
    """Function of rows (n of (m,)) and a bound: the sum before the noise, (1, m), of `noisy_sum` on n records with these rows."""
    found = []
    monkeypatch.setattr(client_module, "gaussian_on_grid", lambda total, *rest: found.append(total.copy()) or total)

    class Rows(list):
        def batch(self, rows, size):
            shown = self[rows[0]] if len(rows) else 0 * self[0]
            return torch.from_numpy(shown[None].copy()), torch.zeros(1, dtype=torch.int64)

    def total(rows, bound):
        me = FakeMechanisms.client(Charge(bytes(32), {"sum": GaussianSlot("sum")}, Z, "zero-out"))
        me._data = Rows(rows)
        me.noisy_sum("sum", lambda x: x, bound)
        return np.atleast_2d(found.pop())

    return total


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
