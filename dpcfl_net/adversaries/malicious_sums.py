"""Scripted malicious server of secure sums, for tests of workers: at each stage of a round it first asks what clients must refuse.

python -m dpcfl_net.adversaries.malicious_sums JOB --bind tcp://127.0.0.1:5700 --keys KEYS --steps box-key,second-list
dpcfl worker JOB --client 0 --connect tcp://127.0.0.1:5700 --keys KEYS --operator-key JOB/operator.pub --ledgers LEDGERS
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dpcfl_net.adversaries import scripts
from dpcfl_net.adversaries.malicious_coordinator import MaliciousCoordinator
from dpcfl_net.adversaries.malicious_steps import Tensors, make
from dpcfl_net.adversaries.reactions import Heard, Said
from dpcfl_net.adversaries.sum_attacks import SCRIPT, Forger, SumAttack
from dpcfl_net.algorithms.base import Algorithm
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.job_reader import read_protocol
from dpcfl_net.core.process_log import log_to_stderr
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.types import ClientStep
from dpcfl_net.federation.capabilities import client_steps
from dpcfl_net.federation.secure.client_side import context_of
from dpcfl_net.federation.secure.job_terms import Identities, terms_of
from dpcfl_net.federation.secure.server_stages import Aborted, ServerRound
from dpcfl_net.federation.secure.stages import MASKING

Tasks = Mapping[int, Tensors]
Ask = Callable[[int, str, Tasks], dict[int, Heard]]
OWN_KEY = bytes(range(32))  # X25519 secret key of the server, which it puts in place of clients' keys


def masked_step(algorithm: Algorithm) -> ClientStep:
    """Return the client step that releases the masked vector.

    Args:
        algorithm: The job's algorithm.

    Raises:
        ConfigError: If the job has no secure sums.
    """
    for step in client_steps(algorithm).values():
        if set(MASKING) <= set(step.takes):
            return step
    raise ConfigError(f"algorithm {algorithm.name} has no secure sums in this job")


@dataclass(frozen=True)
class SumReaction:
    """Reaction of one client to one attack.

    Attributes:
        attack: Name of the attack.
        client: Client id.
        round: Round of the sum.
        answer: Status of the answer.
        code: Code of a refusal.
        reason: Reason of a refusal.
        holds: True if the client refused.
    """

    attack: str
    client: int
    round: int
    answer: Said
    code: str
    reason: str

    @property
    def holds(self) -> bool:
        return self.answer == "refused"

    def __str__(self) -> str:
        """Format the reaction as one line."""
        verdict = "holds" if self.holds else "DOES NOT HOLD"
        return f"round {self.round} {self.attack:16} client {self.client:<4} {self.answer:8} {verdict:14} {self.code} {self.reason}"


@dataclass
class SumPlayed:
    """Course of a round.

    Attributes:
        server: The round at the server.
        reactions: Reactions to the attacks.
        tasks: Name of each stage to its honest tasks.
        answers: Name of each stage to the answers to them.
        total: The sum's words, (d,) uint32; None if the round was aborted.
        aborted: Why it was aborted.
    """

    server: ServerRound
    reactions: list[SumReaction] = field(default_factory=list)
    tasks: dict[str, Tasks] = field(default_factory=dict)
    answers: dict[str, dict[int, Heard]] = field(default_factory=dict)
    total: np.ndarray | None = None
    aborted: str = ""

    def refusals(self, *attacks: str) -> str:
        """Return the codes with which every client refused these attacks; raises ValueError if one did not refuse."""
        found = [reaction for reaction in self.reactions if reaction.attack in attacks]
        if not found or not all(reaction.holds for reaction in found):
            raise ValueError("; ".join(map(str, found)) or f"none of {attacks} was played")
        return ", ".join(dict.fromkeys(reaction.code for reaction in found))


class MaliciousSums:
    """Server that plays whole rounds of secure sums with all clients, and attacks between their stages.

    Args:
        algorithm: The job's algorithm.
        ask: Sends tasks and returns the answers.

    Attributes:
        ask: Sends tasks of any round and kind.
    """

    def __init__(self, algorithm: Algorithm, ask: Ask) -> None:
        self.algorithm, self.ask = algorithm, ask
        self._step = masked_step(algorithm)
        self._old_keys: dict[int, np.ndarray] = {}

    def play(self, t: int, attacks: Sequence[SumAttack] = (), *, split: bool = False) -> SumPlayed:
        """Run one round: at each stage the attacks, then the honest request, then the attacks that come after it.

        Args:
            t: The round.
            attacks: Attacks; each is sent to every client that the stage asks.
            split: True to send each client a different model.
        """
        server = self.begin(t)
        played, forger = SumPlayed(server), Forger(server.terms, t, OWN_KEY, self._old_keys)
        try:
            for kind, tasks, take in self._stages(server, t, split):
                wanted = [attack for attack in attacks if attack.stage in (kind, "masked" if kind == self._step.kind else "")]
                self._attack(played, forger, kind, tasks, [attack for attack in wanted if not attack.after])
                played.tasks[kind], played.answers[kind] = tasks, self.ask(t, kind, tasks)
                for client, heard in played.answers[kind].items():
                    if take(client, heard.tensors) and kind == "secure_keys":
                        forger.keys[client] = heard.tensors["keys"]
                self._attack(played, forger, kind, tasks, [attack for attack in wanted if attack.after])
            played.total = server.unmask(self.context(t))
        except Aborted as why:
            played.aborted = str(why)
        self._old_keys = forger.keys
        return played

    def begin(self, t: int) -> ServerRound:
        """Return the server's side of a round before its first stage.

        Args:
            t: The round.

        Raises:
            ConfigError: If the job has no secure sum of these clients.
        """
        protocol = self.algorithm.protocol
        group = self.algorithm.secure_group(t) or tuple(self.algorithm.clients)
        code = self.algorithm.secure_code(len(group))
        if code is None:
            raise ConfigError(f"round {t} has no secure sum of {len(group)} clients")
        return ServerRound(terms_of(protocol, group), t, Identities(protocol), code.d)

    def masked_model(self, t: int, client: int = 0, *, split: bool = False) -> Tensors:
        """Return the model that a client gets in a round.

        Args:
            t: The round.
            client: Client id.
            split: True for a different model for each client.
        """
        made = make(self._step, self.algorithm, "per-client" if split else "honest", t, client)
        return {name: array for name, array in made.items() if name not in MASKING}

    def context(self, t: int) -> bytes:
        """Return the digest of the round's model, as clients compute it.

        Args:
            t: The round.
        """
        return context_of(self.masked_model(t))

    def masked_tasks(self, server: ServerRound, t: int, *, split: bool = False) -> Tasks:
        """Return the tasks of the masked step, with the model.

        Args:
            server: The round at the server.
            t: The round.
            split: True for a different model for each client.
        """
        return {client: {**task, **self.masked_model(t, client, split=split)} for client, task in server.masked_tasks().items()}

    def _stages(self, server: ServerRound, t: int, split: bool) -> Iterator[tuple[str, Tasks, Callable[..., bool]]]:
        """Stages of a round; tasks are built when the answers to the stage before are in."""
        yield "secure_keys", server.keys_tasks(), server.add_keys
        yield "secure_shares", server.shares_tasks(), server.add_boxes
        yield self._step.kind, self.masked_tasks(server, t, split=split), server.add_masked
        yield "secure_survivors", server.survivors_tasks(), server.add_signature
        yield "secure_unmask", server.unmask_tasks(), server.add_shares

    def _attack(self, played: SumPlayed, forger: Forger, kind: str, tasks: Tasks, attacks: Sequence[SumAttack]) -> None:
        for attack in attacks:
            forged = {client: attack.change(forger, client, dict(task)) for client, task in tasks.items()}
            for client, heard in self.ask(forger.round, kind, forged).items():
                played.reactions.append(SumReaction(attack.name, client, forger.round, heard.answer, heard.code, heard.reason))


def main(arguments: Sequence[str] | None = None) -> int:
    """Play two rounds of attacks against workers; returns 0 if every client refused every attack, else 3."""
    parser = argparse.ArgumentParser(
        prog="python -m dpcfl_net.adversaries.malicious_sums", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("job", type=Path, help="folder with protocol.json: a job folder or a run folder")
    parser.add_argument("--bind", default="tcp://127.0.0.1:*", help="tcp://host:port; port * for a free one")
    parser.add_argument("--keys", type=Path, required=True, help="folder with the coordinator's key pair")
    parser.add_argument("--wait", type=scripts.seconds, default=60.0, help="seconds to wait for a worker or an answer")
    about = "; ".join(f"{attack.name}: {attack.says}" for attack in SCRIPT)
    parser.add_argument("--steps", default="all", help=f"names separated by commas, or all. {about}")
    given = parser.parse_args(arguments)
    attacks, reactions = scripts.chosen(given.steps, SCRIPT), list[SumReaction]()
    protocol = read_protocol(RunFolder(given.job).protocol)
    if not protocol.privacy.secure:
        raise ConfigError(f"{given.job} has no secure sums: its privacy.trust must be secure-aggregation")
    log_to_stderr()
    with MaliciousCoordinator(protocol, given.bind, given.keys, wait_s=given.wait) as server:
        print(f"listening on {server.address}", flush=True)
        if absent := server.join():
            print(f"clients {absent} did not connect")
        sums = MaliciousSums(server.algorithm, server.ask)
        for t in range(1, min(2, protocol.rounds) + 1):
            played = sums.play(t, attacks)
            reactions += played.reactions
            print(*played.reactions, f"round {t}: {played.aborted or 'the sum was opened'}", sep="\n", flush=True)
    return scripts.verdict(reactions)


if __name__ == "__main__":
    scripts.run(main)
