"""Standard normal numbers from AES in counter mode by Box and Muller's method, in vectorised float64 operations on a CPU.

Distribution: each pair takes two words of 64 bits. The first, as a signed number w, gives u = |w| 2^-63: a uniform number of (0, 1)
rounded to the nearest multiple of 2^-63. If u < 2^-19, a further word gives its next 64 bits. The second word gives the angle a, in
steps of 2^-63 of half a turn. With r = sqrt(-2 ln u), the pair is r cos a and r sin a. The largest value is sqrt(2 * 128 * ln 2) = 13.3;
an exact Gaussian exceeds it with probability 2^-131. Where NumPy's tangent is vectorised, t = tan(a / 2) takes a quarter of the time of
sine and cosine: the pair is then q (1 - t^2) and q 2 t with q = r / (1 + t^2).

Error against exact arithmetic on the same words, in units of 2^-53, if logarithm and tangent are within 4 units in the last place
(NumPy's bound) and sine and cosine within 1 (SLEEF's and MKL's). Quadratic means are over the words and both numbers of a pair, with
E r^2 = 2 and E 1 / r^2 < 18.1 where r > 2^-26:

- Radius: u is rounded once, which moves -ln u by at most 1 and so r by at most 1 / r; the logarithm moves r by 4 r, the root by r. Below
  2^-26, with probability 2^-53, r is off by at most 2^-26. In quadratic mean 6.4.
- Angle: off by at most 2.36 |a|. In quadratic mean 4.3.
- By the tangent: t is off by at most 8 t, which turns the pair by 8 |sin a|. In quadratic mean 5.7. Square, sums, quotient and products
  round the first number by at most r (5 |cos a| + sin^2(a / 2)), the second one by 4 r |sin a|. In quadratic mean 5.0.
- By sine and cosine: 2 of each number, and 1 by the product. In quadratic mean 3.

Together at most 21.4 (17 r + 1 / r for each number). The steps of u move r by at most 2^-64 / (u r), in quadratic mean less than 0.1;
beyond u = 2^-19 by less than 2^-53 r unless u < 2^-79.

Distance from the exact mechanism, with this number x in k = rint(total / grid + 2^20 x) (`mechanisms.gaussian_on_grid`): sum and quotient
round by |x| + 2 |total| / deviation. By the argument of device_noise.py, E[d^2] <= 2^-64 (2 (21.4 + 1)^2 + 8 (total / deviation)^2)
for a coordinate, and the Renyi divergence of order a of a step is at most a S / 2 in either direction (a < 2^20), with
S = 2^-64 (1004 p + 8 |total|^2 / deviation^2).

Bits: additions, products, quotients and roots are the same everywhere. The other functions are those of the libraries, whose last bits
may differ between kinds of processors: the same key gives the same bits on one machine, which is all that repeating a crashed task needs.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dpcfl_net.privacy.randomness import derive

_PAIRS = 2**14  # of one pass: their numbers stay in the processor's cache
_ZEROS = bytes(16 * _PAIRS)
_FEW = 2.0**44


class NormalStream:
    """Standard normal numbers, keyed by a secret.

    Args:
        key: Secret of at least 16 bytes.
        purpose: Label of the stream.

    Raises:
        ValueError: If the key is too short.

    Source: Box and Muller 1958.
    """

    def __init__(self, key: bytes, purpose: str) -> None:
        secret = derive(key, "normal numbers", purpose)
        self._cipher = Cipher(algorithms.AES(secret[:16]), modes.CTR(bytes(16))).encryptor()

    def standard_normal(self, count: int) -> np.ndarray:
        """Draw the next numbers.

        Args:
            count: How many.

        Returns:
            (count,) float64.
        """
        found = np.empty(count + count % 2)
        for start in range(0, len(found), 2 * _PAIRS):
            self._fill(found[start : start + 2 * _PAIRS])
        return found[:count]

    def _fill(self, found: np.ndarray) -> None:
        pairs = len(found) // 2
        numbers = self._words(2 * pairs).astype(np.float64)
        radius, angle = numbers[:pairs], numbers[pairs:]
        np.abs(radius, out=radius)
        small = np.flatnonzero(radius < _FEW)
        if small.size:
            radius[small] = np.abs(radius[small] + (self._words(small.size) + 0.5) * 2.0**-64)
        radius *= 2.0**-63
        np.log(radius, out=radius)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        (_by_tangent if _has_fast_tangent() else _by_sine_and_cosine)(radius, angle, found.reshape(2, pairs))

    def _words(self, count: int) -> np.ndarray:
        return np.frombuffer(self._cipher.update(memoryview(_ZEROS)[: 8 * count]), "<i8")


def _by_tangent(radius: np.ndarray, angle: np.ndarray, pair: np.ndarray) -> None:
    """Write r cos a and r sin a, (2, pairs), for an angle of pi 2^-63; overwrites r and the angle, (pairs,)."""
    first, second = pair
    angle *= math.pi * 2.0**-64
    t = np.tan(angle, out=angle)
    np.multiply(t, t, out=first)
    np.add(first, 1.0, out=second)
    radius /= second
    np.subtract(1.0, first, out=first)
    first *= radius
    t *= 2.0
    np.multiply(t, radius, out=second)


def _by_sine_and_cosine(radius: np.ndarray, angle: np.ndarray, pair: np.ndarray) -> None:
    """As `_by_tangent`."""
    import torch

    angle *= math.pi * 2.0**-63
    # torch's are vectorised on every processor, NumPy's are not.
    torch.cos(torch.from_numpy(angle), out=torch.from_numpy(pair[0]))
    torch.sin(torch.from_numpy(angle), out=torch.from_numpy(pair[1]))
    pair *= radius


@cache
def _has_fast_tangent() -> bool:
    """True if NumPy's tangent of float64 is vectorised on this processor: on AVX-512."""
    found = np.lib.introspect.opt_func_info(func_name="^tan$", signature="float64")
    return any(not kind["current"].startswith("baseline") for kind in found.get("tan", {}).values())
