"""Noise on the device of the sums: ChaCha20 bit for bit, normal numbers within their bound, the grid, one secret, fresh steps.

Everything runs on CPU tensors with the code that runs on a GPU; `gpu_checks.py` compares the bits of a GPU with these.
"""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import stats

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.privacy import box_muller, chacha20, device_noise
from dpcfl_net.privacy.device_noise import DeviceNoise
from dpcfl_net.privacy.mechanisms import GRID_BITS

torch.set_num_threads(1)

CPU, KEY = torch.device("cpu"), b"sixteen bytes ok"


@pytest.mark.parametrize("first", [0, 1, 2**31 - 3, 2**32 - 9])
def test_the_keystream_is_that_of_another_implementation(first):
    key, nonce = os.urandom(32), os.urandom(12)
    words = chacha20.blocks(key, nonce, first, 9, CPU)
    expected = Cipher(algorithms.ChaCha20(key, first.to_bytes(4, "little") + nonce), None).encryptor().update(bytes(9 * 64))
    assert words.T.contiguous().numpy().astype("<i4").tobytes() == expected


def test_the_example_of_the_standard():
    device_noise.check(CPU)
    words = chacha20.blocks(bytes(range(32)), bytes.fromhex("000000090000004a00000000"), 1, 1, CPU)
    assert [f"{int(word) & 0xFFFFFFFF:08x}" for word in words[[0, 1, 14, 15], 0]] == [
        "e4e7f110",
        "15593bd1",
        "e883d0cb",
        "4e3c50a2",
    ]


@pytest.mark.parametrize(
    ("key", "nonce", "first", "count"),
    [(bytes(16), bytes(12), 0, 1), (bytes(32), bytes(8), 0, 1), (bytes(32), bytes(12), 2**32 - 1, 2), (bytes(32), bytes(12), -1, 1)],
)  # fmt: skip
def test_sizes_that_would_repeat_a_block_are_refused(key, nonce, first, count):
    with pytest.raises(ValueError):
        chacha20.blocks(key, nonce, first, count, CPU)


def random_words(count: int) -> torch.Tensor:
    return chacha20.blocks(os.urandom(32), bytes(12), 0, count, CPU)[:15].view(5, 3, count)


def word(value: int) -> int:
    """A word of 32 bits as int32."""
    return value - 2**32 if value >= 2**31 else value


def exact(words: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The pair and r in numpy's long double, from the same words."""
    wide = np.longdouble
    a, b, c, d, e = ((row.numpy().astype(np.int64) & 0xFFFFFFFF).astype(np.uint64) for row in words)
    high, angle = (a << np.uint64(32) | b) & np.uint64(2**63 - 1), d << np.uint64(32) | e
    near = high >= np.uint64(box_muller._NEAR_ONE)
    high, c = np.where(near, high ^ np.uint64(2**63 - 1), high), np.where(near, c ^ np.uint64(2**32 - 1), c)
    value = (high.astype(wide) * wide(2) ** 32 + c.astype(wide) + wide(0.5)) * wide(2) ** -95
    r = np.sqrt(-2 * np.where(near, np.log1p(-np.where(near, value, wide(0))), np.log(np.where(near, wide(1), value))))
    quarter = np.arctan(wide(1)) * ((angle & np.uint64(2**61 - 1)).astype(wide) + wide(0.5)) * wide(2) ** -61
    sine, cosine = np.sin(quarter), np.cos(quarter)
    octant = angle >> np.uint64(61)
    exchange = octant & np.uint64(1) == 1
    signs = [1 - 2 * (octant >> np.uint64(bit) & np.uint64(1)).astype(wide) for bit in (1, 2)]
    x, y = np.where(exchange, sine, cosine), np.where(exchange, cosine, sine)
    return np.stack([signs[0] * x * r, signs[1] * y * r]), r


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="needs a long double of more bits than float64")
def test_numbers_are_within_the_stated_bound():
    ends = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, box_muller._NEAR_ONE >> 32, (box_muller._NEAR_ONE >> 32) - 1]
    edges = [
        [word(v) for v in (a, b, c, d, e)]
        for a in ends
        for b in (0, 2**32 - 1)
        for c in (0, 2**32 - 1)
        for d in ends
        for e in (0, 2**32 - 1)
    ]
    for words in (random_words(40_000), torch.tensor(edges, dtype=torch.int32).T[:, None, :]):
        found = box_muller.normals(words)
        expected, r = exact(words)
        assert bool(torch.isfinite(found).all())
        assert np.all(np.abs(found.numpy() - expected) <= 10 * 2.0**-53 * r)


def test_the_largest_number_is_finite():
    words = torch.zeros(5, 1, dtype=torch.int32)
    assert float(box_muller.normals(words)[0]) == pytest.approx(math.sqrt(2 * 96 * math.log(2)))
    words[:3] = -1
    assert 0 < float(box_muller.normals(words)[0]) < 1e-13


def test_numbers_are_independent_and_normal():
    pairs = box_muller.normals(random_words(60_000)).reshape(2, -1).numpy()
    n = pairs.size
    flat = pairs.ravel()
    assert abs(flat.mean()) < 6 / math.sqrt(n)
    assert abs(flat.std() - 1) < 6 / math.sqrt(2 * n)
    assert abs((flat**4).mean() - 3) < 6 * math.sqrt(96 / n)
    assert stats.kstest(flat, "norm").pvalue > 1e-7
    assert abs((pairs[0] * pairs[1]).mean()) < 6 / math.sqrt(n / 2)
    assert abs(((pairs[0] ** 2 - 1) * (pairs[1] ** 2 - 1)).mean()) < 6 * 2 / math.sqrt(n / 2)
    assert stats.kstest((pairs**2).sum(0) / 2, "expon").pvalue > 1e-7
    for limit in (3.0, 3.7):
        beyond = int((np.abs(flat) > limit).sum())
        assert stats.binomtest(beyond, n, 2 * stats.norm.sf(limit)).pvalue > 1e-7
    octants = np.bincount(4 * (pairs[0] < 0) + 2 * (pairs[1] < 0) + (np.abs(pairs[0]) < np.abs(pairs[1])), minlength=8)
    assert stats.chisquare(octants).pvalue > 1e-7


def test_a_wrong_deviation_would_be_seen():
    """At these sizes the statistics lie at least ten of their standard deviations beyond the limits of the test above."""
    flat = box_muller.normals(random_words(60_000)).reshape(-1).numpy()
    assert (1.02 * flat).std() - 1 > 6 / math.sqrt(2 * flat.size)
    assert stats.kstest(flat * 1.05, "norm").pvalue < 1e-7


def test_noisy_sums_are_whole_multiples_of_the_grid_around_the_sum():
    total = torch.from_numpy(np.random.default_rng(0).normal(size=50_000) * 10)
    deviation = 1.3 * 0.7
    noisy, plain = (DeviceNoise(KEY, CPU).add(each, deviation) for each in (total, torch.zeros_like(total)))
    grid = deviation * 2.0**-GRID_BITS
    steps = noisy.numpy() / grid
    assert np.abs(steps - np.rint(steps)).max() < 1e-6
    assert np.abs((noisy - plain - total).numpy()).max() <= 1.01 * grid
    noise = plain.numpy() / deviation
    assert abs(noise.std() - 1) < 6 / math.sqrt(2 * noise.size)
    assert stats.kstest(noise, "norm").pvalue > 1e-7


def test_the_same_key_repeats_and_other_keys_and_steps_do_not():
    total = torch.zeros(20_000, dtype=torch.float64)
    noise, again, other = DeviceNoise(KEY, CPU), DeviceNoise(KEY, CPU), DeviceNoise(KEY[::-1], CPU)
    draws = [noise.add(total, 1.0) for _ in range(3)]
    assert all(torch.equal(draw, again.add(total, 1.0)) for draw in draws)
    draws += [other.add(total, 1.0)]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert abs(float(a @ b)) / 20_000 < 6 / math.sqrt(20_000)


@pytest.mark.parametrize("size", [1, 5, 6, 7, 24, 1000])
def test_bits_do_not_depend_on_how_the_work_is_cut(size, monkeypatch):
    total = torch.linspace(-3, 3, size, dtype=torch.float64)
    whole = DeviceNoise(KEY, CPU).add(total, 0.5)
    monkeypatch.setattr(device_noise, "_PASS", {"cpu": 4})
    assert torch.equal(DeviceNoise(KEY, CPU).add(total, 0.5), whole)
    assert torch.equal(DeviceNoise(KEY, CPU).add(total[: size // 2], 0.5), whole[: size // 2])


@pytest.mark.parametrize("part", ["words", "numbers"])
def test_a_device_that_computes_other_bits_is_refused(part, monkeypatch):
    """A device in name only, whose operations are wrong in one bit."""
    right, numbers, wrong = chacha20.blocks, box_muller.normals, []

    def blocks(key, nonce, first, count, device):
        wrong.append(device.type == "meta")
        return right(key, nonce, first, count, CPU) ^ int(wrong[-1] and part == "words")

    monkeypatch.setattr(chacha20, "blocks", blocks)
    monkeypatch.setattr(
        box_muller, "normals", lambda words: numbers(words) * (1 + 2.0**-52 * (wrong[-1] and part == "numbers"))
    )
    with pytest.raises(RunFailed, match="other bits of noise"):
        DeviceNoise(KEY, torch.device("meta"))


def test_a_short_key_is_refused():
    with pytest.raises(ValueError, match="16 bytes"):
        DeviceNoise(b"short", CPU)
