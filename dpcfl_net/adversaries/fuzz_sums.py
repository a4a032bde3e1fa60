"""Fuzz target: secure sums, in which requests to the clients and their answers are changed, repeated, and come out of order."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from dpcfl_net.adversaries.fuzz_readers import attempt, require
from dpcfl_net.core.signing import signing_public
from dpcfl_net.federation.secure import client_checks, client_stages, keys
from dpcfl_net.federation.secure.messages import survivors_message
from dpcfl_net.federation.secure.server_stages import Aborted, ServerRound
from dpcfl_net.federation.secure.terms import Terms

Arrays = dict[str, np.ndarray]
ROUND, SIZE = 3, 5
TERMS = Terms("ab" * 32, (1, 4, 5, 9))
CONTEXT = hashlib.sha256(b"model").digest()
SECRETS = {client: hashlib.sha256(b"identity %d" % client).digest() for client in TERMS.group}
IDENTITIES = {client: signing_public(secret) for client, secret in SECRETS.items()}
STAGES = ("keys", "shares", "masked", "survivors", "unmask")


class Sums:
    """One secure sum of four clients, with a server and clients that deviate at random."""

    name, share = "sums", 0.02

    def run(self, rng: Random, counts: Counter[str]) -> int:
        return _Session(rng, counts).run()


class _Session:
    def __init__(self, rng: Random, counts: Counter[str]) -> None:
        self.rng, self.counts, self.inputs = rng, counts, 0
        self.server = ServerRound(TERMS, ROUND, IDENTITIES, SIZE)
        self.clients = {client: _Client(client) for client in TERMS.group}
        self.sound = True  # no changed request or answer that looks valid was taken

    def run(self) -> int:
        takes = (
            self.server.add_keys, self.server.add_boxes, self.server.add_masked, self.server.add_signature, self.server.add_shares
        )  # fmt: skip
        for stage, take in zip(STAGES, takes, strict=True):
            ask: Callable[[], dict[int, Any]] = getattr(self.server, f"{stage}_tasks")
            tasks = attempt(ask, self.counts, stage, Aborted)
            if tasks is None:
                return self.inputs
            for client, task in tasks.items():
                self._exchange(stage, take, client, task)
        total = attempt(lambda: self.server.unmask(CONTEXT), self.counts, "unmask", Aborted)
        if total is not None and self.sound:
            expected = sum((self.clients[client].vector for client in self.server.survivors), np.zeros(SIZE, np.uint32))
            require(np.array_equal(total, expected), "a sum other than that of the survivors", (total, expected))
        return self.inputs

    def _exchange(self, stage: str, take: Callable[..., bool], client: int, task: Arrays) -> None:
        """One client's turn, with changed requests before and changed answers around the honest one."""
        rng, peer = self.rng, self.clients[client]
        answer: Arrays | None = None
        while rng.random() < 0.4:
            asked = stage if rng.random() < 0.7 else rng.choice(STAGES)
            answer = self._asked(peer, asked, self._changed(task), ROUND if rng.random() < 0.9 else ROUND - 1) or answer
        self.sound &= answer is None
        if rng.random() < 0.05:
            return  # it drops out
        answer = self._asked(peer, stage, task, ROUND) or answer or {}
        self._answers(take, client, answer)
        self._taken(take, client, answer, answer)
        self._answers(take, client, answer)

    def _asked(self, peer: _Client, stage: str, task: Arrays, t: int) -> Arrays | None:
        self.inputs += 1
        if stage == "keys" or not peer.fits(stage, task):  # the gate and the template refuse it
            self.counts["gate"] += stage == "keys" and bool(peer.state)
            return peer.keys() if stage == "keys" and not peer.state else None
        answer = attempt(lambda: peer.answer(stage, task, t), self.counts, (stage, task))
        if answer is not None:
            peer.require_allowed(stage, task, {client: other.public for client, other in self.clients.items()})
        return answer

    def _answers(self, take: Callable[..., bool], client: int, honest: Arrays) -> None:
        while self.rng.random() < 0.25:
            name = client if self.rng.random() < 0.7 else self.rng.choice(TERMS.group)
            self._taken(take, name, self._changed(honest), honest)

    def _taken(self, take: Callable[..., bool], client: int, release: Arrays, honest: Arrays) -> None:
        self.inputs += 1
        taken = attempt(lambda: take(client, release), Counter(), (client, release))
        self.counts["accepted" if taken else "counts as none"] += 1
        if taken and "keys" in release:
            require(release["keys"].tobytes() == self.clients[client].public, "keys that their client did not sign", release)
        self.sound &= not taken or release is honest

    def _changed(self, arrays: Arrays) -> Arrays:
        """Arrays with one change: bytes, rows, shape, type, or a missing name."""
        changed, rng = dict(arrays), self.rng
        if not changed:
            return changed
        name, pick = rng.choice(sorted(changed)), rng.randrange(7)
        array = changed[name].copy()
        if pick == 0:
            del changed[name]
            return changed
        if pick == 1:
            array = array.astype(rng.choice(("<f4", "<i8", "<u1", "<u4")))
        elif pick == 2:
            array = array[:-1] if rng.random() < 0.5 else np.concatenate((array, array[-1:]))
        elif pick == 3 and array.ndim == 2:
            array = array[rng.sample(range(len(array)), len(array))]
        elif pick == 4:
            array[...] = 0
        else:
            flat = array.reshape(-1)
            flat[rng.randrange(flat.size)] ^= 1
        return {**changed, name: array}


class _Client:
    """A client without a gate: its checks and stages alone."""

    def __init__(self, client: int) -> None:
        self.client, self.state, self.public = client, dict[str, np.ndarray](), b""
        self.vector = np.frombuffer(hashlib.sha256(b"vector %d" % client).digest()[: 4 * SIZE], np.uint32)
        self.unmasked = False

    def keys(self) -> Arrays:
        release, self.state = client_stages.advertise(TERMS, ROUND, self.client, SECRETS[self.client], self._key("keys"))
        self.public = release["keys"].tobytes()
        return release

    def fits(self, stage: str, task: Arrays) -> bool:
        """Return True for tensors of the stage's names, as its template demands; types and shapes are left to the checks."""
        names = {"shares": {"keys", "present"}, "masked": {"present", "boxes"}, "survivors": {"survivors"}}
        return set(task) == names.get(stage, {"survivors", "signatures"})

    def answer(self, stage: str, task: Arrays, t: int) -> Arrays:
        me, state = self.client, self.state
        if stage == "shares":
            client_checks.check_keys(TERMS, t, me, IDENTITIES, state, **task)
            release, self.state = client_stages.share(TERMS, t, me, state, **task, key=self._key(stage))
        elif stage == "masked":
            client_checks.check_mask(TERMS, t, me, state, **task)
            release = {"masked": self.vector.copy()}
            self.state = client_stages.mask(TERMS, t, me, state, **task, context=CONTEXT, vector=release["masked"])
        elif stage == "survivors":
            client_checks.check_survivors(TERMS, t, me, state, **task)
            release, self.state = client_stages.sign_survivors(TERMS, t, me, state, task["survivors"], SECRETS[me])
        else:
            client_checks.check_unmask(TERMS, t, me, IDENTITIES, state, **task)
            self.second = state["secure second"]
            release, self.state = client_stages.unmask(TERMS, t, me, state, task["survivors"])
        return release

    def require_allowed(self, stage: str, task: Arrays, public: dict[int, bytes]) -> None:
        """Require that an answered request was one that an honest server could have sent, computed independently."""
        if stage == "shares":
            for at, row in zip(range(TERMS.n), task["keys"], strict=True):
                absent = not task["present"][at]
                require(absent or row.tobytes() == public[TERMS.group[at]], "keys that their client did not sign", task)
        if stage in ("survivors", "unmask"):
            flags = task["survivors"]
            require(flags.sum() >= TERMS.survivors_needed, "a list of survivors below the threshold", task)
            require(flags[TERMS.position(self.client)], "a list without the client that opens it", task)
        if stage == "unmask":
            require(not self.unmasked, "shares for two lists", task)
            self.unmasked = True
            signed = survivors_message(TERMS, ROUND, self.second, task["survivors"])
            valid = sum(
                row.tobytes() == keys.sign(SECRETS[client], signed)
                for client, row in zip(TERMS.witnesses, task["signatures"], strict=True)
            )
            require(valid >= TERMS.witnesses_needed, "a list that too few witnesses signed", task)

    def _key(self, stage: str) -> bytes:
        return hashlib.sha256(f"{stage} {self.client}".encode()).digest()
