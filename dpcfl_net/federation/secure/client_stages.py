"""Stages of a secure sum at a client, as pure functions: keys, shares, masks, survivors, unmasking.

Each acts on a request that its check in `client_checks.py` has accepted. The state holds arrays whose names start with "secure ";
all of it is returned. All randomness derives from the task's key.
"""

from __future__ import annotations

import numpy as np

from dpcfl_net.federation.secure import masks, shamir
from dpcfl_net.federation.secure.client_state import Arrays, State, begun, check_stage
from dpcfl_net.federation.secure.keys import BOX_BYTES, KEY_BYTES, Agreement, public_of, seal, sign, unseal
from dpcfl_net.federation.secure.messages import box_info, keys_message, mask_key, self_mask_key, survivors_message
from dpcfl_net.federation.secure.terms import Terms
from dpcfl_net.privacy.randomness import derive


def advertise(terms: Terms, round: int, client: int, identity: bytes, key: bytes) -> tuple[Arrays, State]:
    """Stage 1: draw the keys of a round.

    Args:
        terms: Terms of the sum, checked by `client_checks.check_group`.
        round: Round of the sum.
        client: Client id.
        identity: Secret key of the client's identity.
        key: Private key of the task.

    Returns:
        {"keys": (128,) uint8}: public keys for boxes and for masks, and their signature; and the state.
    """
    secrets = [derive(key, "secure aggregation", name, round) for name in ("box key", "mask key")]
    public = b"".join(map(public_of, secrets))
    keys = public + sign(identity, keys_message(terms, round, client, public))
    state = begun(terms, round) | {"secure secrets": _bytes(b"".join(secrets)), "secure own": _bytes(public)}
    return {"keys": _bytes(keys)}, state


def share(
    terms: Terms, round: int, client: int, state: State, keys: np.ndarray, present: np.ndarray, key: bytes
) -> tuple[Arrays, State]:
    """Stage 2: share the seed of the self mask and the secret mask key among the holders.

    Args:
        terms: Terms of the sum.
        round: Round of the sum.
        client: Client id.
        state: State after stage 1.
        keys: As checked by `client_checks.check_keys`.
        present: As checked by `client_checks.check_keys`.
        key: Private key of the task.

    Returns:
        {"boxes": (K, 82) uint8}: a box for each holder, zeros for the client and for absent ones; and the state.
    """
    check_stage(terms, round, state, (1,))
    holders = terms.holders(client)
    points = [terms.position(holder) + 1 for holder in holders]
    box_secret, mask_secret = _secrets(state)
    seed = derive(key, "secure aggregation", "self mask", round)
    shares = [
        shamir.split(secret, terms.share_threshold, points, derive(key, "secure aggregation", name, round))
        for secret, name in ((seed, "shares of the self mask"), (mask_secret, "shares of the mask key"))
    ]
    agreement, boxes = Agreement(box_secret), np.zeros((len(holders), BOX_BYTES), np.uint8)
    kept = np.zeros((len(holders), 2 * KEY_BYTES), np.uint8)
    for row, holder in enumerate(holders):
        if not present[terms.position(holder)]:
            continue
        kept[row] = keys[row, : 2 * KEY_BYTES]
        if holder != client:
            sealing = agreement.key(kept[row, :KEY_BYTES].tobytes(), box_info(terms, round, client, holder))
            boxes[row] = _bytes(seal(sealing, shares[0][row] + shares[1][row]))
    own = shares[0][holders.index(client)]
    after = {
        "secure secrets": state["secure secrets"],
        "secure keys": kept,
        "secure first": present.astype(np.uint8),
        "secure seed": _bytes(seed),
        "secure share": _bytes(own),
    }
    return {"boxes": boxes}, begun(terms, round, 2) | after


def mask(
    terms: Terms,
    round: int,
    client: int,
    state: State,
    present: np.ndarray,
    boxes: np.ndarray,
    context: bytes,
    vector: np.ndarray,
) -> State:
    """Stage 3: add the masks to a vector in place.

    Masks are bound to the list of present clients and to the context: clients that were told different ones have masks that do not
    cancel.

    Args:
        terms: Terms of the sum.
        round: Round of the sum.
        client: Client id.
        state: State after stage 2.
        present: As checked by `client_checks.check_mask`.
        boxes: As checked by `client_checks.check_mask`.
        context: Digest of the step's other tensors, such as the model.
        vector: (d,) uint32, changed in place.

    Returns:
        The state.
    """
    check_stage(terms, round, state, (2,))
    agreement = Agreement(_secrets(state)[1])
    plus, minus = [self_mask_key(terms, round, client, state["secure seed"].tobytes())], list[bytes]()
    for row, holder in enumerate(terms.holders(client)):
        if holder != client and present[terms.position(holder)]:
            public = state["secure keys"][row, KEY_BYTES:].tobytes()
            (plus if client < holder else minus).append(
                mask_key(terms, round, agreement, public, (client, holder), present, context)
            )
    masks.apply(vector, plus, minus)
    names = ("secure secrets", "secure keys", "secure share")
    kept = {name: state[name] for name in names}
    return begun(terms, round, 3) | kept | {"secure second": present.astype(np.uint8), "secure boxes": boxes.astype(np.uint8)}


def sign_survivors(
    terms: Terms, round: int, client: int, state: State, survivors: np.ndarray, identity: bytes
) -> tuple[Arrays, State]:
    """Stage 4, witnesses only: sign the list of survivors.

    Args:
        terms: Terms of the sum.
        round: Round of the sum.
        client: Client id.
        state: State after stage 3.
        survivors: As checked by `client_checks.check_survivors`.
        identity: Secret key of the client's identity.

    Returns:
        {"signature": (64,) uint8}, and the state.
    """
    check_stage(terms, round, state, (3,))
    signature = sign(identity, survivors_message(terms, round, state["secure second"], survivors))
    return {"signature": _bytes(signature)}, {**state, **begun(terms, round, 4), "secure third": survivors.astype(np.uint8)}


def unmask(terms: Terms, round: int, client: int, state: State, survivors: np.ndarray) -> tuple[Arrays, State]:
    """Stage 5: give one share for each client: of its self mask if it survived, else of its mask key.

    Args:
        terms: Terms of the sum.
        round: Round of the sum.
        client: Client id.
        state: State after stage 3 or 4.
        survivors: As checked by `client_checks.check_unmask`.

    Returns:
        {"shares": (K, 33) uint8}, zeros where there is no share; and the state, which holds no secret any more.
    """
    check_stage(terms, round, state, (3, 4))
    agreement, second = Agreement(_secrets(state)[0]), state["secure second"]
    shares = np.zeros((terms.holder_count, shamir.SHARE_BYTES), np.uint8)
    for row, owner in enumerate(terms.holders(client)):
        at = terms.position(owner)
        if owner == client:
            shares[row] = state["secure share"]
        elif second[at]:
            opening = agreement.key(state["secure keys"][row, :KEY_BYTES].tobytes(), box_info(terms, round, owner, client))
            plain = unseal(opening, state["secure boxes"][row].tobytes())
            if plain is not None:  # a malicious peer must not silence this client
                part = plain[: shamir.SHARE_BYTES] if survivors[at] else plain[shamir.SHARE_BYTES :]
                shares[row] = _bytes(part)
    return {"shares": shares}, begun(terms, round, 5)


def _secrets(state: State) -> tuple[bytes, bytes]:
    both = state["secure secrets"].tobytes()
    return both[:KEY_BYTES], both[KEY_BYTES:]


def _bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)
