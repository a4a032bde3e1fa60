"""Normal numbers of a CPU: the AES keystream, the stated error against exact arithmetic, the law up to 6 deviations, one secret."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from dpcfl_net.privacy import normal_stream
from dpcfl_net.privacy.normal_stream import NormalStream
from dpcfl_net.privacy.randomness import derive

torch.set_num_threads(1)

KEY = b"sixteen bytes ok"
CHUNK = 2 * normal_stream._PAIRS


@pytest.fixture(params=["tangent", "sine and cosine"])
def way(request, monkeypatch) -> str:
    """Each way to turn radius and angle into a pair; a processor uses one of them."""
    monkeypatch.setattr(normal_stream, "_has_fast_tangent", lambda: request.param == "tangent")
    return request.param


class Written(NormalStream):
    """Numbers from given words."""

    def __init__(self, words: np.ndarray) -> None:
        self._given = words

    def _words(self, count: int) -> np.ndarray:
        taken, self._given = self._given[:count], self._given[count:]
        assert len(taken) == count
        return taken


def keystream(key: bytes, count: int) -> np.ndarray:
    """The first words, by the cipher's definition: encrypted counters."""
    cipher = Cipher(algorithms.AES(derive(key, "normal numbers", "noise")[:16]), modes.ECB()).encryptor()
    return np.frombuffer(cipher.update(b"".join(i.to_bytes(16, "big") for i in range(count // 2))), "<i8")


def exact(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pairs and r in numpy's long double."""
    wide = np.longdouble
    first, second = words.reshape(2, -1)
    value = np.abs(first.astype(wide))
    assert (value >= normal_stream._FEW).all()
    r = np.sqrt(
        -2 * np.where(value > 2.0**62, np.log1p((value - wide(2) ** 63) * wide(2) ** -63), np.log(value * wide(2) ** -63))
    )
    angle = second.astype(wide) * wide(2) ** -63 * 4 * np.arctan(wide(1))
    return np.concatenate([np.cos(angle) * r, np.sin(angle) * r]), np.concatenate([r, r])


def test_the_words_are_aes_in_counter_mode():
    words = keystream(KEY, 4096)
    assert np.array_equal(NormalStream(KEY, "noise").standard_normal(4096), Written(words).standard_normal(4096))


@pytest.mark.usefixtures("way")
@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="needs a long double of more bits than float64")
def test_numbers_are_within_the_stated_bound():
    ends = np.array([2**63 - 1, -(2**63) + 1, 2**62, -(2**62) - 1, 2**44, -(2**50), 2**63 - 2**20, 3], np.int64)
    edges = np.stack(np.meshgrid(ends[:-1], ends)).reshape(2, -1).ravel()
    drawn = np.frombuffer(os.urandom(8 * CHUNK), "<i8")
    for words in (np.where(np.abs(drawn) < normal_stream._FEW, 2**50, drawn), edges):
        found, (expected, r) = Written(words).standard_normal(len(words)), exact(words)
        error = np.abs(found - expected).astype(np.float64)
        assert np.all(error <= 2.0**-53 * (17 * r + 1 / np.maximum(r, 2.0**-27)))
        if words is not edges:
            assert math.sqrt((error**2).mean()) <= 2.0**-53 * 21.4


@pytest.mark.usefixtures("way")
def test_the_smallest_and_the_largest_uniform_number_are_finite():
    # Words below 2^44 are refined by the words after those of the angles.
    first, more = [0, 0, -1, 2**40], [0, -(2**63), 2**62, 2**62]
    found = Written(np.array([*first, 0, 0, 0, 0, *more], np.int64)).standard_normal(8)
    for number, value in zip(found, [2.0**-65, 0.5, 1.25, 2.0**40 + 0.25], strict=False):
        assert number == pytest.approx(math.sqrt(-2 * math.log(value * 2.0**-63)), rel=1e-15)
    assert np.array_equal(Written(np.array([-(2**63), 0], np.int64)).standard_normal(2), [0, 0])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("first", "refined"), [(2**44 - 1, True), (1 - 2**44, True), (2**44, False)])
def test_words_below_2_to_the_44_are_refined(first, refined):
    found = Written(np.array([first, first, 0, 0, -(2**63), 2**63 - 1], np.int64)).standard_normal(4)
    assert (found[0] != found[1]) == refined


@pytest.mark.usefixtures("way")
def test_numbers_are_normal():
    numbers = np.concatenate([NormalStream(os.urandom(32), "noise").standard_normal(400_000) for _ in range(5)])
    n = numbers.size
    assert abs(numbers.mean()) < 6 / math.sqrt(n)
    assert abs(numbers.std() - 1) < 6 / math.sqrt(2 * n)
    assert abs((numbers**4).mean() - 3) < 6 * math.sqrt(96 / n)
    assert stats.kstest(numbers, "norm").pvalue > 1e-7
    for limit in (2.0, 3.0, 4.0, 4.5):
        for beyond in (int((numbers > limit).sum()), int((numbers < -limit).sum())):
            assert stats.binomtest(beyond, n, stats.norm.sf(limit)).pvalue > 1e-8


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("bits", [16, 24, 34, 50])
def test_the_tail_is_that_of_a_gaussian(bits):
    """Given u < 2^-bits, r^2 / 2 - bits ln 2 is exponential: beyond 4.7, 5.8, 6.9 and 8.3 deviations."""
    pairs = 40_000
    rng = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
    first, angle = rng.integers(-(2 ** (63 - bits)), 2 ** (63 - bits), pairs), rng.integers(-(2**63), 2**63, pairs)
    words = [np.concatenate([a, b]) for a, b in zip(np.split(first, 4), np.split(angle, 4), strict=True)]
    more = rng.integers(-(2**63), 2**63, pairs)
    found = [Written(np.concatenate([each, more])).standard_normal(len(each)).reshape(2, -1) for each in words]
    x, y = np.concatenate(found, axis=1)
    assert stats.kstest((x**2 + y**2) / 2 - bits * math.log(2), "expon").pvalue > 1e-8
    assert stats.kstest(np.arctan2(y, x) / (2 * math.pi) + 0.5, "uniform").pvalue > 1e-8


def test_pairs_and_calls_are_independent():
    stream = NormalStream(os.urandom(32), "noise")
    calls = [stream.standard_normal(100_000) for _ in range(3)]
    halves = [part for call in calls for part in call[:CHUNK].reshape(2, -1)]
    n = len(halves[0])
    for i, a in enumerate(halves):
        for b in halves[:i]:
            assert abs((a * b).mean()) < 6.5 / math.sqrt(n)
            assert abs(((a**2 - 1) * (b**2 - 1)).mean()) < 6.5 * 2 / math.sqrt(n)
    assert abs((calls[0][1:] * calls[0][:-1]).mean()) < 6 / math.sqrt(100_000)
    assert not np.isin(calls[0], calls[1]).any()


def test_a_wrong_deviation_would_be_seen():
    assert stats.kstest(1.01 * NormalStream(KEY, "noise").standard_normal(2_000_000), "norm").pvalue < 1e-7


def test_the_same_key_and_purpose_give_the_same_numbers():
    first, same = (NormalStream(KEY, "noise") for _ in range(2))
    drawn = [first.standard_normal(count) for count in (7, 1, 3 * CHUNK + 5)]
    assert all(np.array_equal(each, same.standard_normal(len(each))) for each in drawn)
    others = [NormalStream(KEY, "other"), NormalStream(KEY + b"\0", "noise"), NormalStream(KEY[::-1], "noise")]
    assert not any(np.isin(other.standard_normal(20_000), drawn[2]).any() for other in others)
    assert first.standard_normal(0).shape == (0,)
    with pytest.raises(ValueError, match="16 bytes"):
        NormalStream(b"short", "noise")
