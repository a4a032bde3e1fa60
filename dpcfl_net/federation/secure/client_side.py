"""A client in secure sums: its group, identity, and state between the stages of a round."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from dpcfl_net.core.errors import Refused
from dpcfl_net.core.tensors import buffers
from dpcfl_net.core.types import Release, Task
from dpcfl_net.federation.capabilities import ClientSide
from dpcfl_net.federation.secure import client_checks, client_stages
from dpcfl_net.federation.secure.job_terms import Identities, terms_of
from dpcfl_net.federation.secure.stages import MASKING, STAGES
from dpcfl_net.federation.secure.terms import Terms
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.events.data_free import DataFree
from dpcfl_net.privacy.secure_sum import SumCode

PREFIX = "secure "  # of the names of this state in a client's state
State = dict[str, np.ndarray]


def context_of(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Hash what all clients of a group must have got: the tensors of a masked step besides those of the protocol.

    Args:
        tensors: Tensors of the task as they cross the wire.
    """
    hashed = hashlib.sha256()
    for buffer in buffers({name: array for name, array in tensors.items() if name not in MASKING}):
        hashed.update(buffer)
    return hashed.digest()


def split_state(state: Mapping[str, np.ndarray]) -> tuple[State, State]:
    """Split a client's state into that of secure sums and the rest.

    Args:
        state: The whole state.
    """
    own = {name: array for name, array in state.items() if name.startswith(PREFIX)}
    return own, {name: array for name, array in state.items() if name not in own}


@dataclass
class Masking:
    """The masked send of one round: encodes, adds the noise share and the masks.

    Attributes:
        code: Encoding and noise of the sum.
        state: State of the client in secure sums.
        sent: A copy of the words that `words` returned, which a step may change in place; None before.
    """

    code: SumCode
    state: State
    _terms: Terms
    _round: int
    _client: int
    _present: np.ndarray
    _boxes: np.ndarray
    _context: bytes = field(repr=False)
    sent: np.ndarray | None = None

    def words(self, vector: np.ndarray, key: bytes) -> np.ndarray:
        """Compute what is sent: the encoded vector with the client's share of the noise, under its masks.

        Args:
            vector: (d,) float64, the client's contribution.
            key: Private key of the release.

        Returns:
            (d,) uint32.
        """
        words = self.code.to_words(self.code.encode(vector), key)
        self.state = client_stages.mask(
            self._terms, self._round, self._client, self.state, self._present, self._boxes, self._context, words
        )
        self.sent = words.copy()
        return words


class SecureClient:
    """Answers the stages of secure sums for one client.

    Args:
        algorithm: The job's algorithm.
        client: Client id.
        identity: Secret key of the client's identity in the roster.
    """

    def __init__(self, algorithm: ClientSide, client: int, identity: bytes) -> None:
        self._algorithm, self._protocol, self._client, self._identity = algorithm, algorithm.protocol, client, identity
        self._identities = Identities(algorithm.protocol)

    def check(self, task: Task, state: State) -> None:
        """Refuse a message that this client must not answer; uses public facts and the state of secure sums only.

        Args:
            task: A task that fits its template.
            state: State of the client in secure sums.

        Raises:
            Refused: With the code of the rule that the message breaks.
        """
        t, i, tensors = task.round, self._client, task.tensors
        if task.kind == "secure_keys":
            self._check_group(t, tuple(tensors["group"].tolist()))
            return
        if task.kind not in STAGES and "boxes" not in tensors:
            return
        terms = self._terms(state)
        if task.kind == "secure_shares":
            client_checks.check_keys(terms, t, i, self._identities, state, tensors["keys"], tensors["present"])
        elif task.kind == "secure_survivors":
            client_checks.check_survivors(terms, t, i, state, tensors["survivors"])
        elif task.kind == "secure_unmask":
            client_checks.check_unmask(terms, t, i, self._identities, state, tensors["survivors"], tensors["signatures"])
        else:
            client_checks.check_mask(terms, t, i, state, tensors["present"], tensors["boxes"])

    def answer(self, task: Task, key: bytes, state: State) -> tuple[Release, State, list[Event]]:
        """Answer a checked stage.

        Args:
            task: A task of one of the `STAGES`.
            key: Private key of the task.
            state: State of the client in secure sums.

        Returns:
            The release, the state after it, and the event.
        """
        t, i, tensors = task.round, self._client, task.tensors
        release: dict[str, np.ndarray]
        if task.kind == "secure_keys":
            terms = terms_of(self._protocol, tuple(tensors["group"].tolist()))
            release, state = client_stages.advertise(terms, t, i, self._identity, key)
        elif task.kind == "secure_shares":
            release, state = client_stages.share(self._terms(state), t, i, state, tensors["keys"], tensors["present"], key)
        elif task.kind == "secure_survivors":
            release, state = client_stages.sign_survivors(self._terms(state), t, i, state, tensors["survivors"], self._identity)
        else:
            release, state = client_stages.unmask(self._terms(state), t, i, state, tensors["survivors"])
        return Release(**release), state, [DataFree()]

    def masking(self, task: Task, state: State) -> Masking:
        """Begin the masked send of a checked task.

        Args:
            task: A task of a step that takes `MASKING`.
            state: State of the client in secure sums.
        """
        terms, tensors = self._terms(state), task.tensors
        code = self._algorithm.secure_code(terms.n)
        assert code is not None  # checked with the group
        return Masking(code, state, terms, task.round, self._client, tensors["present"], tensors["boxes"], context_of(tensors))

    def _check_group(self, t: int, group: tuple[int, ...]) -> None:
        expected = self._algorithm.secure_group(t)
        if expected is not None and group != expected:
            raise Refused(
                "secure-group", f"the {len(group)} clients of round {t} are not the {len(expected)} that the job names for it"
            )
        ordered = all(a < b for a, b in pairwise(group))
        if not ordered or not set(group) <= set(self._identities):
            raise Refused("secure-group", "the group must list clients of the roster in order")
        client_checks.check_group(terms_of(self._protocol, group), self._client)
        if self._algorithm.secure_code(len(group)) is None:
            raise Refused("secure-group", f"this job has no secure sum of {len(group)} clients")

    def _terms(self, state: State) -> Terms:
        if "secure group" not in state:
            raise Refused("secure-stage", "this client has not sent keys for a secure sum")
        return terms_of(self._protocol, tuple(state["secure group"].tolist()))
