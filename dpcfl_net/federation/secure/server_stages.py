"""Stages of a secure sum at the server: collects answers, builds the next stage's tensors, and unmasks the sum."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dpcfl_net.core.errors import DpcflError
from dpcfl_net.federation.secure import masks
from dpcfl_net.federation.secure.keys import BOX_BYTES, KEY_BYTES, KEYS_BYTES, SIGNATURE_BYTES, Agreement, verify
from dpcfl_net.federation.secure.messages import keys_message, mask_key, self_mask_key, survivors_message
from dpcfl_net.federation.secure.recovery import recover_mask_key, recover_seed
from dpcfl_net.federation.secure.shamir import SHARE_BYTES
from dpcfl_net.federation.secure.stages import MASKED_NAME
from dpcfl_net.federation.secure.terms import Terms

Arrays = Mapping[str, np.ndarray]
Tasks = dict[int, dict[str, np.ndarray]]


class Aborted(DpcflError):
    """A secure sum cannot be completed: too few clients answered, or shares do not fit."""


class ServerRound:
    """One secure sum. A malformed, unsigned, repeated or unasked answer counts as none.

    Args:
        terms: Terms of the sum.
        round: Round of the sum.
        identities: Client id to public key of the identity, hex, from the signed job.
        size: Length d of the vectors.
    """

    def __init__(self, terms: Terms, round: int, identities: Mapping[int, str], size: int) -> None:
        self.terms, self.round = terms, round
        self._identities = identities
        self._keys: dict[int, np.ndarray] = {}
        self._boxes: dict[int, np.ndarray] = {}
        self._second = np.zeros(terms.n, np.uint8)
        self._third = np.zeros(terms.n, np.uint8)
        self._signatures: dict[int, np.ndarray] = {}
        self._shares: dict[int, np.ndarray] = {}
        self._asked: frozenset[int] = frozenset(terms.group)
        self._total = np.zeros(size, "<u4")

    @property
    def survivors(self) -> tuple[int, ...]:
        """Clients whose vectors are in the sum, ascending."""
        return self._listed(self._third)

    def keys_tasks(self) -> Tasks:
        """Return the tensors of stage 1 by client."""
        return {client: {"group": np.array(self.terms.group, np.int64)} for client in self.terms.group}

    def add_keys(self, client: int, release: Arrays) -> bool:
        """Take an answer to stage 1; False if it counts as none."""
        keys = self._fitting(client, release, "keys", (KEYS_BYTES,), self._keys)
        if keys is None:
            return False
        public, signature = keys[: 2 * KEY_BYTES].tobytes(), keys[2 * KEY_BYTES :].tobytes()
        if not verify(self._identities.get(client, ""), keys_message(self.terms, self.round, client, public), signature):
            return False
        self._keys[client] = keys
        return True

    def shares_tasks(self) -> Tasks:
        """Return the tensors of stage 2 by client.

        Raises:
            Aborted: If fewer clients are left than the sum needs.
        """
        present = self._enough("keys", self._keys)
        self._asked = frozenset(self._listed(present))
        return {client: {"keys": self._rows(client, self._keys, KEYS_BYTES), "present": present} for client in self._asked}

    def add_boxes(self, client: int, release: Arrays) -> bool:
        """Take an answer to stage 2; False if it counts as none."""
        boxes = self._fitting(client, release, "boxes", (self.terms.holder_count, BOX_BYTES), self._boxes)
        if boxes is None or self._second.any():  # the stage is over
            return False
        self._boxes[client] = boxes
        return True

    def masked_tasks(self) -> Tasks:
        """Return the tensors of stage 3 by client, to which those of the algorithm are added.

        Raises:
            Aborted: If fewer clients are left than the sum needs.
        """
        self._second = self._enough("boxes", self._boxes)
        self._asked = frozenset(self._listed(self._second))
        tasks = {client: {"present": self._second, "boxes": self._boxes_for(client)} for client in self._asked}
        self._boxes = {}
        return tasks

    def add_masked(self, client: int, release: Arrays) -> bool:
        """Add an answer to stage 3 to the sum, without keeping it; False if it counts as none."""
        words = release.get(MASKED_NAME)
        if client not in self._asked or self._third[self.terms.position(client)] or words is None:
            return False
        if words.dtype != self._total.dtype or words.shape != self._total.shape:
            return False
        np.add(self._total, words, out=self._total)
        self._third[self.terms.position(client)] = 1
        return True

    def survivors_tasks(self) -> Tasks:
        """Return the tensors of stage 4 by witness.

        Raises:
            Aborted: If fewer clients are left than the sum needs.
        """
        count, holders = int(self._third.sum()), self.terms.holders_among(self._third)
        if count < self.terms.survivors_needed:
            raise Aborted(f"{count} of {self.terms.n} clients sent masked vectors, needs {self.terms.survivors_needed}")
        if (holders[self._second > 0] < self.terms.share_threshold).any():
            raise Aborted(f"a client has fewer than {self.terms.share_threshold} surviving holders of its secrets")
        self._asked = frozenset(self.survivors) & frozenset(self.terms.witnesses)
        if len(self._asked) < self.terms.witnesses_needed:
            raise Aborted(f"{len(self._asked)} witnesses are left, needs {self.terms.witnesses_needed}")
        return {client: {"survivors": self._third} for client in self._asked}

    def add_signature(self, client: int, release: Arrays) -> bool:
        """Take an answer to stage 4; False if it counts as none."""
        signature = self._fitting(client, release, "signature", (SIGNATURE_BYTES,), self._signatures)
        signed = survivors_message(self.terms, self.round, self._second, self._third)
        if signature is None or not verify(self._identities.get(client, ""), signed, signature.tobytes()):
            return False
        self._signatures[client] = signature
        return True

    def unmask_tasks(self) -> Tasks:
        """Return the tensors of stage 5 by client.

        Raises:
            Aborted: If fewer witnesses signed than clients require.
        """
        terms = self.terms
        if len(self._signatures) < terms.witnesses_needed:
            raise Aborted(f"{len(self._signatures)} witnesses signed the survivors, needs {terms.witnesses_needed}")
        none = np.zeros(SIGNATURE_BYTES, np.uint8)
        signatures = np.stack([self._signatures.get(witness, none) for witness in terms.witnesses])
        self._asked = frozenset(self.survivors)
        return {client: {"survivors": self._third, "signatures": signatures} for client in self._asked}

    def add_shares(self, client: int, release: Arrays) -> bool:
        """Take an answer to stage 5; False if it counts as none."""
        shares = self._fitting(client, release, "shares", (self.terms.holder_count, SHARE_BYTES), self._shares)
        if shares is None:
            return False
        self._shares[client] = shares
        return True

    def unmask(self, context: bytes) -> np.ndarray:
        """Remove the masks from the sum.

        Args:
            context: Digest of the tensors of the masked step, as the clients have it.

        Returns:
            (d,) uint32, the sum of the survivors' vectors modulo 2^32.

        Raises:
            Aborted: If the shares do not determine a secret.
        """
        plus: list[bytes] = []
        minus: list[bytes] = []
        for client in self._listed(self._second):
            shares = self._shares_of(client)
            if self._third[self.terms.position(client)]:
                seed = recover_seed(self.terms.share_threshold, shares)
                if seed is None:
                    raise Aborted(f"too few valid shares of the self mask of client {client}")
                minus.append(self_mask_key(self.terms, self.round, client, seed))
            else:
                public = self._keys[client][KEY_BYTES : 2 * KEY_BYTES].tobytes()
                secret = recover_mask_key(self.terms.share_threshold, shares, public)
                if secret is None:
                    raise Aborted(f"too few valid shares of the mask key of client {client}")
                self._open_masks(client, secret, context, plus, minus)
        masks.apply(self._total, plus, minus)
        return self._total

    def _open_masks(self, dropped: int, secret: bytes, context: bytes, plus: list[bytes], minus: list[bytes]) -> None:
        """Keys of the masks that survivors share with a client that dropped out; a survivor with the lower id added its mask."""
        agreement = Agreement(secret)
        for other in self.terms.neighbours(dropped):
            if self._third[self.terms.position(other)]:
                public = self._keys[other][KEY_BYTES : 2 * KEY_BYTES].tobytes()
                key = mask_key(self.terms, self.round, agreement, public, (dropped, other), self._second, context)
                (minus if other < dropped else plus).append(key)

    def _shares_of(self, client: int) -> list[tuple[int, bytes]]:
        """Points and shares of a client's secret, from those of its holders that answered."""
        terms = self.terms
        return [
            (terms.position(holder) + 1, self._shares[holder][row].tobytes())
            for holder, row in zip(terms.holders(client), terms.rows_at_holders(client), strict=True)
            if holder in self._shares
        ]

    def _fitting(
        self, client: int, release: Arrays, name: str, shape: tuple[int, ...], taken: Mapping[int, np.ndarray]
    ) -> np.ndarray | None:
        """The array of a release if the client was asked, has not answered, and the array has the declared form."""
        array = release.get(name)
        if client not in self._asked or client in taken or array is None or array.dtype != np.uint8 or array.shape != shape:
            return None
        return array

    def _enough(self, name: str, answered: Mapping[int, np.ndarray]) -> np.ndarray:
        """Flags of the clients that answered and have enough holders among each other."""
        terms = self.terms
        present = np.array([client in answered for client in terms.group], np.uint8)
        if (count := int(present.sum())) < terms.survivors_needed:
            raise Aborted(f"{count} of {terms.n} clients sent {name}, needs {terms.survivors_needed}")
        while True:
            kept = present & (terms.holders_among(present) >= terms.share_threshold)
            if (kept == present).all():
                break
            present = kept.astype(np.uint8)
        if (count := int(present.sum())) < terms.survivors_needed:
            raise Aborted(f"{count} of {terms.n} clients with enough holders sent {name}, needs {terms.survivors_needed}")
        return present

    def _listed(self, flags: np.ndarray) -> tuple[int, ...]:
        return tuple(client for client, flag in zip(self.terms.group, flags.tolist(), strict=True) if flag)

    def _rows(self, client: int, arrays: Mapping[int, np.ndarray], size: int) -> np.ndarray:
        """Rows of a client's holders that are asked in this stage; zeros for others."""
        none = np.zeros(size, np.uint8)
        return np.stack([arrays[holder] if holder in self._asked else none for holder in self.terms.holders(client)])

    def _boxes_for(self, client: int) -> np.ndarray:
        """Boxes that the client's holders made for it."""
        boxes = np.zeros((self.terms.holder_count, BOX_BYTES), np.uint8)
        theirs = zip(self.terms.holders(client), self.terms.rows_at_holders(client), strict=True)
        for row, (holder, at) in enumerate(theirs):
            if holder in self._asked and holder != client:
                boxes[row] = self._boxes[holder][at]
        return boxes
