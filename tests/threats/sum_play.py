"""Jobs with secure sums for the threat suite, their clients in this process, and servers that open more than they may."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL

from dpcfl_net.adversaries.malicious_sums import Ask, MaliciousSums, Tasks
from dpcfl_net.adversaries.reactions import Heard
from dpcfl_net.core.tensors import unpack
from dpcfl_net.core.types import Task
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.federation.client_host import ClientHost
from dpcfl_net.federation.secure import masks
from dpcfl_net.federation.secure.client_side import Masking
from dpcfl_net.federation.secure.keys import KEY_BYTES, Agreement
from dpcfl_net.federation.secure.messages import mask_key, self_mask_key
from dpcfl_net.federation.secure.recovery import recover_mask_key, recover_seed
from dpcfl_net.federation.secure.server_stages import ServerRound
from dpcfl_net.federation.secure.terms import Terms
from dpcfl_net.runtime.client_hosts import make_host
from dpcfl_net.transport.identities import make_identities
from dpcfl_net.transport.keys import make_keys

Shares = Mapping[int, np.ndarray]  # client to its answer to the last stage, (K, 33)
_opened: list[ClientHost] = []


def in_process(hosts: Mapping[int, ClientHost]) -> Ask:
    """Return a function that asks clients of this process, behind their gates."""

    def ask(t: int, kind: str, tasks: Tasks) -> dict[int, Heard]:
        answers = {client: hosts[client].answer(Task(t, kind, tensors)) for client, tensors in sorted(tasks.items())}
        return {
            client: Heard(a.status, a.code, a.reason, unpack(a.release) if a.status == "release" else {})
            for client, a in answers.items()
        }

    return ask


def sum_job(folder: Path, clients: int, **changes) -> Job:
    """A job of DP-FedAvg by secure sums with secret coins; keys and identities are written to `folder/keys`."""
    make_keys(folder / "keys", clients)
    make_identities(folder / "keys", range(clients))
    privacy = {"epsilon": 10, "delta": 0.1, "unit": "client", "trust": "secure-aggregation", **changes.pop("privacy", {})}
    document = {
        **SMALL,
        "data": {"dataset": "digits", "clients": [clients], "train_per_client": 50, "test_per_client": 20, "shift": "none"},
        "model": {"name": "linear"},
        "rounds": 4,
        "local": {"batch_size": 16, "lr": 0.1, "deadline_s": 0.2},
        "privacy": {**privacy, "noise": "seeded", "noise_seed": "5eed" * 16},
        "algorithm": {"name": "dp-fedavg", "sampling_rate": 0.5},
        "output": {},
        **changes,
    }
    return make_job(config.resolve(document), folder / "keys")


def hosts_of(job: Job, folder: Path, ledgers: str = "ledgers") -> dict[int, ClientHost]:
    """All clients behind their gates; equal names of ledgers mean the same memory."""
    clients = job.algorithm.clients
    hosts = {c: make_host(job, c, folder / ledgers, durable=False, key_folder=folder / "keys") for c in clients}
    _opened.extend(hosts.values())
    return hosts


@pytest.fixture(autouse=True)
def hosts_closed() -> Iterator[None]:
    """After a test the ledgers of its clients are closed."""
    yield
    while _opened:
        _opened.pop().close()


def rolled_back(job: Job, folder: Path, copy: str) -> dict[int, ClientHost]:
    """The same clients with a copy of their memory, which the originals do not share from now on."""
    shutil.copytree(folder / "ledgers", folder / copy)
    return hosts_of(job, folder, copy)


def sums_of(job: Job, hosts: Mapping[int, ClientHost]) -> MaliciousSums:
    return MaliciousSums(job.algorithm, in_process(hosts))


def truth(monkeypatch) -> dict[tuple[int, int], np.ndarray]:
    """Round and client to the words under its masks, filled while clients of this process mask."""
    found: dict[tuple[int, int], np.ndarray] = {}
    masked = Masking.words

    def words(self, vector, key):
        found[self._round, self._client] = self.code.to_words(self.code.encode(vector), key)
        return masked(self, vector, key)

    monkeypatch.setattr(Masking, "words", words)
    return found


def added(words: Iterable[np.ndarray]) -> np.ndarray:
    return np.sum(list(words), axis=0, dtype=np.uint32)


class Greedy:
    """A server that plays a round stage by stage and keeps every answer, to open what it likes."""

    def __init__(self, sums: MaliciousSums, t: int) -> None:
        self.sums, self.round = sums, t
        self.server: ServerRound = sums.begin(t)
        self.terms: Terms = self.server.terms
        self.tasks: dict[str, dict] = {}
        self.answers: dict[str, dict] = {}

    def ask(self, stage: str, tasks: Mapping[int, dict]) -> dict[int, str]:
        """Ask one stage and keep the releases; returns the codes of refusals."""
        heard = self.sums.ask(self.round, stage, tasks)
        self.tasks[stage] = dict(tasks)
        self.answers[stage] = {client: one.tensors for client, one in heard.items() if one.answer == "release"}
        return {client: one.code for client, one in heard.items() if one.answer != "release"}

    def until_masked(self, absent: Iterable[int] = ()) -> Greedy:
        """Play the first three stages honestly; some clients do not answer from the first on."""
        server, gone = self.server, set(absent)
        for stage, tasks, take in (
            ("secure_keys", server.keys_tasks, server.add_keys),
            ("secure_shares", server.shares_tasks, server.add_boxes),
            ("masked_update", lambda: self.sums.masked_tasks(server, self.round), server.add_masked),
        ):
            assert self.ask(stage, {client: task for client, task in tasks().items() if client not in gone}) == {}
            for client, release in self.answers[stage].items():
                assert take(client, release)
        return self

    def opened(self, survivors: Iterable[int], shares: Shares, context: bytes) -> np.ndarray:
        """The sum of some clients' words, from shares of their self masks and of the mask keys of all others.

        Each holder gave the kind of share that follows from the list it was shown.
        """
        lists = {client: task["survivors"] for client, task in self.tasks["secure_unmask"].items()}
        wanted, terms, present = set(survivors), self.terms, self.tasks["masked_update"]
        total = added(self.answers["masked_update"][client]["masked"] for client in wanted)
        second = next(iter(present.values()))["present"]
        public = {
            client: release["keys"][KEY_BYTES : 2 * KEY_BYTES].tobytes()
            for client, release in self.answers["secure_keys"].items()
        }
        plus, minus = list[bytes](), list[bytes]()
        for client in terms.group:
            kind = int(client in wanted)
            given = [holder for holder, flags in lists.items() if flags[terms.position(client)] == kind]
            if client in wanted:
                seed = recover_seed(terms.share_threshold, self._shares(client, shares, given))
                assert seed is not None
                minus.append(self_mask_key(terms, self.round, client, seed))
            elif second[terms.position(client)]:
                secret = recover_mask_key(terms.share_threshold, self._shares(client, shares, given), public[client])
                assert secret is not None
                for other in wanted & set(terms.neighbours(client)):
                    key = mask_key(terms, self.round, Agreement(secret), public[other], (client, other), second, context)
                    (minus if other < client else plus).append(key)
        masks.apply(total, plus, minus)
        return total

    def alone(self, victim: int, seeds: Shares, secrets: Shares, context: bytes) -> np.ndarray:
        """One client's words, from shares of both of its secrets."""
        terms, words = self.terms, self.answers["masked_update"][victim]["masked"].copy()
        public = {
            client: release["keys"][KEY_BYTES : 2 * KEY_BYTES].tobytes()
            for client, release in self.answers["secure_keys"].items()
        }
        seed = recover_seed(terms.share_threshold, self._shares(victim, seeds))
        secret = recover_mask_key(terms.share_threshold, self._shares(victim, secrets), public[victim])
        assert seed is not None
        assert secret is not None
        second = self.tasks["masked_update"][victim]["present"]
        plus, minus = list[bytes](), [self_mask_key(terms, self.round, victim, seed)]
        for other in terms.neighbours(victim):
            key = mask_key(terms, self.round, Agreement(secret), public[other], (victim, other), second, context)
            (minus if victim < other else plus).append(key)
        masks.apply(words, plus, minus)
        return words

    def _shares(self, owner: int, answers: Shares, holders: Iterable[int] | None = None) -> list[tuple[int, bytes]]:
        rows = zip(self.terms.holders(owner), self.terms.rows_at_holders(owner), strict=True)
        asked = set(answers) if holders is None else set(holders)
        return [(self.terms.position(h) + 1, answers[h][row].tobytes()) for h, row in rows if h in asked]


def shares_in(release: Mapping[int, Mapping[str, np.ndarray]]) -> dict[int, np.ndarray]:
    return {client: tensors["shares"] for client, tensors in release.items()}
