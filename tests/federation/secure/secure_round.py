"""A secure sum played in one process, for tests of its stages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from dpcfl_net.core.signing import signing_public
from dpcfl_net.federation.secure import client_checks, client_stages
from dpcfl_net.federation.secure.server_stages import ServerRound
from dpcfl_net.federation.secure.terms import Settings, Terms

CONTEXT = hashlib.sha256(b"model").digest()
JOB = "ab" * 32


@dataclass
class Sum:
    """Clients and server of one sum; each method plays one stage with those that are not absent."""

    n: int
    size: int = 50
    settings: Settings = field(default_factory=Settings)
    round: int = 3
    group: tuple[int, ...] = ()
    context: Callable[[int], bytes] = lambda client: CONTEXT
    tamper: Callable[[str, int, dict], dict] = lambda kind, client, release: release
    states: dict = field(default_factory=dict)
    vectors: dict = field(default_factory=dict)

    def __post_init__(self):
        self.group = self.group or tuple(range(2, 2 + 3 * self.n, 3))
        self.terms = Terms.of(JOB, self.group, self.settings)
        self.secrets = {client: hashlib.sha256(b"identity %d" % client).digest() for client in self.group}
        self.identities = {client: signing_public(secret) for client, secret in self.secrets.items()}
        self.server = ServerRound(self.terms, self.round, self.identities, self.size)
        rng = np.random.default_rng(self.n)
        self.vectors = {client: rng.integers(0, 1 << 32, self.size, np.uint32) for client in self.group}
        self.sent = {}

    def key(self, client: int, stage: str) -> bytes:
        return hashlib.sha256(f"{stage} {client}".encode()).digest()

    def keys(self, absent: Collection[int] = ()):
        for client in self.server.keys_tasks():
            if client not in absent:
                client_checks.check_group(self.terms, client)
                release, self.states[client] = client_stages.advertise(
                    self.terms, self.round, client, self.secrets[client], self.key(client, "keys")
                )
                self.server.add_keys(client, self.tamper("keys", client, release))

    def shares(self, absent: Collection[int] = ()):
        for client, task in self.server.shares_tasks().items():
            if client not in absent:
                self.server.add_boxes(client, self.tamper("boxes", client, self.share(client, task)))

    def share(self, client: int, task: dict):
        client_checks.check_keys(self.terms, self.round, client, self.identities, self.states[client], **task)
        release, self.states[client] = client_stages.share(
            self.terms, self.round, client, self.states[client], **task, key=self.key(client, "shares")
        )
        return release

    def masked(self, absent: Collection[int] = ()):
        for client, task in self.server.masked_tasks().items():
            if client not in absent:
                self.server.add_masked(client, self.tamper("masked", client, {"masked": self.mask(client, task)}))

    def mask(self, client: int, task: dict):
        client_checks.check_mask(self.terms, self.round, client, self.states[client], **task)
        self.sent[client] = words = self.vectors[client].copy()
        self.states[client] = client_stages.mask(
            self.terms, self.round, client, self.states[client], **task, context=self.context(client), vector=words
        )
        return words

    def survivors(self, absent: Collection[int] = ()):
        for client, task in self.server.survivors_tasks().items():
            if client not in absent:
                self.server.add_signature(client, self.tamper("signature", client, self.sign(client, **task)))

    def sign(self, client: int, survivors: np.ndarray):
        client_checks.check_survivors(self.terms, self.round, client, self.states[client], survivors)
        release, self.states[client] = client_stages.sign_survivors(
            self.terms, self.round, client, self.states[client], survivors, self.secrets[client]
        )
        return release

    def unmasking(self, absent: Collection[int] = ()):
        for client, task in self.server.unmask_tasks().items():
            if client not in absent:
                self.server.add_shares(client, self.tamper("shares", client, self.open(client, task)))

    def open(self, client: int, task: dict):
        client_checks.check_unmask(self.terms, self.round, client, self.identities, self.states[client], **task)
        release, self.states[client] = client_stages.unmask(
            self.terms, self.round, client, self.states[client], task["survivors"]
        )
        return release

    def result(self):
        return self.server.unmask(CONTEXT)

    def expected(self):
        return sum((self.vectors[client] for client in self.server.survivors), np.zeros(self.size, np.uint32))

    def until(self, stage: str):
        """Play the stages before a stage, everybody answering."""
        for name in ("keys", "shares", "masked", "survivors", "unmasking"):
            if name == stage:
                return self
            getattr(self, name)()
        return self


STAGES = ("keys", "shares", "masked", "survivors", "unmasking")
