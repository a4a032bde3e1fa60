"""Shamir's secret sharing, masks, keys and boxes."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dpcfl_net.core.signing import signing_public
from dpcfl_net.core.tensors import CLIENT_DTYPES, finite, pack, unpack
from dpcfl_net.federation.secure import keys, masks, shamir
from dpcfl_net.federation.secure.recovery import recover_mask_key, recover_seed

KEY = hashlib.sha256(b"key").digest()


def is_prime(number: int) -> bool:
    """Miller and Rabin's test with 64 bases: a composite number passes with probability below 2^-128."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for at in range(64):
        base = int.from_bytes(hashlib.sha512(b"%d" % at).digest(), "big") % (number - 3) + 2
        value = pow(base, odd, number)
        passes = value in (1, number - 1)
        for _ in range(twos - 1):
            value = value * value % number
            passes = passes or value == number - 1
        if not passes:
            return False
    return True


def test_modulus_is_the_first_prime_above_all_secrets():
    assert is_prime(shamir.PRIME)
    assert not any(is_prime(2**256 + below) for below in range(297))


def newton(points, values, prime):
    """Independent interpolation at zero: Newton's divided differences."""
    table, total, product = list(values), 0, 1
    for at in range(len(points)):
        total = (total + table[0] * product) % prime
        product = product * -points[at] % prime
        table = [
            (high - low) * pow(points[at + 1 + row] - points[row], -1, prime) % prime
            for row, (low, high) in enumerate(pairwise(table))
        ]
    return total


@hypothesis_settings(max_examples=50)
@given(
    st.binary(min_size=32, max_size=32), st.integers(1, 12), st.sets(st.integers(1, 5000), min_size=12, max_size=20), st.data()
)
def test_any_shares_of_the_threshold_determine_the_secret(secret, threshold, points, data):
    points = sorted(points)
    shares = dict(zip(points, shamir.split(secret, threshold, points, KEY), strict=True))
    chosen = tuple(data.draw(st.permutations(points))[:threshold])
    assert shamir.combine(chosen, [shares[point] for point in chosen]) == secret
    numbers = [int.from_bytes(shares[point], "big") for point in chosen]
    assert newton(chosen, numbers, shamir.PRIME) == int.from_bytes(secret, "big")
    assert all(shamir.is_share(share) or not any(share) for share in shares.values())


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32])
def test_fewer_shares_fit_every_secret(secret):
    shares = shamir.split(secret, 3, [1, 2, 3], KEY)
    # Two shares and any secret at zero lie on one polynomial of degree 2: the third share takes another value for each.
    found = shamir.combine((1, 2), shares[:2])
    assert found != secret
    other = shamir.split(bytes(31) + b"\x01", 3, [1, 2, 3], hashlib.sha256(b"other").digest())
    assert shamir.combine((1, 2, 3), [*shares[:2], other[2]]) != secret
    assert shamir.combine((1, 2, 3), shares) == secret


def test_wrong_arguments_of_split():
    for threshold, points in ((0, [1]), (2, [1]), (1, [0]), (1, [1, 1])):
        with pytest.raises(ValueError):
            shamir.split(bytes(32), threshold, points, KEY)
    assert not shamir.is_share(bytes(33))
    assert not shamir.is_share(shamir.PRIME.to_bytes(33, "big"))
    assert shamir.is_share((shamir.PRIME - 1).to_bytes(33, "big"))


def test_recovery_leaves_out_invalid_shares():
    secret, points = hashlib.sha256(b"secret").digest(), list(range(1, 10))
    shares = list(zip(points, shamir.split(secret, 5, points, KEY), strict=True))
    invalid = [(1, bytes(33)), (2, b"\xff" * 33), (3, b"short"), *shares[3:]]
    assert recover_seed(5, invalid) == secret
    assert recover_seed(5, shares[:4]) is None
    public = keys.public_of(secret)
    assert recover_mask_key(5, [(1, shares[1][1]), *shares[1:]], public) == secret
    assert recover_mask_key(5, [(1, shares[1][1]), *shares[1:5]], public) is None  # no spare share


@pytest.mark.parametrize("size", [0, 1, 5, 40_000, 65_537])
def test_masks_cancel_and_match_plain_encryption(size):
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    words = np.arange(size, dtype="<u4")
    many = [hashlib.sha256(b"%d" % at).digest() for at in range(5)]
    masks.apply(words, many[:3], many[3:])
    expected = np.arange(size, dtype="<u4")
    for at, key in enumerate(many):
        stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update(bytes(4 * size))
        mask = np.frombuffer(stream, "<u4")
        expected = expected + mask if at < 3 else expected - mask
    assert np.array_equal(words, expected)
    masks.apply(words, many[3:], many[:3])
    assert np.array_equal(words, np.arange(size))


def test_masks_refuse_other_vectors():
    for wrong in (np.zeros(4, "i8"), np.zeros((2, 2), "<u4"), np.zeros(8, "<u4")[::2], np.frombuffer(bytes(8), "<u4")):
        with pytest.raises(ValueError):
            masks.apply(wrong, [KEY])


def test_agreement_is_symmetric_and_bound_to_its_purpose():
    secrets = [hashlib.sha256(name).digest() for name in (b"a", b"b")]
    one, two = (keys.Agreement(secret) for secret in secrets)
    publics = [keys.public_of(secret) for secret in secrets]
    assert one.key(publics[1], b"x") == two.key(publics[0], b"x") != one.key(publics[1], b"y")
    for small in (bytes(32), bytes([1]) + bytes(31)):  # points of small order
        assert len(one.key(small, b"x")) == 32


def test_boxes_open_under_their_key_only():
    box = keys.seal(KEY, bytes(66))
    assert len(box) == keys.BOX_BYTES
    assert keys.unseal(KEY, box) == bytes(66)
    assert keys.unseal(hashlib.sha256(KEY).digest(), box) is None
    assert keys.unseal(KEY, bytes(keys.BOX_BYTES)) is None


def test_messages_of_different_parts_differ():
    sequences = [("a", 1), ("a1",), ("a", "1"), ("a", b"1"), ("a", 1, ""), (b"a", 1), (1, "a")]
    assert len({keys.message("label", *parts) for parts in sequences} | {keys.message("labela", 1)}) == len(sequences) + 1


def test_signatures():
    public = signing_public(KEY)
    signature = keys.sign(KEY, b"message")
    assert keys.verify(public, b"message", signature)
    for wrong in (
        (public, b"other", signature),
        (public, b"message", bytes(64)),
        ("", b"message", signature),
        ("zz", b"", b""),
    ):
        assert not keys.verify(*wrong)


def test_words_and_bytes_are_tensors_of_clients():
    arrays = {"masked": np.array([0, 1 << 31, (1 << 32) - 1], "<u4"), "boxes": np.arange(6, dtype=np.uint8).reshape(2, 3)}
    assert {"u1", "u4"} <= CLIENT_DTYPES
    assert all(map(finite, arrays.values()))
    found = unpack(pack(arrays))
    assert all(np.array_equal(found[name], array) and found[name].dtype == array.dtype for name, array in arrays.items())
