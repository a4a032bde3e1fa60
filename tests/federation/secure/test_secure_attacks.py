"""A server or peer that deviates: each attack is refused or learns nothing, beside the honest round as control."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from secure_round import CONTEXT, Sum

from dpcfl_net.core.errors import Refused
from dpcfl_net.federation.secure import client_checks, keys
from dpcfl_net.federation.secure.messages import keys_message, survivors_message
from dpcfl_net.federation.secure.terms import Settings, Terms


def code(call, *arguments) -> str:
    """Code of the refusal; empty if the call was accepted."""
    try:
        call(*arguments)
    except Refused as refusal:
        return refusal.code
    return ""


@pytest.fixture
def secure() -> Sum:
    return Sum(6)


def tasks_of(secure: Sum, stage: str) -> dict:
    return getattr(secure.until(stage).server, {"unmasking": "unmask"}.get(stage, stage) + "_tasks")()


def test_swapped_and_unsigned_keys_are_refused(secure):
    tasks = tasks_of(secure, "shares")
    me, other = secure.group[0], 3
    fake = np.frombuffer(keys.public_of(bytes(32)), np.uint8)
    for start in (0, 32):  # the server's own key in place of the key for boxes, or for masks
        swapped = {"keys": tasks[me]["keys"].copy(), "present": tasks[me]["present"]}
        swapped["keys"][other, start : start + 32] = fake
        assert code(secure.share, me, swapped) == "secure-signature"
    unsigned = {"keys": tasks[me]["keys"].copy(), "present": tasks[me]["present"]}
    unsigned["keys"][other, 64:] = 0
    assert code(secure.share, me, unsigned) == "secure-signature"
    exchanged = {"keys": tasks[me]["keys"][[0, 1, 3, 2, 4, 5]], "present": tasks[me]["present"]}
    assert code(secure.share, me, exchanged) == "secure-signature"
    own = {"keys": tasks[me]["keys"].copy(), "present": tasks[me]["present"]}
    own["keys"][0, :32] = fake
    assert code(secure.share, me, own) == "secure-keys"
    assert code(secure.share, me, tasks[me]) == ""


def test_keys_of_another_round_or_job_are_refused(secure):
    tasks = tasks_of(secure, "shares")
    me = secure.group[0]
    old = Sum(6, round=2)
    rows = tasks_of(old, "shares")[me]["keys"]
    replayed = {"keys": tasks[me]["keys"].copy(), "present": tasks[me]["present"]}
    replayed["keys"][1] = rows[1]
    assert code(secure.share, me, replayed) == "secure-signature"
    state = secure.states[me]
    for terms, round_ in ((secure.terms, 4), (Terms.of(secure.terms.job, secure.group[:5], Settings()), 3)):
        assert (
            code(client_checks.check_keys, terms, round_, me, secure.identities, state, *tasks[me].values()) == "secure-stage"
        )
    assert code(secure.share, me, tasks[me]) == ""


@pytest.mark.parametrize("stage", ["shares", "masked"])
def test_too_few_present_holders_are_refused(secure, stage):
    tasks = tasks_of(secure, stage)
    me, act = secure.group[0], {"shares": secure.share, "masked": secure.mask}[stage]
    for count, expected in ((3, "secure-threshold"), (4, "")):  # of 6 holders; 4 shares determine a secret
        present = np.zeros(6, np.uint8)
        present[:count] = 1
        before = secure.states[me]
        assert code(act, me, {**tasks[me], "present": present}) == expected
        secure.states[me] = before
    absent = np.ones(6, np.uint8)
    absent[0] = 0
    assert code(act, me, {**tasks[me], "present": absent}) == "secure-survivors"


def test_a_client_that_sent_no_keys_cannot_be_present_later():
    secure = Sum(6)
    secure.keys({secure.group[5]})
    secure.shares()
    me, task = next(iter(secure.server.masked_tasks().items()))
    assert code(secure.mask, me, {**task, "present": np.ones(6, np.uint8)}) == "secure-survivors"
    assert code(secure.mask, me, task) == ""


def test_split_models_give_no_sum():
    """The server sends one client another model to learn its update: the masks do not cancel."""
    other = hashlib.sha256(b"another model").digest()
    for split in (False, True):
        secure = Sum(6, context=lambda client, split=split: other if split and client == 2 else CONTEXT)
        secure.until("")
        found, rest = secure.result(), secure.expected()
        assert np.array_equal(found, rest) != split
        if split:
            assert (found == rest).sum() <= 5  # of 50 words; p < 1e-40 for uniform words


def test_split_lists_of_present_clients_give_no_sum():
    """The server hides a client from its peers in stage 3: masks are bound to the list."""
    secure = Sum(6).until("masked")
    hidden = np.ones(6, np.uint8)
    hidden[5] = 0
    for client, task in secure.server.masked_tasks().items():
        seen = task if client != secure.group[1] else {**task, "present": hidden}
        secure.server.add_masked(client, {"masked": secure.mask(client, seen)})
    tasks = secure.server.survivors_tasks()
    for client, task in tasks.items():
        if client == secure.group[1]:
            assert code(secure.sign, client, task["survivors"]) == "secure-survivors"  # one survivor was not present there
        else:
            secure.server.add_signature(client, secure.sign(client, **task))
    tasks = secure.server.unmask_tasks()
    assert code(secure.open, secure.group[1], tasks[secure.group[1]]) == "secure-survivors"
    for client in set(secure.group) - {secure.group[1]}:
        secure.server.add_shares(client, secure.open(client, tasks[client]))
    assert (secure.result() == secure.expected()).sum() <= 5


def test_masks_are_bound_to_the_list_of_present_clients(monkeypatch):
    """A client is told in stage 3 that another one, which then drops out, is absent: it leaves out the mask that both share."""
    secure = Sum(6).until("masked")
    told, gone = secure.group[1], secure.group[5]
    hidden = np.ones(6, np.uint8)
    hidden[5] = 0
    for client, task in secure.server.masked_tasks().items():
        if client != gone:
            seen = task if client != told else {**task, "present": hidden}
            secure.server.add_masked(client, {"masked": secure.mask(client, seen)})
    for client, task in secure.server.survivors_tasks().items():
        if client != told:
            secure.server.add_signature(client, secure.sign(client, **task))
    tasks = secure.server.unmask_tasks()
    for client in set(secure.group) - {told, gone}:
        secure.server.add_shares(client, secure.open(client, tasks[client]))
    real = Terms.neighbours
    monkeypatch.setattr(Terms, "neighbours", lambda terms, client: tuple(set(real(terms, client)) - {told}))  # the server knows
    assert (secure.result() == secure.expected()).sum() <= 5


def test_both_kinds_of_shares_are_never_given(secure):
    """After the shares of one list, those of another are refused, and the state holds no secret any more."""
    tasks = tasks_of(secure, "unmasking")
    me = secure.group[0]
    before = secure.states[me]
    assert code(secure.open, me, tasks[me]) == ""
    assert code(secure.open, me, tasks[me]) == "secure-stage"
    assert set(secure.states[me]) == {"secure stage", "secure group"}
    # The other kind needs a list without a survivor, and no honest witness signs a second list.
    other = tasks[me]["survivors"].copy()
    other[5] = 0
    secure.states[me] = before
    assert code(secure.open, me, {**tasks[me], "survivors": other}) == "secure-survivors"
    assert code(secure.sign, me, other) == "secure-stage"


def forged(secure: Sum, survivors: np.ndarray, signers: list[int], second: np.ndarray | None = None) -> np.ndarray:
    """Signatures of some witnesses, in the order of the terms."""
    signed = survivors_message(secure.terms, secure.round, np.ones(secure.n, np.uint8) if second is None else second, survivors)
    rows = np.zeros((len(secure.terms.witnesses), 64), np.uint8)
    for at, witness in enumerate(secure.terms.witnesses):
        if at in signers:
            rows[at] = np.frombuffer(keys.sign(secure.secrets[witness], signed), np.uint8)
    return rows


def test_lists_of_survivors_that_differ_between_clients():
    """Each witness signs one list: neither of two lists gets a majority of six."""
    secure = Sum(6).until("survivors")
    first, second = np.ones(6, np.uint8), np.array([1, 1, 1, 1, 1, 0], np.uint8)
    me = secure.group[0]
    for survivors, signers in ((first, [0, 1, 2]), (second, [3, 4, 5])):
        task = {"survivors": survivors, "signatures": forged(secure, survivors, signers)}
        assert code(secure.open, me, task) == "secure-signature"
    wrong = forged(secure, first, [0, 1, 2, 3])
    assert code(secure.open, me, {"survivors": second, "signatures": wrong}) == "secure-signature"
    elsewhere = forged(secure, first, [0, 1, 2, 3], second)
    assert code(secure.open, me, {"survivors": first, "signatures": elsewhere}) == "secure-signature"
    assert code(secure.open, me, {"survivors": first, "signatures": wrong}) == ""


def test_survivors_below_the_threshold_are_refused(secure):
    secure.until("survivors")
    me = secure.group[0]
    for count, expected in ((4, "secure-threshold"), (5, "")):  # of 6; 5 must survive
        survivors = np.zeros(6, np.uint8)
        survivors[:count] = 1
        before = secure.states[me]
        assert code(secure.sign, me, survivors) == expected
        secure.states[me] = before
        task = {"survivors": survivors, "signatures": forged(secure, survivors, [0, 1, 2, 3])}
        assert code(secure.open, me, task) == expected


def test_a_survivor_without_enough_surviving_holders_is_refused():
    """Above 64 clients the server could cut off one client by dropping its neighbours only."""
    secure = Sum(130)
    secure.until("survivors")
    terms, target = secure.terms, secure.group[7]
    lost = list(terms.neighbours(target))[: terms.holder_count - terms.share_threshold + 1]
    me = next(client for client in terms.witnesses if client not in lost and client != target)
    for dropped, expected in ((lost, "secure-threshold"), (lost[1:], "")):
        survivors = np.array([client not in dropped for client in secure.group], np.uint8)
        assert survivors.sum() >= terms.survivors_needed
        assert code(client_checks.check_survivors, terms, 3, me, secure.states[me], survivors) == expected


def test_a_malicious_box_does_not_silence_a_client():
    def tamper(kind, client, release):
        if kind == "boxes" and client == secure.group[2]:
            return {"boxes": np.full_like(release["boxes"], 7)}
        return release

    secure = Sum(20, tamper=tamper)
    secure.until("")
    with pytest.raises(Exception, match="self mask of client 8"):
        secure.result()  # none of its shares arrived; the control is the same box below the threshold of shares

    def one(kind, client, release):
        if kind == "boxes" and client == secure.group[2]:
            boxes = release["boxes"].copy()
            boxes[5] = 7
            return {"boxes": boxes}
        return release

    secure = Sum(20, tamper=one)
    secure.until("")
    assert np.array_equal(secure.result(), secure.expected())


def test_key_of_small_order_silences_nobody():
    """A peer that signs a point of small order shares its mask with everyone, and only its own."""

    def tamper(kind, client, release):
        if kind == "keys" and client == secure.group[2]:
            public = release["keys"][:32].tobytes() + bytes(32)
            signed = keys_message(secure.terms, secure.round, client, public)
            secure.states[client]["secure own"] = np.frombuffer(public, np.uint8)
            return {"keys": np.frombuffer(public + keys.sign(secure.secrets[client], signed), np.uint8)}
        return release

    secure = Sum(6, tamper=tamper)
    secure.until("survivors")
    assert secure.server.survivors == secure.group


def test_groups_that_a_client_refuses():
    for terms, expected in (
        (Terms.of("ab", (1, 2, 3), Settings()), "secure-group"),
        (Terms.of("ab", (0, 1, 2), Settings(colluders=3)), "secure-group"),
        (Terms.of("ab", tuple(range(1000)), Settings(neighbours=64, colluders=40)), "secure-group"),
        (Terms.of("ab", (0, 1, 2), Settings(colluders=2)), ""),
    ):
        assert code(client_checks.check_group, terms, 0) == expected
