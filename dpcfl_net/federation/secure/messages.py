"""Signed messages and derived keys of a secure sum; each is bound to its job, round and group."""

from __future__ import annotations

import numpy as np

from dpcfl_net.federation.secure.keys import Agreement, message
from dpcfl_net.federation.secure.terms import Terms
from dpcfl_net.privacy.randomness import derive


def keys_message(terms: Terms, round: int, client: int, public: bytes) -> bytes:
    """Encode the statement that a client has these public keys."""
    return message("keys", terms.job, round, terms.group_digest, client, public)


def survivors_message(terms: Terms, round: int, second: np.ndarray, survivors: np.ndarray) -> bytes:
    """Encode the statement that these clients sent boxes, and these masked vectors.

    Args:
        terms: Terms of the sum.
        round: Round of the sum.
        second: (n,) 0 or 1.
        survivors: (n,) 0 or 1.
    """
    return message("survivors", terms.job, round, terms.group_digest, _packed(second), _packed(survivors))


def box_info(terms: Terms, round: int, sender: int, receiver: int) -> bytes:
    """Encode the purpose of the key of one box."""
    return message("box", terms.job, round, terms.group_digest, sender, receiver)


def mask_key(
    terms: Terms,
    round: int,
    agreement: Agreement,
    public: bytes,
    pair: tuple[int, int],
    present: np.ndarray,
    context: bytes,
) -> bytes:
    """Derive the key of the mask of two clients, bound to the list of present clients and to the context.

    Args:
        terms: Terms of the sum.
        round: Round of the sum.
        agreement: Of the secret mask key of one of them.
        public: Public mask key of the other.
        pair: Both client ids.
        present: (n,) 0 or 1: who sent boxes.
        context: Digest of the tensors of the masked step.
    """
    low, high = sorted(pair)
    info = message("mask", terms.job, round, terms.group_digest, low, high, _packed(present), context)
    return agreement.key(public, info)


def self_mask_key(terms: Terms, round: int, client: int, seed: bytes) -> bytes:
    """Derive the key of a client's self mask from its shared seed."""
    return derive(seed, "secure aggregation", "stream of the self mask", terms.job, round, client)


def _packed(flags: np.ndarray) -> bytes:
    return np.packbits(flags.astype(bool)).tobytes()
