"""A gate on a ledger in a folder, tasks for it, and crashes at any file operation."""

from __future__ import annotations

import itertools
import os
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from journals import cut_debit, keys_in

from dpcfl_net.core.tensors import unpack
from dpcfl_net.core.types import Release, Task
from dpcfl_net.federation.gate import Gate, GateSpec
from dpcfl_net.privacy.ledger.ledger import Ledger
from dpcfl_net.privacy.slots import (
    DPSGDSlot,
    SecureSlot,
    SelectionSlot,
    StageSlot,
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


def crash(charge, state):
    raise RuntimeError("worker died")


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
