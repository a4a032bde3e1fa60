"""The unmasked sum is exact under drop-outs at every stage, and aborts below the thresholds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from secure_round import STAGES, Sum

from dpcfl_net.core.tensors import CLIENT_DTYPES, describe, pack, unpack
from dpcfl_net.federation.secure.server_stages import Aborted
from dpcfl_net.federation.secure.terms import Settings


def play(secure: Sum, absent: dict[str, set[int]]) -> np.ndarray:
    gone: set[int] = set()
    for stage in STAGES:
        gone |= absent.get(stage, set())
        getattr(secure, stage)(gone)
    return secure.result()


@pytest.mark.parametrize("n", [1, 2, 3, 6, 20, 100])
def test_sum_is_exact_when_all_answer(n):
    secure = Sum(n)
    assert np.array_equal(play(secure, {}), secure.expected())
    assert secure.server.survivors == secure.group


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("n", "share"), [(20, 0.1), (20, 0.3), *(pytest.param(100, share, marks=pytest.mark.slow) for share in (0.1, 0.3))]
)
def test_sum_is_exact_when_clients_drop_out(n, share, stage):
    secure = Sum(n)
    gone = set(np.random.default_rng(n).choice(secure.group, int(n * share), replace=False).tolist())
    assert np.array_equal(play(secure, {stage: gone}), secure.expected())
    assert set(secure.server.survivors) == set(secure.group) - (gone if stage in STAGES[:3] else set())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [None, "keys", "masked", "unmasking"])
def test_sum_of_a_thousand_clients_is_exact(stage):
    secure = Sum(1000)
    gone = set(np.random.default_rng(7).choice(secure.group, 300, replace=False).tolist())
    assert np.array_equal(play(secure, {stage: gone} if stage else {}), secure.expected())


@hypothesis_settings(max_examples=30)
@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 8), st.sampled_from(STAGES)), max_size=4), st.integers(0, 2))
def test_sum_is_exact_or_aborted(n, drops, colluders):
    secure = Sum(n, settings=Settings(colluders=min(colluders, 2 * n // 3)))
    absent: dict[str, set[int]] = {}
    for at, stage in drops:
        absent.setdefault(stage, set()).add(secure.group[at % n])
    try:
        found = play(secure, absent)
    except Aborted:
        assert absent
        return
    assert len(secure.server.survivors) >= secure.terms.survivors_needed
    assert np.array_equal(found, secure.expected())


@pytest.mark.parametrize("stage", ["keys", "shares", "masked"])
def test_too_few_answers_abort_the_sum(stage):
    for gone, completes in ((6, True), (7, False)):  # of 20; 14 must answer
        secure = Sum(20)
        if completes:
            assert np.array_equal(play(secure, {stage: set(secure.group[:gone])}), secure.expected())
        else:
            with pytest.raises(Aborted, match="needs 14"):
                play(secure, {stage: set(secure.group[:gone])})


@pytest.mark.parametrize("stage", ["survivors", "unmasking"])
def test_too_few_witnesses_or_shares_abort_the_sum(stage):
    secure = Sum(20)
    assert np.array_equal(play(secure, {stage: set(secure.group[:9])}), secure.expected())  # 11 of 20 are left
    secure = Sum(20)
    with pytest.raises(Aborted):
        play(secure, {stage: set(secure.group[:10])})


def test_answers_that_count_as_none():
    def tamper(kind, client, release):
        array = next(iter(release.values()))
        broken = {2: array.astype(np.int64), 5: array[:-1], 8: None}.get(client, array)
        return {} if broken is None else {kind: broken}

    for kind in ("keys", "boxes", "masked"):
        secure = Sum(20, tamper=lambda k, c, r, kind=kind: tamper(k, c, r) if k == kind else r)
        assert np.array_equal(play(secure, {}), secure.expected())
        assert secure.server.survivors == secure.group[3:]


def test_an_answer_counts_once_and_only_if_asked():
    secure = Sum(6).until("survivors")
    before = secure.expected()
    assert not secure.server.add_masked(secure.group[0], {"masked": secure.sent[secure.group[0]]})
    assert not secure.server.add_masked(999, {"masked": secure.sent[secure.group[0]]})
    secure.survivors()
    secure.unmasking()
    assert np.array_equal(secure.result(), before)


def test_one_wrong_share_of_a_mask_key_is_found_and_two_abort():
    def wrong(liars):
        def tamper(kind, client, release):
            if kind == "shares" and client in liars:
                secret = release["shares"].copy()
                secret[secure.terms.holders(client).index(dropped), -1] ^= 1
                return {"shares": secret}
            return release

        return tamper

    for liars in (1, 2):
        secure = Sum(20)
        dropped = secure.group[4]
        secure.tamper = wrong(set(secure.group[:liars]))
        if liars == 1:
            assert np.array_equal(play(secure, {"masked": {dropped}}), secure.expected())
        else:
            with pytest.raises(Aborted, match="mask key of client 14"):
                play(secure, {"masked": {dropped}})


def test_same_task_keys_give_the_same_bytes():
    first, second = Sum(6), Sum(6)
    for secure in (first, second):
        play(secure, {"masked": {secure.group[1]}})
    assert all(np.array_equal(first.sent[client], second.sent[client]) for client in first.sent)


def test_masked_vectors_look_uniform():
    """A smoke test: bytes of masked zeros over 256 bins; chi-squared of 255 degrees of freedom exceeds 400 with p < 2e-8."""
    secure = Sum(6, size=20_000)
    secure.vectors = {client: np.zeros(secure.size, np.uint32) for client in secure.group}
    secure.until("survivors")
    for words in secure.sent.values():
        counts = np.bincount(words.view(np.uint8), minlength=256)
        expected = words.nbytes / 256
        assert ((counts - expected) ** 2 / expected).sum() < 400


def test_states_survive_the_ledger_between_stages():
    secure = Sum(6)
    for stage in STAGES:
        getattr(secure, stage)({secure.group[4]} if stage in ("masked", "survivors", "unmasking") else ())
        for client, state in secure.states.items():
            assert all(name.startswith("secure ") for name in state)
            describe(state, CLIENT_DTYPES)
            secure.states[client] = unpack(pack(state))
    assert np.array_equal(secure.result(), secure.expected())
