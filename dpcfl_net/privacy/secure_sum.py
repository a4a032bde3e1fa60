"""Integer codes of a secure sum: encoding of vectors as 32-bit words, shares of the noise, and their privacy.

Each of n participants sends its encoded vector plus a share of the noise, masked modulo 2^32. The server learns the sum of the
survivors' words. Of the shares in that sum, m are of honest participants, who keep them secret.

Encoding: a vector times S / clip, as whole numbers. S is the largest whole number for which the worst case fits into 32 bits:
n (largest S + r) + 6 D <= 2^31 - 1, with r = 1/2 if values are rounded and 0 if truncated, and D the deviation of n shares. A sum
beyond this range wraps around: that costs utility, never privacy, since the reduction comes after the noise.
Truncated: the vector is clipped to norm `clip` first; the whole numbers have norm at most S, which is checked exactly. The
sensitivity under zero-out is S. Rounded: the vector is a sum of records' vectors of norm `clip`. Taking one record out moves the
exact values by norm S and each rounding by at most 1/2, so the sensitivity is S + (1 + 2^-20) sqrt(d); 2^-20 covers the product in
float64. Values are limited to 2^31 - 1 first, which moves no two values apart.
A share is rint(N(0, s^2)) in each coordinate, with s = z * sensitivity / sqrt(m).

Theorem. Let s >= 2. Up to a total variation eta (`SumCode.divergence`), all R releases together are post-processings of R Gaussian
mechanisms of noise multiplier at least z, so that the events SampledGaussian(z, rate, 1) give a valid epsilon at delta -
(1 + e^epsilon) eta.

Proof. Let P_s be the law of rint(N(0, s^2)) and N_Z(V) the discrete Gaussian, with weights exp(-k^2 / (2 V)).

(1) chi^2(P_s, N_Z(s^2 + c)) <= b(s) = (2.9e-6 + 0.012 s^-4) s^-8 with c = 1/12. Write P_s(k) as the mean over u in
[-1/2, 1/2] of the normal density at k + u, and sum P_s(k)^2 / N_Z(k) over k by Poisson's summation formula. With h = 1 / s^2,

    chi^2 + 1 <= L G(h),  G(h) = (1 + c h) (1 + 2 c h)^-1/2 E exp(h u v - kappa (u + v)^2),  kappa = c h^2 / (2 (1 + 2 c h)),

u and v independent and uniform on [-1/2, 1/2]. L - 1 is less than 5 exp(-1.9 pi^2 s^2), below 10^-28 s^-8: the other terms of the
formula. From the moments of u, G(h) = 1 + h^4 / 345600 - h^5 / 1036800 + ... (the terms below h^4 cancel since variances agree). G
is analytic for |h| < 6. For |h| = 3, |1 + 2 c h| >= 1/2 and |kappa| <= 3/4, so |G| <= 1.25 sqrt(2) exp(3/4 + 3/4) < 7.93. By Cauchy's
estimates the terms from h^6 on are at most 7.93 (h/3)^6 / (1 - h/3), less than 0.0119 h^6 for h <= 1/4.

(2) The sum of m independent N_Z(V) and N_Z(m V) differ in log-probability by at most 10 sum over k < m of
exp(-2 pi^2 V k / (k + 1)) (Kairouz, Liu, Steinke 2021, Theorem 9), at most 10 m exp(-pi^2 V).

(3) With V = m (s^2 + c), N_Z(V) is near P_t, t^2 = V - c, by (1). t^2 >= m s^2 = (z * sensitivity)^2.

The noise is independent of the data, and a run's view is a function of data and noise. So the total variation of the views is at most
that of the noise in all R d coordinates. KL divergence is at most chi^2, adds over independent coordinates and shares, and does not
grow under sums; total variation is at most sqrt(KL / 2) (Pinsker). Steps (1), (2) and (3) give

    eta <= sqrt(R d m b(s) / 2) + 10 R d m exp(-pi^2 s^2) + sqrt(R d b(sqrt(m) s) / 2),

and eta = 0 for m = 1, whose noise is P_s with s = z * sensitivity. With noise P_t, a whole number plus rint(N(0, t^2)) equals rint of
the whole number plus N(0, t^2): the Gaussian mechanism on whole numbers, then rounding. Shares beyond the m, colluders' shares and
the reduction modulo 2^32 are post-processing. If views are within eta in total variation of views that satisfy (epsilon, delta'), they
satisfy (epsilon, delta' + (1 + e^epsilon) eta). Which participants survive must not depend on the shares: the masks hide these.

A normal number is off by the error of `normal_stream`, as in `mechanisms.gaussian_on_grid`.

The modulus leaves room for the worst case, so the vectors need no rotation, which spreads large coordinates where words are short.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dpcfl_net.privacy.normal_stream import NormalStream

LARGEST_WORD = 2**31 - 1
HEADROOM = 6  # deviations of the noise that fit beside the worst case
LEAST_DEVIATION = 2.0  # of a share, for the theorem
_PRODUCT_ERROR = 2.0**-20  # of two values below 2^31 that are scaled in float64
_BLOCK = 2**20  # coordinates of one pass


@dataclass(frozen=True)
class SumCode:
    """Code of one secure sum.

    Attributes:
        d: Number of coordinates.
        participants: Number n of participants.
        honest: Number m of shares in the sum that are of honest participants; the noise of m shares is counted.
        noise_multiplier: z, noise deviation over sensitivity of the sum with m shares.
        clip: Largest norm of one protected unit's vector.
        largest: Largest norm of a participant's vector over clip: 1 if the participant is the unit.
        rounded: True if a record is the protected unit; values are rounded. False if the participant is; its vector is clipped
            and values are truncated.

    Raises:
        ValueError: If a field is out of range, or the sum does not fit into 32 bits.
    """

    d: int
    participants: int
    honest: int
    noise_multiplier: float
    clip: float
    largest: float = 1.0
    rounded: bool = False

    def __post_init__(self) -> None:
        _check("d", self.d, self.d >= 1, "at least 1")
        _check("participants", self.participants, self.participants >= 1, "at least 1")
        _check("honest", self.honest, 1 <= self.honest <= self.participants, f"1 to {self.participants} (participants)")
        for name in ("noise_multiplier", "clip", "largest"):
            value = getattr(self, name)
            _check(name, value, math.isfinite(value) and value > 0, "finite and above 0")
        _check("largest", self.largest, self.rounded or self.largest == 1, "1 for a clipped vector")
        if self.scale < 1:
            raise ValueError(
                f"the sum of {self.participants} vectors of norm {self.largest:g} clip with noise multiplier {self.noise_multiplier:g} "
                f"does not fit into 32 bits: fewer participants, less noise or fewer than {self.d} coordinates are needed"
            )

    @cached_property
    def scale(self) -> int:
        """S, whole units per clip norm; below 1 if nothing fits."""
        spread = HEADROOM * self.noise_multiplier * math.sqrt(self.participants / self.honest)  # of n shares, per sensitivity
        fixed = self._rounding * spread + (0.5 * self.participants if self.rounded else 0.0)
        return math.floor((LARGEST_WORD - fixed) / (self.participants * self.largest + spread))

    @property
    def sensitivity(self) -> float:
        """Largest change of the encoded vector by one protected unit under zero-out, L2, in whole units."""
        return self.scale + self._rounding

    @property
    def share_deviation(self) -> float:
        """s, deviation of the noise of one share before it is rounded, in whole units."""
        return self.noise_multiplier * self.sensitivity / math.sqrt(self.honest)

    @property
    def _rounding(self) -> float:
        return (1 + _PRODUCT_ERROR) * math.sqrt(self.d) if self.rounded else 0.0

    def divergence(self, releases: int) -> float:
        """Bound the total variation eta between sums of this code and Gaussian mechanisms of noise multiplier z.

        Args:
            releases: Number R of sums in a run.

        Returns:
            eta of all releases together, at most 1; delta pays (1 + e^epsilon) eta.
        """
        s, m, count = self.share_deviation, self.honest, releases * self.d
        if s < LEAST_DEVIATION:
            return 1.0 if count else 0.0
        if m == 1:
            return 0.0
        shares = math.sqrt(count * m * rounding_divergence(s) / 2)
        gap = 10 * count * m * math.exp(-(math.pi**2) * s**2)
        return min(1.0, shares + gap + math.sqrt(count * rounding_divergence(math.sqrt(m) * s) / 2))

    def encode(self, vector: np.ndarray) -> np.ndarray:
        """Encode a participant's vector, without noise.

        Args:
            vector: (d,) float64 or float32. If `rounded`, a sum of records' vectors of norm at most clip; else it is clipped here.

        Returns:
            (d,) int32. Unless `rounded`, the norm is at most S. Zeros if a value is not finite, and unless `rounded` also if the norm
            overflows in float64.

        Raises:
            ValueError: If the shape differs.
        """
        _check("vector.shape", vector.shape, vector.shape == (self.d,), f"({self.d},)")
        factor = self.scale / self.clip
        if self.rounded and np.isfinite(vector).all():
            return self._whole(vector, factor, np.rint)
        norm = _norm(vector)
        if not math.isfinite(norm):
            return np.zeros(self.d, np.int32)
        if norm > self.clip * (1 - 1e-9):  # as `mechanisms.shortened`
            factor *= self.clip * (1 - 1e-9) / norm
        found = self._whole(vector, factor, np.trunc)
        while _squares(found) > self.scale**2:  # rounding of the norm and of the products
            factor *= 1 - 1e-6
            found = self._whole(vector, factor, np.trunc)
        return found

    def noise_share(self, key: bytes) -> np.ndarray:
        """Draw one participant's share of the noise.

        Args:
            key: Secret of the task; the same key gives the same share.

        Returns:
            (d,) int64.
        """
        return np.concatenate([*self._noise(key)])

    def to_words(self, encoded: np.ndarray, key: bytes) -> np.ndarray:
        """Add a share of the noise to an encoded vector, modulo 2^32.

        Args:
            encoded: (d,) int32, from `encode`.
            key: Secret of the task, from which the share is drawn.

        Returns:
            (d,) uint32.
        """
        words = np.empty(self.d, np.uint32)
        for start, share in zip(range(0, self.d, _BLOCK), self._noise(key), strict=True):
            words[start : start + _BLOCK] = (share + encoded[start : start + _BLOCK]).astype(np.uint32)
        return words

    def decode(self, words: np.ndarray) -> np.ndarray:
        """Decode a sum of words.

        Args:
            words: (d,) uint32, the sum modulo 2^32.

        Returns:
            (d,) float64: the noisy sum of the vectors.
        """
        return words.view(np.int32) * (self.clip / self.scale)

    def _whole(self, vector: np.ndarray, factor: float, to_whole: np.ufunc) -> np.ndarray:
        """Whole numbers (d,) int32 of the scaled vector, limited to the range of a word."""
        found = np.empty(self.d, np.int32)
        for start in range(0, self.d, _BLOCK):
            block = vector[start : start + _BLOCK].astype(np.float64)
            with np.errstate(over="ignore"):  # infinity is limited too
                block *= factor
            np.clip(block, -LARGEST_WORD, LARGEST_WORD, out=block)
            found[start : start + _BLOCK] = to_whole(block)
        return found

    def _noise(self, key: bytes) -> Iterator[np.ndarray]:
        """The share in blocks, int64."""
        normal, deviation = NormalStream(key, "secure sum"), self.share_deviation
        for start in range(0, self.d, _BLOCK):
            block = normal.standard_normal(min(_BLOCK, self.d - start))
            block *= deviation
            yield np.rint(block).astype(np.int64)


def rounding_divergence(deviation: float) -> float:
    """Bound chi^2 between rint(N(0, s^2)) and the discrete Gaussian of variance parameter s^2 + 1/12.

    Args:
        deviation: s, at least 2.

    Raises:
        ValueError: If the deviation is smaller.
    """
    _check("deviation", deviation, deviation >= LEAST_DEVIATION, f"at least {LEAST_DEVIATION:g}")
    return (2.9e-6 + 0.012 * deviation**-4.0) * deviation**-8.0


def _norm(vector: np.ndarray) -> float:
    blocks = (vector[start : start + _BLOCK].astype(np.float64) for start in range(0, len(vector), _BLOCK))
    with np.errstate(over="ignore", invalid="ignore"):
        squares = [float(block @ block) for block in blocks]
    return math.sqrt(sum(squares))  # fsum would raise where finite squares add up to infinity


def _squares(whole: np.ndarray) -> int:
    """Exact sum of squares."""
    blocks = (whole[start : start + _BLOCK].astype(np.int64) for start in range(0, len(whole), _BLOCK))
    return sum(int(np.vdot(block, block)) for block in blocks)


def _check(name: str, value: object, allowed: bool, rule: str) -> None:
    if not allowed:
        raise ValueError(f"{name} is {value!r}: must be {rule}")
