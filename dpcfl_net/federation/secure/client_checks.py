"""Checks of the requests of a secure sum at a client, from public facts and the state of earlier stages."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dpcfl_net.core.errors import Refused
from dpcfl_net.federation.secure.client_state import State, check_flags, check_stage, checked_rows
from dpcfl_net.federation.secure.keys import BOX_BYTES, KEY_BYTES, KEYS_BYTES, SIGNATURE_BYTES, verify
from dpcfl_net.federation.secure.messages import keys_message, survivors_message
from dpcfl_net.federation.secure.terms import Terms, problems


def check_group(terms: Terms, client: int) -> None:
    """Refuse a group without this client, or without a safe graph.

    Raises:
        Refused: "secure-group".
    """
    if client not in terms:
        raise Refused("secure-group", f"client {client} is not in the group")
    if found := problems(terms.n, terms.settings):
        raise Refused("secure-group", found[0])


def check_keys(
    terms: Terms, round: int, client: int, identities: Mapping[int, str], state: State, keys: np.ndarray, present: np.ndarray
) -> None:
    """Refuse keys that are not signed by the roster's identities, or too few.

    Args:
        terms: Terms of the sum.
        round: Round of the sum.
        client: Client id.
        identities: Client id to public key of the identity, hex, from the signed job.
        state: State after stage 1.
        keys: (K, 128) uint8, keys of the client's holders, in their order; zeros if absent.
        present: (n,) uint8, 1 for each client of the group that sent keys.

    Raises:
        Refused: "secure-stage", "secure-threshold", "secure-keys" or "secure-signature".
    """
    check_stage(terms, round, state, (1,))
    _check_present(terms, client, present)
    for holder, row in zip(terms.holders(client), checked_rows(keys, terms.holder_count, KEYS_BYTES), strict=True):
        if not present[terms.position(holder)]:
            continue
        public, signature = row[: 2 * KEY_BYTES].tobytes(), row[2 * KEY_BYTES :].tobytes()
        if holder == client and public != state["secure own"].tobytes():
            raise Refused("secure-keys", "the keys under this client's name are not the keys that it sent")
        if not verify(identities.get(holder, ""), keys_message(terms, round, holder, public), signature):
            raise Refused("secure-signature", f"the keys of client {holder} are not signed by its identity in the roster")


def check_mask(terms: Terms, round: int, client: int, state: State, present: np.ndarray, boxes: np.ndarray) -> None:
    """Refuse to mask with too few holders, or with clients that sent no keys.

    Args:
        terms: Terms of the sum.
        round: Round of the sum.
        client: Client id.
        state: State after stage 2.
        present: (n,) uint8, 1 for each client of the group that sent boxes.
        boxes: (K, 82) uint8, boxes for this client from its holders, in their order.

    Raises:
        Refused: "secure-stage", "secure-threshold" or "secure-survivors".
    """
    check_stage(terms, round, state, (2,))
    _check_present(terms, client, present)
    if (present > state["secure first"]).any():
        raise Refused("secure-survivors", "boxes are said to come from a client that sent no keys")
    checked_rows(boxes, terms.holder_count, BOX_BYTES)


def check_survivors(terms: Terms, round: int, client: int, state: State, survivors: np.ndarray) -> None:
    """Refuse a list of survivors that is too short, without this client, or under which sums of fewer clients could be learnt.

    Args:
        terms: Terms of the sum.
        round: Round of the sum.
        client: Client id.
        state: State after stage 3.
        survivors: (n,) uint8, 1 for each client of the group whose masked vector arrived.

    Raises:
        Refused: "secure-stage", "secure-threshold" or "secure-survivors".
    """
    check_stage(terms, round, state, (3,))
    if client not in terms.witnesses:
        raise Refused("secure-stage", f"client {client} is no witness of this group")
    _check_survivors(terms, client, state, survivors)


def check_unmask(
    terms: Terms,
    round: int,
    client: int,
    identities: Mapping[int, str],
    state: State,
    survivors: np.ndarray,
    signatures: np.ndarray,
) -> None:
    """Refuse a list of survivors that `check_survivors` would refuse, or that too few witnesses signed.

    Args:
        terms: Terms of the sum.
        round: Round of the sum.
        client: Client id.
        identities: Client id to public key of the identity, hex, from the signed job.
        state: State after stage 3 or 4.
        survivors: (n,) uint8, 1 for each client of the group whose masked vector arrived.
        signatures: (W, 64) uint8, signatures of the witnesses, in their order; zeros if absent.

    Raises:
        Refused: "secure-stage", "secure-threshold", "secure-survivors" or "secure-signature".
    """
    check_stage(terms, round, state, (3, 4))
    _check_survivors(terms, client, state, survivors)
    if "secure third" in state and not np.array_equal(state["secure third"], survivors):
        raise Refused("secure-survivors", "this client has signed another list of survivors")
    signed, valid = survivors_message(terms, round, state["secure second"], survivors), 0
    for witness, row in zip(terms.witnesses, checked_rows(signatures, len(terms.witnesses), SIGNATURE_BYTES), strict=True):
        valid += bool(row.any()) and verify(identities.get(witness, ""), signed, row.tobytes())
        if valid >= terms.witnesses_needed:
            return
    raise Refused(
        "secure-signature", f"the list of survivors has {valid} valid signatures of witnesses, needs {terms.witnesses_needed}"
    )


def _check_present(terms: Terms, client: int, present: np.ndarray) -> None:
    check_flags(present, terms.n)
    if not present[terms.position(client)]:
        raise Refused("secure-survivors", "this client is not in the list, though it has answered")
    if (count := int(terms.holders_among(present)[terms.position(client)])) < terms.share_threshold:
        raise Refused(
            "secure-threshold", f"{count} holders of this client's secrets are present, needs {terms.share_threshold}"
        )


def _check_survivors(terms: Terms, client: int, state: State, survivors: np.ndarray) -> None:
    check_flags(survivors, terms.n)
    if not survivors[terms.position(client)]:
        raise Refused("secure-survivors", "this client is not in the list of survivors, though it has answered")
    if (survivors > state["secure second"]).any():
        raise Refused("secure-survivors", "a survivor was not present when this client masked its vector")
    if (count := int(survivors.sum(dtype=np.int64))) < terms.survivors_needed:
        raise Refused("secure-threshold", f"{count} of {terms.n} clients survived, needs {terms.survivors_needed}")
    # The certificate of the graph rests on this: see graph.py.
    if (terms.holders_among(survivors)[survivors > 0] < terms.share_threshold).any():
        raise Refused("secure-threshold", f"a survivor has fewer than {terms.share_threshold} surviving holders")
