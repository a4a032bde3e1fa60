"""Fuzz target: floods of one kind of message with changing content, under which memory must not grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import msgpack
import numpy as np

from dpcfl_net.adversaries import fuzz_bytes
from dpcfl_net.adversaries.fuzz_peers import ClientSession, ServerSession
from dpcfl_net.adversaries.fuzz_sockets import fake_sockets
from dpcfl_net.adversaries.fuzz_speakers import RESULTS, TASKS, Said, Speaker, arrays_for
from dpcfl_net.adversaries.fuzz_witness import HELD, require_small

MESSAGES = HELD + 50  # of one kind, so that a list of them exceeds the limit

BEHAVIOURS = ("reads", "reads", "does not read", "does not read", "moves", "moves", "stranger")  # of a server's peer

Say = Callable[[Speaker], Said]


def _word(speaker: Speaker) -> str:
    return fuzz_bytes.word(speaker.rng, 32)


def _hello_of_a_new_boot(speaker: Speaker) -> Said:
    speaker.boot, speaker.sequence = _word(speaker), 0
    return speaker.say("HELLO", client=speaker.number)


def _result(speaker: Speaker, about: str) -> Said:
    arrays = arrays_for(speaker.rng, RESULTS["train"], honest=True)
    return speaker.announce("RESULT", arrays, parent=about, round=1, task="train", code="release")


def _task_without_chunks(speaker: Speaker) -> Said:
    return speaker.announce("TASK", {"models": np.zeros((1, 40), np.float32)}, round=1, task="train")


def _empty_task(speaker: Speaker) -> Said:
    return speaker.announce("TASK", arrays_for(speaker.rng, TASKS["small"], True), round=1, task="small")


def _the_same_task(speaker: Speaker) -> Said:
    return {**_empty_task(speaker), "id": "5a" * 16}


KINDS: tuple[Say, ...] = (
    lambda speaker: speaker.say("ERROR", parent=_word(speaker), code=_word(speaker), reason=_word(speaker)),
    lambda speaker: speaker.say("ACK", parent=_word(speaker)),
    lambda speaker: speaker.say("CREDIT", parent=_word(speaker), index=speaker.rng.getrandbits(30)),
    lambda speaker: speaker.say("HEARTBEAT", code=speaker.rng.choice(("idle", "computing"))),
    lambda speaker: speaker.say("WELCOME", parent=_word(speaker)),
    lambda speaker: speaker.say("nonsense", task=_word(speaker)),
    _hello_of_a_new_boot,
    lambda speaker: _result(speaker, speaker.about),  # without its chunks
    lambda speaker: _result(speaker, _word(speaker)),
    _task_without_chunks,
    _empty_task,
    _the_same_task,
)


class Floods:
    """Floods either end, after WELCOME, with one kind after another.

    The peer reads its answers or does not, stays or reconnects for every second message, or has an unknown key.
    """

    name, share = "flood", 0.05

    def run(self, rng: Random, counts: Counter[str]) -> int:
        kinds = rng.sample(KINDS, len(KINDS))
        with fake_sockets():
            if rng.random() < 0.25:
                _flood_client(ClientSession(rng, counts), kinds, reads=rng.random() < 0.5)
            else:
                _flood_server(ServerSession(rng, counts), kinds, rng.choice(BEHAVIOURS))
        return MESSAGES * len(KINDS)


def _flood_server(session: ServerSession, kinds: list[Say], behaviour: str) -> None:
    speaker = session.speakers[5 if behaviour == "stranger" else 0]
    for say in kinds:
        session.socket.full = False
        session.reconnect(speaker)  # the last one was cut for too many broken messages
        _hello(session, speaker)
        speaker.about = session.ask(0, 1, "train")
        session.socket.full = behaviour == "does not read" and say is not _hello_of_a_new_boot
        for k in range(MESSAGES):
            if behaviour == "moves" and k % 2:
                session.reconnect(speaker)
                if k % 4 == 1:
                    _hello(session, speaker)
            session.hear(speaker, [msgpack.packb(say(speaker))])
        require_small(session.end)


def _hello(session: ServerSession, speaker: Speaker) -> None:
    session.hear(speaker, [msgpack.packb(_hello_of_a_new_boot(speaker))])


def _flood_client(session: ClientSession, kinds: list[Say], reads: bool) -> None:
    session.hear([msgpack.packb(session.speaker.say("WELCOME", parent=next(iter(session.hellos))))])
    session.socket.full = not reads
    for say in kinds:
        welcomed = session.speaker.boot, session.speaker.sequence
        for _ in range(MESSAGES):
            session.hear([msgpack.packb(say(session.speaker))])
            if say is not _the_same_task:  # a client that works acknowledges each repetition of its task
                session.end.heartbeat("idle")
        if session.speaker.boot != welcomed[0]:
            session.speaker.boot, session.speaker.sequence = welcomed
        require_small(session.end)
