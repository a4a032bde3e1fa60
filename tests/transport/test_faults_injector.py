"""Faults in the messages between real endpoints: what is lost, late, twice, in another order or damaged arrives in the end, once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from wire_ends import (
    UPDATE,
    Ends,
    P,
    _nothing_is_left,  # noqa: F401 - fixtures
    _warm,  # noqa: F401
    make_client,
    make_server,
)

from dpcfl_net.transport.channel import Stamp
from dpcfl_net.transport.faults import Fault, FaultInjector, Message, MessageFaults, MessageRule, Partition, damaged, draw
from dpcfl_net.transport.messages import WireError, decode, encode

MODELS = {"models": np.ones((1, P), "f4")}
LARGE = np.full(P, 0.25, "f4")


class Recorder:
    """An injector and the list of its faults."""

    def __init__(self, *rules: MessageRule, seed: int = 7, partitions: tuple[Partition, ...] = ()) -> None:
        self.faults: list[Fault] = []
        self.injector = FaultInjector(MessageFaults(seed, rules, partitions), self.faults.append)

    def count(self) -> Counter[str]:
        return Counter(fault.what for fault in self.faults)

    def lines(self) -> list[tuple[int, int, str]]:
        return sorted((fault.message.client, fault.message.round, fault.text) for fault in self.faults)


def exchange(
    recorder: Recorder | None, rounds: int = 4, large: bool = False
) -> tuple[list[tuple[int, int]], Counter[str], Counter[str]]:
    """Rounds of one task for each of two clients. Returns the results by (client, round) and the failures of both sides."""
    faults = None if recorder is None else recorder.injector
    with make_server(faults=faults) as server, make_client(server.address, 0) as one, make_client(server.address, 1) as two:
        ends = Ends(server, one, two).joined()
        clients = {0: one, 1: two}
        answered: Counter[str] = Counter()
        for t in range(1, rounds + 1):
            for number in clients:
                server.send_task(number, t, "train" if large else "small", MODELS if large else {})

            def step(t: int = t) -> bool:
                for client in clients.values():
                    for event in ends.tasks(client):
                        if not answered[event.id]:
                            answered[event.id] += 1
                            client.send_result(event.id, "release", {"update": LARGE if large else UPDATE})
                return sum(event.round == t for event in ends.of("result")) == len(clients)

            ends.until(step, 60)
        ends.until(lambda: not one.pending and not two.pending, 30)
        results = [(event.client, event.round) for event in ends.of("result")]
        for event in ends.of("result"):
            np.testing.assert_array_equal(event.tensors["update"], LARGE if large else UPDATE)
        assert set(answered.values()) == {1}
        return results, Counter(server.failures), one.failures + two.failures


def expected(rounds: int) -> list[tuple[int, int]]:
    return [(client, t) for t in range(1, rounds + 1) for client in (0, 1)]


def test_without_faults_nothing_fails_and_nothing_is_injected() -> None:
    recorder = Recorder()
    for given in (recorder, None):
        results, up, down = exchange(given)
        assert sorted(results) == sorted(expected(4))
        assert not up
        assert not down
    assert recorder.faults == []


RULES = {
    "drop": MessageRule(drop=0.15),
    "duplicate": MessageRule(duplicate=0.5),
    "delay": MessageRule(delay=0.5, delay_s=(0.01, 0.1)),
    "reorder": MessageRule(reorder=0.1),
    "corrupt": MessageRule(corrupt=0.15),
    "everything": MessageRule(drop=0.05, duplicate=0.05, delay=0.3, delay_s=(0.0, 0.1), reorder=0.05, corrupt=0.05),
    "heartbeats": MessageRule(kinds=("heartbeat", "credit", "hello", "welcome", "error"), drop=0.5),
}


UNREADABLE = ("not-msgpack", "schema", "header-too-large")


QUICK = ("duplicate", "delay", "corrupt", "everything")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RULES])
def test_every_result_arrives_once_whatever_happens_to_the_messages(name: str) -> None:
    recorder = Recorder(RULES[name])
    results, up, down = exchange(recorder)
    assert sorted(results) == sorted(expected(4))
    assert recorder.faults
    if name == "corrupt":
        assert set(up) | set(down) <= {*UNREADABLE, "chunk", "hash"}
        headers = sum(fault.message.part < 0 for fault in recorder.faults)
        refused = sum((up + down)[code] for code in UNREADABLE)
        assert headers - 2 <= refused <= headers  # the last ones may still be on their way
    if name == "delay":
        assert not up
        assert not down
    if name == "heartbeats":
        assert not up
        assert set(down) <= {"no-welcome"}
    if name == "duplicate":
        assert set(up) | set(down) == {"sequence"}


def test_a_client_whose_hello_came_twice_is_not_refused_by_the_answer_to_the_second_one() -> None:
    recorder = Recorder(MessageRule(kinds=("hello",), duplicate=1.0), MessageRule(kinds=("welcome",), reorder=1.0))
    with make_server(faults=recorder.injector) as server, make_client(server.address, 0) as client:
        ends = Ends(server, client).joined()
        server.send_task(0, 1, "small", {})
        assert ends.round(client, 0, 1, UPDATE).kind == "result"
        assert client.failures["sequence"] + server.failures["sequence"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("what", ["drop", "corrupt"])
def test_a_payload_of_several_chunks_arrives_although_some_are_lost(what: str) -> None:
    recorder = Recorder(MessageRule(**{what: 0.15}))
    results, _, _ = exchange(recorder, 2, large=True)
    assert sorted(results) == sorted(expected(2))
    assert any(fault.message.part >= 0 for fault in recorder.faults)


def test_a_replay_of_the_seed_has_the_same_faults_and_another_seed_others() -> None:
    def faults(seed: int) -> list[tuple[int, int, str]]:
        recorder = Recorder(MessageRule(kinds=("task", "result"), duplicate=0.3, delay=0.3, delay_s=(0.0, 0.05)), seed=seed)
        exchange(recorder)
        return recorder.lines()

    first = faults(1)
    assert first == faults(1)
    assert first != faults(2)


def test_draws_depend_on_the_message_alone_and_have_the_rates_of_the_rule() -> None:
    messages = [Message(client, "up", "result", t, "train", -1, 1) for client in range(100) for t in range(100)]
    drawn = [draw(3, message) for message in messages]
    assert drawn == [draw(3, message) for message in messages]
    assert len(set(drawn)) == len(messages)
    dropped = sum(dice.drop < 0.05 for dice in drawn)
    assert abs(dropped - 500) < 5 * (10_000 * 0.05 * 0.95) ** 0.5  # false alarm below 1e-6


def test_a_partition_stops_its_clients_in_its_rounds_and_nobody_else() -> None:
    recorder = Recorder(partitions=(Partition((1,), (2, 3)),))
    with (
        make_server(faults=recorder.injector) as server,
        make_client(server.address, 0) as one,
        make_client(server.address, 1) as two,
    ):
        ends = Ends(server, one, two).joined()
        for t in range(1, 5):
            number_of_tasks = len(ends.tasks(two))
            if t in (2, 3):
                server.send_task(1, t, "small", {})
                assert ends.round(one, 0, t, UPDATE).kind == "result"
                assert len(ends.tasks(two)) == number_of_tasks
                server.cancel(1)
            else:
                assert ends.round(two, 1, t, UPDATE).kind == "result"
        assert {(f.what, f.message.client, f.message.round) for f in recorder.faults} == {
            ("partition", 1, 2),
            ("partition", 1, 3),
        }


def test_damage_is_always_such_that_the_receiver_sees_it() -> None:
    data = encode(Stamp("ab12", "0" * 64).header(kind="RESULT", round=200, task="train", parent="a" * 32, code="lost"))
    for seed in range(300):
        changed, chunk = damaged(data, None, random.Random(seed))
        assert chunk is None
        with pytest.raises(WireError):
            decode(changed)
        same, changed_chunk = damaged(data, b"four", random.Random(seed))
        assert same == data
        assert changed_chunk is not None
        assert sum((a ^ b).bit_count() for a, b in zip(changed_chunk, b"four", strict=True)) == 1


def carried(rule: MessageRule, count: int) -> tuple[list[int], Callable[[float], None]]:
    """Carry `count` messages at time 0 with a clock that the caller sets. Returns the arrived numbers, and a function that goes on to a time."""
    now, arrived = [0.0], list[int]()
    injector = FaultInjector(MessageFaults(1, (rule,)), lambda fault: None, lambda: now[0])
    stamp = Stamp("ab12", "0" * 64)
    for number in range(count):
        header = stamp.header(kind="TASK", round=number, task="train")
        injector.carry("down", 0, header, b"%d" % number, None, lambda data, chunk: (arrived.append(int(bytes(data))), True)[1])

    def until(time: float) -> None:
        now[0] = time
        injector.release()

    return arrived, until


def test_late_messages_keep_their_order_and_reordered_ones_change_it() -> None:
    arrived, until = carried(MessageRule(delay=0.5, delay_s=(1.0, 2.0)), 20)
    assert len(arrived) < 20
    until(2.0)
    assert arrived == list(range(20))
    arrived, until = carried(MessageRule(reorder=0.3), 20)
    until(1.0)
    assert arrived != list(range(20))
    assert sorted(arrived) == list(range(20))
    assert max(abs(place - number) for place, number in enumerate(arrived)) < 5


def test_a_message_meets_its_next_fault_when_it_is_repeated_also_if_other_clients_are_many_rounds_ahead() -> None:
    """In asynchronous rounds a lost task of a slow client met the same fault with each repetition: it never arrived."""
    recorder = Recorder(MessageRule(clients=(0,), drop=1.0))
    stamp = Stamp("ab12", "0" * 64)
    for client, number in ((0, 2), (1, 20), (0, 2), (1, 21), (0, 2), (0, 9), (0, 2)):
        recorder.injector.begin(number)
        header = stamp.header(kind="TASK", round=number, task="train")
        recorder.injector.carry("down", client, header, b"task", None, lambda data, chunk: True)
    attempts = [(fault.message.round, fault.message.attempt) for fault in recorder.faults]
    assert attempts == [(2, 1), (2, 2), (2, 3), (9, 1), (2, 1)]  # a later task ends a client's count


def test_each_look_for_late_messages_costs_only_the_clients_that_have_some() -> None:
    """The server looks in each exchange of messages: with 10,000 clients a look took 26 ms."""
    looks: list[float] = []
    rule = MessageRule(clients=(7,), delay=1.0, delay_s=(5.0, 5.0))
    injector = FaultInjector(MessageFaults(1, (rule,)), lambda fault: None, lambda: looks.append(0.0) or 0.0)
    header = Stamp("ab12", "0" * 64).header(kind="TASK", round=1, task="train")
    for client in range(1000):
        injector.carry("down", client, header, b"task", None, lambda data, chunk: True)
    looks.clear()
    assert injector.release()
    assert len(looks) == 1
