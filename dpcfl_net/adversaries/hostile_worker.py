"""Scripted malicious worker for tests of a coordinator: valid keys, hostile steps, and the reaction to each.

    python -m dpcfl_net.adversaries.hostile_worker RUN --client 3 --connect tcp://127.0.0.1:5700 --keys RUN/keys \
        --steps claim-identity,garbage,nan-update,'huge-update*'
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zmq

from dpcfl_net.adversaries.hostile_connection import HostileConnection, Target
from dpcfl_net.adversaries.hostile_messages import ANSWERS, MESSAGES, endless, honest
from dpcfl_net.adversaries.scripts import run, seconds
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.job_reader import read_protocol
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.transport.channel import DAMAGED
from dpcfl_net.transport.messages import Header
from dpcfl_net.transport.payload import Payload


@dataclass(frozen=True)
class Reaction:
    """Reaction to one step.

    Attributes:
        step: Name of the step.
        answer: WELCOME, ACK or ERROR; CLOSED (connection ended); SILENCE; UNREACHED (nothing listens at the address); NO-TASK
            (no task arrived to answer); BYE (the run is over).
        code: Code of an ERROR; for CLOSED "handshake" (rejected), "cut", or "stalled" (it takes no more messages).
        reason: Reason of an ERROR.
        round: Round of the answered task; 0 for other steps.
    """

    step: str
    answer: str
    code: str = ""
    reason: str = ""
    round: int = 0


class NotWelcome(Exception):
    """A step needs an accepted connection and got another reaction."""

    def __init__(self, answer: str, code: str, reason: str) -> None:
        self.outcome = answer, code, reason
        super().__init__(answer)


class Attacker:
    """Actions with one client's keys; arguments as for `play`.

    Attributes:
        answered: Ids of the answered tasks.
    """

    def __init__(self, target: Target, *, wait_s: float = 5.0, task_s: float = 60.0, flood: int = 1024) -> None:
        self.target, self.wait_s, self.task_s, self.flood = target, wait_s, task_s, flood
        self._line: HostileConnection | None = None
        self.answered: set[str] = set()

    def fresh(self) -> HostileConnection:
        """Open a new connection in place of the old one."""
        self.close()
        self._line = HostileConnection(self.target)
        return self._line

    def welcomed(self) -> HostileConnection:
        """Return the connection after HELLO, a new one if needed; raises NotWelcome."""
        if self._line is not None and not self._line.closed and self._line.hears(kind="WELCOME"):
            return self._line
        line = self.fresh()
        found = self.hello(line, self.target.client)
        if found[0] != "WELCOME":
            raise NotWelcome(*found)
        return line

    def hello(self, line: HostileConnection, client: int) -> tuple[str, str, str]:
        """Say HELLO as `client`, repeatedly while an older connection of the key still exists."""
        deadline = time.monotonic() + self.wait_s
        while True:
            found = self.reply(line, line.say("HELLO", client=client).id)
            if found[1] != "duplicate" or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def reply(self, line: HostileConnection, *ids: str) -> tuple[str, str, str]:
        """Return the reaction to messages with these ids, or to a message without an id after this call."""

        had = 0 if ids else len(line.heard)

        def found() -> list[Header]:
            return [h for h in line.heard[had:] if h.kind in ("WELCOME", "ACK", "ERROR") and h.parent in (ids or ("",))]

        for header in line.wait(found, self.wait_s):
            return header.kind, header.code, header.reason
        if line.closed:
            return "CLOSED", line.closed, ""
        return ("SILENCE", "", "") if line.reached else ("UNREACHED", "", f"nothing listens at {self.target.connect}")

    def task(self) -> Header | None:
        """Wait for the next task; None if the run ends first or none arrives in time."""
        line = self.welcomed()

        def found() -> list[Header]:
            asked = [header for header in line.heard if header.kind == "TASK" and header.id not in self.answered]
            return asked[-1:] or [header for header in line.heard if header.kind == "BYE"]

        heard = line.wait(found, self.task_s)
        if not heard or heard[0].kind == "BYE":
            return None
        line.say("ACK", parent=heard[0].id)
        line.say("HEARTBEAT", code="computing")
        self.answered.add(heard[0].id)
        return heard[0]

    @property
    def over(self) -> bool:
        """True if the coordinator has said BYE."""
        return self._line is not None and bool(self._line.hears(kind="BYE"))

    def close(self) -> None:
        """Close the connection."""
        if self._line is not None:
            self._line.close()
            self._line = None


def _hello(a: Attacker) -> tuple[str, str, str]:
    """HELLO with the key's client id"""
    return a.hello(a.fresh(), a.target.client)


def _claim_identity(a: Attacker) -> tuple[str, str, str]:
    """HELLO as another client; under CURVE the key decides"""
    return a.hello(a.fresh(), a.target.other)


def _unknown_key(a: Attacker) -> tuple[str, str, str]:
    """connect with a key that is not in the roster"""
    public, secret = zmq.curve_keypair()
    with HostileConnection(a.target, (public.decode(), secret.decode()), "curve") as line:
        return a.reply(line, line.say("HELLO", client=a.target.client).id)


def _no_curve(a: Attacker) -> tuple[str, str, str]:
    """connect without encryption"""
    with HostileConnection(a.target, security="none") as line:
        return a.reply(line, line.say("HELLO", client=a.target.client).id)


def _second_connection(a: Attacker) -> tuple[str, str, str]:
    """connect a second time with the same key"""
    a.welcomed()
    with HostileConnection(a.target) as line:
        return a.reply(line, line.say("HELLO", client=a.target.client).id)


def _before_hello(a: Attacker) -> tuple[str, str, str]:
    """answer on a connection without HELLO"""
    line = a.fresh()
    return a.reply(line, line.say("RESULT", code="lost").id)


def _replay(a: Attacker) -> tuple[str, str, str]:
    """replay every byte of an earlier connection on a new one"""
    line = a.welcomed()
    line.say("HEARTBEAT", code="computing")
    line.listen(0.2)
    recorded = line.sent
    line = a.fresh()
    for frames in recorded:
        line.send(frames)
    line.wait(lambda: len(line.hears(kind="ERROR")) >= len(recorded) or line.hears(kind="WELCOME"), a.wait_s)
    found = next((h for h in line.heard if h.kind in ("WELCOME", "ERROR")), None)
    if found is None:
        return a.reply(line)
    all_codes = ", ".join(h.code or h.kind for h in line.heard if h.kind in ("WELCOME", "ERROR"))
    return found.kind, found.code, f"{len(recorded)} messages sent again: {all_codes}"


def _endless_multipart(a: Attacker) -> tuple[str, str, str]:
    """one message of 1 GiB in frames of 2 MiB, each within the frame limit"""
    line = a.welcomed()
    line.send(endless(line, a.flood))
    return a.reply(line)


CONNECTIONS: dict[str, Callable[[Attacker], tuple[str, str, str]]] = {
    "hello": _hello,
    "claim-identity": _claim_identity,
    "unknown-key": _unknown_key,
    "no-curve": _no_curve,
    "second-connection": _second_connection,
    "before-hello": _before_hello,
    "replay": _replay,
    "endless-multipart": _endless_multipart,
}
STEPS = {
    **{name: str(step.__doc__) for name, step in CONNECTIONS.items()},
    **{name: text for name, (text, _) in MESSAGES.items()},
    **{name: text for name, (text, _) in ANSWERS.items()},
}


def play(
    target: Target, steps: Iterable[str], *, wait_s: float = 5.0, task_s: float = 60.0, flood: int = 1024
) -> Iterator[Reaction]:
    """Run steps in order and yield the reaction to each; ends early with BYE, NO-TASK or UNREACHED if the run ends.

    Args:
        target: Target of the attack.
        steps: Names in STEPS; "name*3" repeats three times, "name*" until the run ends.
        wait_s: Seconds to wait for an answer.
        task_s: Seconds to wait for a task.
        flood: Size of the endless message in MiB.

    Raises:
        ConfigError: For an unknown step.
    """
    attacker = Attacker(target, wait_s=wait_s, task_s=task_s, flood=flood)
    try:
        for name in _expanded(steps):
            reaction = _do(attacker, name)
            yield reaction
            if reaction.answer in ("BYE", "NO-TASK", "UNREACHED"):
                return
    finally:
        attacker.close()


def _expanded(steps: Iterable[str]) -> Iterator[str]:
    parsed = [(step, re.fullmatch(r"([a-z-]+?)(\*(\d*))?", step.strip())) for step in steps]
    unknown = [step for step, match in parsed if match is None or match[1] not in STEPS]
    if unknown:
        raise ConfigError(f"unknown steps {', '.join(map(repr, unknown))}: must be of {', '.join(STEPS)}")

    def repeated() -> Iterator[str]:
        for _, match in parsed:
            assert match is not None
            left = float(match[3] or "inf") if match[2] else 1
            while left > 0:
                yield match[1]
                left -= 1

    return repeated()


def _do(attacker: Attacker, name: str) -> Reaction:
    try:
        if name in ANSWERS:
            return _answer(attacker, name)
        if name in MESSAGES:
            line = attacker.welcomed()
            messages, ids = MESSAGES[name][1](line)
            for frames in messages:
                line.send(frames)
            found = attacker.reply(line, *ids)
        else:
            found = CONNECTIONS[name](attacker)
    except NotWelcome as refused:
        found = refused.outcome
    return Reaction(name, "BYE") if found[0] == "SILENCE" and attacker.over else Reaction(name, *found)


def _answer(attacker: Attacker, name: str) -> Reaction:
    """Take the next task and answer it as the step defines."""
    task = attacker.task()
    if task is None:
        return Reaction(name, "BYE" if attacker.over else "NO-TASK")
    line = attacker.welcomed()
    wrong = ANSWERS[name][1](honest(line.target.releases.get(task.task, {})), task)
    payload = Payload.of(wrong.pop("tensors"))
    first = wrong.pop("index", 0)
    fields = {"parent": task.id, "round": task.round, "task": task.task, "code": "release", "blake3": payload.blake3, **wrong}
    said = line.say("RESULT", tensors=payload.rows, chunks=len(payload.chunks), **fields)
    for index, chunk in enumerate(payload.chunks):
        line.say("CHUNK", chunk, parent=said.id, index=first + index)
    found = attacker.reply(line, said.id)
    line.say("HEARTBEAT", code="idle")
    if found[1] in DAMAGED:  # the task is still open: the coordinator asks for the answer again
        attacker.answered.discard(task.id)
    return Reaction(name, *found, round=task.round)


def main(arguments: list[str] | None = None) -> int:
    """Run a script against a coordinator and print a line for each step; returns 4 if it ended with UNREACHED, else 0."""
    width = max(map(len, STEPS))
    parser = argparse.ArgumentParser(
        prog="python -m dpcfl_net.adversaries.hostile_worker",
        description="A malicious worker with a client's valid keys, for your own coordinator.",
        epilog="steps (name*3: three times, name*: until the run ends):\n"
        + "\n".join(f"  {name:<{width}}  {text}" for name, text in STEPS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("job", type=Path, help="folder with protocol.json")
    parser.add_argument("--client", type=int, required=True, help="client whose keys are used")
    parser.add_argument("--connect", required=True, help="address of the coordinator, or of the client's aggregator")
    parser.add_argument("--keys", type=Path, required=True, help="folder with this client's key pair")
    parser.add_argument("--steps", required=True, help="steps, separated by commas")
    parser.add_argument("--wait", type=seconds, default=5.0, help="seconds to wait for an answer (default 5)")
    parser.add_argument("--task-wait", type=seconds, default=60.0, help="seconds to wait for a task (default 60)")
    given = parser.parse_args(arguments)
    protocol = read_protocol(RunFolder(given.job).protocol)
    if given.client not in [entry.id for entry in protocol.roster]:
        raise ConfigError(f"--client is {given.client}: must be a client of the roster, 0 to {len(protocol.roster) - 1}")
    target = Target.of(protocol, given.client, given.connect, given.keys)
    answer = ""
    for reaction in play(target, given.steps.split(","), wait_s=given.wait, task_s=given.task_wait):
        about = f"round {reaction.round}" if reaction.round else ""
        print(f"{reaction.step:<{width}}  {about:<9}  {reaction.answer:<7}  {reaction.code:<16}  {reaction.reason}".rstrip())
        sys.stdout.flush()
        answer = reaction.answer
    return 4 if answer == "UNREACHED" else 0


if __name__ == "__main__":
    run(main)
