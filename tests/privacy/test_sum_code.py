"""Codes of secure sums: norms, sensitivity, noise, and the theorem of the module."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import ndtr
from scipy.stats import chi2, kstest, norm

from dpcfl_net.privacy import secure_sum
from dpcfl_net.privacy.secure_sum import LARGEST_WORD, SumCode, rounding_divergence

FALSE_ALARM = 1e-7
KEY = bytes(range(32))


def chi_square(deviation: float) -> float:
    """chi^2 between the rounded normal and the discrete Gaussian, by direct summation."""
    k = np.arange(math.ceil(40 * deviation))
    rounded = ndtr((0.5 - k) / deviation) - ndtr((-0.5 - k) / deviation)
    weights = np.exp(-(k**2) / (2 * (deviation**2 + 1 / 12)))
    times = np.where(k == 0, 1, 2)
    exact = weights / math.fsum(times * weights)
    kept = exact > 1e-290
    return math.fsum(times[kept] * (rounded[kept] - exact[kept]) ** 2 / exact[kept])


def summed(code: SumCode, vectors: list[np.ndarray], keys: list[bytes]) -> np.ndarray:
    words = [code.to_words(code.encode(v), key) for v, key in zip(vectors, keys, strict=True)]
    return np.sum(words, axis=0, dtype=np.uint32)


@pytest.mark.parametrize("deviation", [2.0, 2.5, 3.0, 4.0])
def test_a_rounded_normal_is_as_near_the_discrete_gaussian_as_the_bound_says(deviation: float) -> None:
    assert 0 < chi_square(deviation) <= rounding_divergence(deviation)
    h = deviation**-2
    proof = h**4 / 345600 + 7.93 * (h / 3) ** 6 / (1 - h / 3)
    assert proof <= rounding_divergence(deviation) <= 1.1 * proof


@pytest.mark.parametrize("deviation", [1.0, 1.5, 2.0, 3.0, 4.0])
def test_the_distance_of_a_rounded_normal_falls_with_the_eighth_power(deviation: float) -> None:
    assert 1e-6 < chi_square(deviation) * deviation**8 < 4e-6


def test_the_series_of_the_proof() -> None:
    """G(h) up to h^5 in exact numbers, as polynomials in u, v and h."""
    c, most = Fraction(1, 12), 5
    moments = {k: Fraction(1, 2**k * (k + 1)) for k in range(0, 2 * most + 1, 2)}  # of u, uniform on [-1/2, 1/2]

    def product(a: dict[tuple[int, ...], Fraction], b: dict[tuple[int, ...], Fraction]) -> dict[tuple[int, ...], Fraction]:
        found: dict[tuple[int, ...], Fraction] = {}
        for x, y in itertools.product(a, b):
            key = tuple(i + j for i, j in zip(x, y, strict=True))
            if key[2] <= most:
                found[key] = found.get(key, Fraction(0)) + a[x] * b[y]
        return found

    exponent = {(1, 1, 1): Fraction(1)}
    for n in range(most - 1):  # kappa is c h^2 / 2 times a geometric series
        for u, v, times in ((2, 0, 1), (1, 1, 2), (0, 2, 1)):
            key = (u, v, n + 2)
            exponent[key] = exponent.get(key, Fraction(0)) - times * c / 2 * (-2 * c) ** n
    power = {(0, 0, 0): Fraction(1)}
    mean = [Fraction(n == 0) for n in range(most + 1)]
    for n in range(1, most + 1):
        power = {key: value / n for key, value in product(power, exponent).items()}
        for (u, v, h), value in power.items():
            mean[h] += value * moments.get(u, Fraction(0)) * moments.get(v, Fraction(0))
    root = [Fraction(1)]  # (1 + 2 c h)^-1/2
    for n in range(1, most + 1):
        root.append(root[-1] * (Fraction(1, 2) - n) / n * 2 * c)
    front = [root[n] + (c * root[n - 1] if n else 0) for n in range(most + 1)]
    series = [sum(front[i] * mean[n - i] for i in range(n + 1)) for n in range(most + 1)]
    assert series == [1, 0, 0, 0, Fraction(1, 345600), Fraction(-1, 1036800)]


def test_a_wrong_variance_is_far_from_the_discrete_gaussian() -> None:
    k = np.arange(-60, 61)
    rounded = ndtr((k + 0.5) / 4) - ndtr((k - 0.5) / 4)
    weights = np.exp(-(k**2) / (2 * 16.0))  # without the twelfth that rounding adds
    exact = weights / weights.sum()
    assert np.sum((rounded - exact) ** 2 / exact) > 100 * rounding_divergence(4.0)


def test_no_bound_below_the_theorem() -> None:
    with pytest.raises(ValueError, match=r"deviation is 1\.5: must be at least 2"):
        rounding_divergence(1.5)


def test_divergence_is_negligible_at_full_scale_and_total_where_noise_is_too_coarse() -> None:
    code = SumCode(d=11_200_000, participants=1000, honest=667, noise_multiplier=0.7, clip=1.0)
    assert 0 < code.divergence(100_000) < 1e-10
    assert code.divergence(2) > code.divergence(1)
    assert code.divergence(0) == 0
    coarse = SumCode(d=10, participants=1000, honest=1000, noise_multiplier=1e-5, clip=1.0)
    assert coarse.share_deviation < 2
    assert (coarse.divergence(0), coarse.divergence(1)) == (0, 1)
    assert SumCode(d=10, participants=3, honest=1, noise_multiplier=1.0, clip=1.0).divergence(1000) == 0


def test_divergence_is_the_sum_of_the_three_distances_of_the_proof() -> None:
    code, releases = SumCode(d=50, participants=300_000_000, honest=3, noise_multiplier=0.5, clip=1.0), 3
    s, m, count = code.share_deviation, 3, releases * 50
    terms = (
        math.sqrt(count * m * rounding_divergence(s) / 2),
        10 * count * m * math.exp(-((math.pi * s) ** 2)),
        math.sqrt(count * rounding_divergence(s * math.sqrt(m)) / 2),
    )
    assert min(terms) > 1e-13 * max(terms)  # each is seen
    assert code.divergence(releases) == pytest.approx(math.fsum(terms), rel=1e-14)
    assert code.divergence(10**6) == 1


def test_divergence_covers_the_summed_distances() -> None:
    code = SumCode(d=50, participants=20_000_000, honest=16, noise_multiplier=0.3, clip=1.0)
    s = code.share_deviation
    assert 2 < s < 20
    exact = math.sqrt(3 * 50 * 16 * chi_square(s) / 2)
    assert exact < code.divergence(3) < 1


@settings(max_examples=300)
@given(
    arrays(np.float64, st.integers(1, 40), elements=st.floats(-1e6, 1e6)),
    st.floats(1e-6, 1e6),
    st.integers(1, 100_000),
    st.floats(0.01, 50),
)
def test_the_integer_norm_never_exceeds_the_scale(vector: np.ndarray, clip: float, n: int, z: float) -> None:
    code = SumCode(d=len(vector), participants=n, honest=n, noise_multiplier=z, clip=clip)
    for sent in (vector, vector.astype(np.float32)):
        found = code.encode(sent)
        assert sum(int(k) ** 2 for k in found) <= code.scale**2
        assert code.sensitivity == code.scale


@pytest.mark.parametrize("d", [1, 2, 25, 10_000])
@pytest.mark.parametrize("clip", [0.1, 0.3, 1.0, 7e-5])
def test_vectors_on_the_sphere_stay_inside(d: int, clip: float) -> None:
    code = SumCode(d=d, participants=7, honest=5, noise_multiplier=1.0, clip=clip)
    random = np.random.default_rng(d).standard_normal(d)
    for direction in (np.ones(d), np.eye(1, d)[0], random, np.where(np.arange(d) % 2, 3.0, -4.0)):
        vector = clip * direction / np.linalg.norm(direction)
        for stretched in (vector, np.nextafter(vector, np.inf), 1e9 * vector):
            norm_of = math.sqrt(sum(int(k) ** 2 for k in code.encode(stretched)))
            assert code.scale * (1 - 1e-8) - math.sqrt(d) <= norm_of <= code.scale


@pytest.mark.parametrize("off", [0.0, 1 - 5e-6])
def test_the_integer_norm_does_not_depend_on_that_of_the_vector_in_float(off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact check of the whole numbers holds where the norm in float is too small."""
    code = SumCode(d=3, participants=3, honest=3, noise_multiplier=1.0, clip=1.0)
    exact = secure_sum._norm
    monkeypatch.setattr(secure_sum, "_norm", lambda vector: off * exact(vector))
    for vector in ([1 + 4e-6, 0.0, 0.0], [-0.6, 0.0, 0.8 + 4e-6]):
        norm_of = math.sqrt(sum(int(k) ** 2 for k in code.encode(np.array(vector))))
        assert code.scale * (1 - 2e-6) < norm_of <= code.scale


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.integers(1, 200), st.floats(1e-3, 1e3), st.integers(1, 50))
def test_one_record_moves_a_rounded_sum_by_at_most_the_sensitivity(seed: int, d: int, clip: float, batch: int) -> None:
    random = np.random.default_rng(seed)
    code = SumCode(d=d, participants=5, honest=4, noise_multiplier=1.0, clip=clip, largest=100.0, rounded=True)
    records = random.standard_normal((batch, d)) * random.choice([1e-9, 1e-3, 1.0])
    records *= clip / np.maximum(np.linalg.norm(records, axis=1, keepdims=True), clip)
    taken = random.standard_normal(d)
    taken *= clip / np.linalg.norm(taken)
    one, other = code.encode(records.sum(0) + taken), code.encode(records.sum(0))
    assert math.sqrt(sum((int(a) - int(b)) ** 2 for a, b in zip(one, other, strict=True))) <= code.sensitivity


def test_rounding_can_use_its_part_of_the_sensitivity() -> None:
    code = SumCode(d=10_000, participants=5, honest=4, noise_multiplier=1.0, clip=1.0, largest=10.0, rounded=True)
    half = np.full(code.d, 0.4999 / code.scale)
    moved = code.encode(half + 0.0002 / code.scale).astype(np.int64) - code.encode(half)
    assert np.linalg.norm(moved) == math.sqrt(code.d) <= code.sensitivity - code.scale <= (1 + 2.0**-19) * math.sqrt(code.d)


@pytest.mark.parametrize("rounded", [False, True])
def test_a_sum_comes_back_within_rounding_and_noise(rounded: bool) -> None:
    n, d, clip = 6, 3000, 0.5
    code = SumCode(d, n, 4, 1e-3, clip, largest=20.0 if rounded else 1.0, rounded=rounded)
    vectors = [np.random.default_rng(k).standard_normal(d).astype(np.float32) for k in range(n)]
    vectors = [(v * (0.9 * clip / np.linalg.norm(v))).astype(np.float32) for v in vectors]
    found = code.decode(summed(code, vectors, [bytes([k] * 32) for k in range(n)]))
    assert found.dtype == np.float64
    unit = clip / code.scale
    off = np.abs(found - np.sum(vectors, axis=0, dtype=np.float64))
    assert off.max() <= unit * (n + 9 * code.share_deviation * math.sqrt(n))
    exact = np.sum([code.encode(v) for v in vectors], axis=0)
    noise = np.sum([code.noise_share(bytes([k] * 32)) for k in range(n)], axis=0)
    np.testing.assert_array_equal(found, (exact + noise) * unit)


def test_the_sum_of_shares_has_the_promised_noise() -> None:
    n, m, d, z = 8, 6, 40_000, 0.8
    code = SumCode(d=d, participants=n, honest=m, noise_multiplier=z, clip=1.0)
    total = np.sum([code.noise_share(bytes([k] * 16)) for k in range(m)], axis=0)
    deviation = math.sqrt(m * (code.share_deviation**2 + 1 / 12))
    assert deviation >= z * code.sensitivity
    assert kstest(total, norm(scale=deviation).cdf).pvalue > FALSE_ALARM
    low, high = chi2.ppf([FALSE_ALARM, 1 - FALSE_ALARM], d)
    assert low < np.sum((total / deviation) ** 2) < high
    assert not low < np.sum((total / (0.9 * deviation)) ** 2) < high  # the test sees a tenth


def test_small_noise_has_the_rounded_law() -> None:
    code = SumCode(d=200_000, participants=40_000_000, honest=64, noise_multiplier=0.5, clip=1.0)
    s = code.share_deviation
    share = code.noise_share(KEY)
    assert 2 < s < 6
    k = np.arange(-math.ceil(3 * s), math.ceil(3 * s) + 1)
    expected = code.d * (ndtr((k + 0.5) / s) - ndtr((k - 0.5) / s))
    counts = np.array([np.sum(share == value) for value in k])
    assert np.sum((counts - expected) ** 2 / expected) < chi2.ppf(1 - FALSE_ALARM, len(k))


def test_shares_follow_from_the_key_only() -> None:
    code = SumCode(d=2**20 + 3, participants=3, honest=3, noise_multiplier=1.0, clip=1.0)
    first, again, other = code.noise_share(KEY), code.noise_share(KEY), code.noise_share(KEY[::-1])
    np.testing.assert_array_equal(first, again)
    assert np.mean(first == other) < 1e-3
    assert abs(np.corrcoef(first, other)[0, 1]) < 6 / math.sqrt(code.d)
    zeros = np.zeros(code.d, np.int32)
    np.testing.assert_array_equal(code.to_words(zeros, KEY).view(np.int32), first)


def test_a_sum_beyond_the_modulus_wraps_and_stays_the_same_function_of_noisy_integers() -> None:
    code = SumCode(d=4, participants=1, honest=1, noise_multiplier=1.0, clip=1.0, largest=1.0, rounded=True)
    vector = np.array([1e300, -50.0, 0.1, 0.0])  # far beyond `largest`
    encoded = code.encode(vector)
    assert encoded.tolist()[:2] == [LARGEST_WORD, -LARGEST_WORD]
    exact = encoded.astype(np.int64) + code.noise_share(KEY)
    np.testing.assert_array_equal(code.to_words(encoded, KEY), exact % 2**32)


def test_the_worst_case_fits() -> None:
    for rounded, largest in ((False, 1.0), (True, 1.0), (True, 57.3)):
        for n, m, z in ((1, 1, 1.0), (6, 4, 2.5), *((n, n, 1.0) for n in range(10, 20)), (100_000, 66_667, 0.7)):
            code = SumCode(1000, n, m, z, 1.0, largest=largest, rounded=rounded)
            deviation = math.sqrt(n) * code.share_deviation
            rounding = 0.5 if rounded else 0
            assert n * (largest * code.scale + rounding) + 6 * deviation <= LARGEST_WORD
            bigger = code.scale + 1
            more = z * (bigger + code.sensitivity - code.scale) * math.sqrt(n / m)
            assert n * (largest * bigger + rounding) + 6 * more > LARGEST_WORD


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rounded", [False, True])
def test_values_that_are_not_finite_give_zeros(bad: float, rounded: bool) -> None:
    code = SumCode(d=3, participants=2, honest=2, noise_multiplier=1.0, clip=1.0, rounded=rounded)
    assert not code.encode(np.array([0.5, bad, 0.1])).any()


def test_a_norm_that_is_not_finite_gives_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite squares of several blocks that add up to infinity ended the client with an OverflowError."""
    code = SumCode(d=4, participants=2, honest=2, noise_multiplier=1.0, clip=1.0)
    monkeypatch.setattr(secure_sum, "_BLOCK", 2)
    for vector in ([9e153] * 4, [1e200, 0.0, 0.0, 0.0]):
        assert not code.encode(np.array(vector)).any()
    assert code.encode(np.array([0.0, 0.0, 3.0, 4.0])).tolist() == pytest.approx([0, 0, 0.6 * code.scale, 0.8 * code.scale])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"d": 0}, "d is 0: must be at least 1"),
        ({"participants": 0}, "participants is 0"),
        ({"honest": 4}, r"honest is 4: must be 1 to 3 \(participants\)"),
        ({"honest": 0}, "honest is 0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier is nan: must be finite and above 0"),
        ({"clip": 0.0}, "clip is 0.0"),
        ({"largest": 2.0}, "largest is 2.0: must be 1 for a clipped vector"),
        ({"noise_multiplier": 1e9}, "does not fit into 32 bits"),
        ({"participants": 2**31, "honest": 1}, "does not fit into 32 bits"),
    ],
)
def test_impossible_parameters_are_refused(wrong: dict[str, float], message: str) -> None:
    fields = {"d": 10, "participants": 3, "honest": 2, "noise_multiplier": 1.0, "clip": 1.0}
    with pytest.raises(ValueError, match=message):
        SumCode(**{**fields, **wrong})  # type: ignore[arg-type]


def test_a_vector_of_another_shape_is_refused() -> None:
    code = SumCode(d=3, participants=2, honest=2, noise_multiplier=1.0, clip=1.0)
    with pytest.raises(ValueError, match=r"vector\.shape is \(4,\): must be \(3,\)"):
        code.encode(np.zeros(4))
