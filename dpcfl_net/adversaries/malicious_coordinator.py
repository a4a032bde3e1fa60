"""Scripted malicious server for tests of workers: it holds the coordinator's keys and runs hostile steps.

    python -m dpcfl_net.adversaries.malicious_coordinator JOB --bind tcp://127.0.0.1:5700 --keys KEYS --ledgers LEDGERS \
        --steps honest,again,other-model,beyond,rollback
    dpcfl worker JOB --client 0 --connect tcp://127.0.0.1:5700 --keys KEYS --operator-key JOB/operator.pub --ledgers LEDGERS
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgpack

from dpcfl_net.adversaries import scripts
from dpcfl_net.adversaries.malicious_steps import SCRIPT, Step, Tensors, make, round_number, usual_step
from dpcfl_net.adversaries.reactions import Heard, Reaction
from dpcfl_net.algorithms.base import algorithm_of
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.job_reader import read_protocol
from dpcfl_net.core.payload_hash import payload_hash
from dpcfl_net.core.process_log import log_to_stderr
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.run_folder import MESSAGES, TRANSCRIPT, RunFolder
from dpcfl_net.core.runlog import Lines
from dpcfl_net.core.tensors import pack
from dpcfl_net.core.types import ClientStep
from dpcfl_net.federation.capabilities import client_steps
from dpcfl_net.federation.message_encoding import MessageEncoding
from dpcfl_net.privacy.ledger.chain import LINES
from dpcfl_net.transport import keys
from dpcfl_net.transport.endpoint import Link, MessageLog, ServerEndpoint, ServerEvent, ServerTimes
from dpcfl_net.transport.keys import COORDINATOR, client_key
from dpcfl_net.transport.messages import Header
from dpcfl_net.transport.peers import Peer
from dpcfl_net.transport.transcript import Transcript

_log = logging.getLogger(__name__)

GONE_S = 2.0  # a worker that only lost its connection is back by then
REACTIONS = "outcomes.jsonl"


class _Endpoint(ServerEndpoint):
    """Coordinator's end of the wire with forged headers.

    forged: replaces fields of a task's header; stamped: of every header. turned_down: tasks that a client refused.
    """

    forged: dict[str, Any]
    stamped: dict[str, Any]
    turned_down: set[str]

    def _send(self, peer: Peer, header: Header, data: bytes, chunk: memoryview | None) -> bool:
        lies = {**self.stamped, **(self.forged if header.kind == "TASK" else {})}
        return super()._send(peer, header, msgpack.packb({**msgpack.unpackb(data), **lies}) if lies else data, chunk)

    def _client_refused(self, peer: Peer, header: Header) -> None:
        self.turned_down.add(header.parent)
        super()._client_refused(peer, header)


class MaliciousCoordinator:
    """Server with the job's public part and the coordinator's keys that sends arbitrary tasks.

    Args:
        protocol: The job's protocol.
        bind: "tcp://host:port", port * for a free one.
        key_folder: Folder of all keys.
        clients: Clients to wait for and ask; empty: the roster.
        ledgers: The workers' folder of ledgers, if available.
        out: Folder for the transcript with all payloads, messages and outcomes.
        wait_s: Seconds to wait for a worker or an answer.

    Attributes:
        address: Bound address with its real port.

    Raises:
        ConfigError: For missing keys, an address that is taken, or a job with aggregators, which its clients connect to.
    """

    def __init__(
        self,
        protocol: Protocol,
        bind: str,
        key_folder: Path,
        *,
        clients: Sequence[int] = (),
        ledgers: Path | None = None,
        out: Path | None = None,
        wait_s: float = 60.0,
    ) -> None:
        if protocol.aggregators:
            raise ConfigError("the job has aggregators: its clients connect to them and never to a coordinator")
        self.protocol, self.algorithm, self.wait_s = protocol, algorithm_of(protocol), wait_s
        self.clients = sorted(clients) or [entry.id for entry in protocol.roster]
        self._keys = (keys.read_public(key_folder, COORDINATOR), keys.read_secret(key_folder, COORDINATOR))
        self._ledgers = ledgers
        self._transcript = Transcript(out / TRANSCRIPT, "full") if out else None
        self._messages, self._reactions = (Lines(out / name) if out else None for name in (MESSAGES, REACTIONS))
        self._asked: list[int] = []
        self._sent: dict[tuple[int, int], Tensors] = {}
        self._seen: set[tuple[int, str]] = set()
        self._endpoint = self._open(bind)
        self.address = self._endpoint.address

    def join(self) -> list[int]:
        """Wait for the clients and return those that are missing."""
        self._wait_for(set(self.clients))
        return sorted(set(self.clients) - self._endpoint.ready)

    def play(self, step: Step) -> list[Reaction]:
        """Send a step to all connected clients.

        Args:
            step: The step.

        Returns:
            Reactions in client order.

        Raises:
            ConfigError: If the step needs an earlier one, or the folder of ledgers has none of a connected client.
        """
        if step.restart:
            self._restart(step.job)
        number = round_number(step.round, self._asked, self.protocol.rounds)
        here = [client for client in self.clients if client in self._endpoint.ready]
        before = {client: self._charges(client) for client in here}
        tasks: dict[int, Tensors] = {}
        for client in here:
            tensors = self._sent.get((client, number)) if step.weights == "as-sent" else None
            if tensors is None:
                tensors = make(self._usual, self.algorithm, step.weights, number, client)
            if step.pays:
                self._sent[client, number] = tensors
            tasks[client] = tensors
        if step.pays:
            self._asked.append(number)
        answers = self.ask(number, step.task or self._usual.kind, tasks, step.header)
        found = [self._reaction(step, number, client, answers[client], before[client]) for client in here]
        if self._reactions is not None:
            for reaction in found:
                self._reactions.write(dataclasses.asdict(reaction))
        return found

    def ask(
        self, number: int, kind: str, tasks: Mapping[int, Tensors], header: Mapping[str, Any] | None = None
    ) -> dict[int, Heard]:
        """Send a task to each connected client and wait for the answers.

        Args:
            number: Round of the tasks.
            kind: Name of the tasks.
            tasks: Client to its tensors.
            header: Replaced fields of the tasks' headers.

        Returns:
            Client to its answer.
        """
        self._endpoint.forged = dict(header or {})
        here = [client for client in sorted(tasks) if client in self._endpoint.ready]
        waiting = {client: self._endpoint.send_task(client, number, kind, tasks[client]) for client in here}
        return {client: self._heard(client, event) for client, event in self._listen(waiting).items()}

    @cached_property
    def _usual(self) -> ClientStep:
        return usual_step(self.algorithm)

    def close(self) -> None:
        """Send BYE to the workers for up to two seconds, and close the address."""
        deadline = time.monotonic() + 2
        while self._endpoint.ready and time.monotonic() < deadline:
            self._endpoint.bye()
            self._endpoint.poll(0.2)
        self._endpoint.close(abort=True)
        if self._transcript is not None:
            self._transcript.close()
        for lines in (self._messages, self._reactions):
            if lines is not None:
                lines.close()

    def __enter__(self) -> MaliciousCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, bind: str, job: str = "") -> _Endpoint:
        steps, encoding = client_steps(self.algorithm), MessageEncoding(self.algorithm)
        made = _Endpoint(
            bind,
            Link.of(self.protocol, self._keys),
            clients={entry.id: entry.public_key for entry in self.protocol.roster},
            result_template=lambda task: encoding.release_template(steps[task]) if task in steps else None,
            log=MessageLog(
                on_failure=lambda failure: _log.warning("%s: %s %s", failure["peer"], failure["code"], failure["reason"]),
                on_messages=None if (lines := self._messages) is None else lambda rows: lines.write(*rows),
                transcript=self._transcript,
            ),
            times=ServerTimes(heartbeat_s=1.0),
        )
        made.forged, made.turned_down = {}, set()
        made.stamped = {"job": job} if job else {}
        return made

    def _restart(self, job: str) -> None:
        """Restart at the same address without any state of earlier connections."""
        known = self._endpoint.ready or set(self.clients)
        self._endpoint.close(abort=True)
        self._endpoint = self._open(self.address, job)
        self._wait_for(known)

    def _wait_for(self, wanted: set[int]) -> None:
        deadline = time.monotonic() + self.wait_s
        while wanted - self._endpoint.ready and time.monotonic() < deadline:
            self._endpoint.poll(0.5)

    def _listen(self, waiting: dict[int, str]) -> dict[int, ServerEvent | None]:
        """Event that settles each client's task; None if nothing arrives or the worker left."""
        answers: dict[int, ServerEvent | None] = dict.fromkeys(waiting)
        deadline, gone = time.monotonic() + self.wait_s, dict[int, float]()
        while waiting and (now := time.monotonic()) < deadline:
            for event in self._endpoint.poll(0.25):
                client = -1 if event.client is None else event.client
                if event.kind == "left":
                    gone[client] = now
                elif event.kind == "joined":
                    gone.pop(client, None)
                elif event.kind in ("result", "failed") and event.id and event.id == waiting.get(client):
                    answers[client] = event
                    del waiting[client]
            for client in [client for client, since in gone.items() if now - since > GONE_S]:
                waiting.pop(client, None)
        for client in (client for client, answer in answers.items() if answer is None):
            self._endpoint.cancel(client)  # or one that comes back would be sent it again, and charge during a later step
        return answers

    def _reaction(self, step: Step, number: int, client: int, heard: Heard, before: int | None) -> Reaction:
        answer, blake3, repeated = heard.answer, "", False
        if answer == "release":
            blake3 = payload_hash(pack(heard.tensors))
            repeated = (client, blake3) in self._seen
            self._seen.add((client, blake3))
        after = self._charges(client)
        charges = None if before is None or after is None else (before, after)
        spent = 0 if charges is None else charges[1] - charges[0]
        if step.pays:
            holds = answer == "release" and spent <= 1
        else:
            holds = spent == 0 and answer != "unusable" and (repeated or not blake3)
        task = step.task or self._usual.kind
        return Reaction(step.name, client, number, task, answer, heard.code, heard.reason, blake3, repeated, charges, holds)

    def _heard(self, client: int, event: ServerEvent | None) -> Heard:
        if event is None:
            return Heard("silence" if client in self._endpoint.ready else "gone")
        if event.kind == "failed":
            return Heard("refused" if event.id in self._endpoint.turned_down else "unusable", event.code, event.reason)
        if event.status == "release":
            return Heard("release", reason=event.reason, tensors=event.tensors)
        code, _, reason = event.reason.partition(": ")
        return Heard(event.status, code, reason)  # type: ignore[arg-type]

    def _charges(self, client: int) -> int | None:
        """Number of debits in the client's ledger, without verification."""
        if self._ledgers is None:
            return None
        path = self._ledgers / client_key(client) / LINES
        if not path.exists():  # a worker opens its ledger before it connects: without it every step would seem to cost nothing
            raise ConfigError(
                f"{path} is missing although client {client} is connected: ledgers must be the folder of its worker"
            )
        return path.read_bytes().count(b"\n") - 1


def play(server: MaliciousCoordinator, steps: Sequence[Step], tell: Callable[[str], None] = print) -> Iterator[Reaction]:
    """Run steps in order and yield the reactions; ends when no client is left.

    Args:
        server: The server.
        steps: The steps.
        tell: Called with each reaction as a line.
    """
    for step in steps:
        found = server.play(step)
        for reaction in found:
            tell(str(reaction))
        yield from found
        if not found:
            tell(f"{step.name:18} no client is connected")
            return


def _clients(text: str, protocol: Protocol) -> list[int]:
    """Parse ids of the roster, separated by commas."""
    known, wanted = {str(entry.id): entry.id for entry in protocol.roster}, [name.strip() for name in text.split(",") if text]
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(f"--clients has {', '.join(map(repr, unknown))}: must be ids of the roster, 0 to {len(known) - 1}")
    return [known[name] for name in wanted]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a script against workers; returns 0 if every client held at every step, else 3."""
    parser = argparse.ArgumentParser(
        prog="python -m dpcfl_net.adversaries.malicious_coordinator", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("job", type=Path, help="folder with protocol.json: a job folder or a run folder")
    parser.add_argument("--bind", default="tcp://127.0.0.1:*", help="tcp://host:port; port * for a free one")
    parser.add_argument("--keys", type=Path, required=True, help="folder with the coordinator's key pair")
    parser.add_argument("--clients", default="", help="clients to wait for and ask, for example 0,1; default: the roster")
    parser.add_argument("--ledgers", type=Path, help="the workers' folder of ledgers, to show their charges")
    parser.add_argument("--out", type=Path, help="folder for transcript, messages and reactions")
    parser.add_argument("--wait", type=scripts.seconds, default=60.0, help="seconds to wait for a worker or an answer")
    about = "; ".join(f"{step.name}: {step.says}" for step in SCRIPT)
    parser.add_argument("--steps", default="all", help=f"names separated by commas, or all (in this order). {about}")
    given = parser.parse_args(arguments)
    steps = scripts.chosen(given.steps, SCRIPT)
    protocol = read_protocol(RunFolder(given.job).protocol)
    clients = _clients(given.clients, protocol)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
    log_to_stderr()
    with MaliciousCoordinator(
        protocol, given.bind, given.keys,
        clients=clients, ledgers=given.ledgers, out=given.out, wait_s=given.wait,
    ) as server:  # fmt: skip
        print(f"listening on {server.address}", flush=True)
        if absent := server.join():
            print(f"clients {absent} did not connect")
        reactions = list(play(server, steps, lambda line: print(line, flush=True)))
    return scripts.verdict(reactions)


if __name__ == "__main__":
    scripts.run(main)
