"""Shamir's secret sharing of 32-byte secrets over a prime field.

Source: Shamir 1979.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

PRIME = 2**256 + 297  # the smallest prime above every secret
SECRET_BYTES = 32
SHARE_BYTES = 33
_DRAW_BYTES = 48  # of a coefficient: taken modulo the prime, it is uniform up to 2^-127


def split(secret: bytes, threshold: int, points: Sequence[int], key: bytes) -> list[bytes]:
    """Split a secret into shares; fewer than `threshold` of them tell nothing about it.

    Args:
        secret: 32 bytes.
        threshold: Number of shares that determine the secret, at least 1.
        points: Points of the shares, distinct and at least 1.
        key: 32 bytes from which the coefficients of the polynomial are derived, used for nothing else.

    Returns:
        One share of 33 bytes for each point.

    Raises:
        ValueError: If a size, the threshold or a point is out of range.
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= len(points) or len(set(points)) != len(points) or min(points) < 1:
        raise ValueError(f"threshold {threshold} of {len(points)} distinct points from 1, and a secret of {SECRET_BYTES} bytes")
    coefficients = [*_coefficients(key, threshold - 1), int.from_bytes(secret, "big")]  # highest power first
    return [_value(coefficients, point).to_bytes(SHARE_BYTES, "big") for point in points]


def combine(points: tuple[int, ...], shares: Sequence[bytes]) -> bytes | None:
    """Compute the secret from as many shares as its threshold.

    Args:
        points: Distinct points of the shares.
        shares: The shares, each valid as `is_share` says.

    Returns:
        The secret; None if the shares are not of one secret of 32 bytes. Most wrong shares give a wrong secret instead.
    """
    weights = _weights(points)
    secret = sum(weight * int.from_bytes(share, "big") for weight, share in zip(weights, shares, strict=True)) % PRIME
    return secret.to_bytes(SECRET_BYTES, "big") if secret < 1 << 8 * SECRET_BYTES else None


def is_share(data: bytes) -> bool:
    """Return True if bytes are a number of the field other than 0, which stands for no share."""
    return len(data) == SHARE_BYTES and 0 < int.from_bytes(data, "big") < PRIME


def _value(coefficients: Sequence[int], point: int) -> int:
    """Horner's rule."""
    value = 0
    for coefficient in coefficients:
        value = (value * point + coefficient) % PRIME
    return value


def _coefficients(key: bytes, count: int) -> list[int]:
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update(bytes(_DRAW_BYTES * count))
    return [int.from_bytes(stream[at : at + _DRAW_BYTES], "big") % PRIME for at in range(0, len(stream), _DRAW_BYTES)]


@lru_cache(maxsize=64)
def _weights(points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's coefficients at zero, with one inversion for all points."""
    product = math.prod(points)
    divisors = [x * math.prod(y - x for y in points if y != x) % PRIME for x in points]
    before = [1]
    for divisor in divisors:
        before.append(before[-1] * divisor % PRIME)
    inverse, weights = pow(before[-1], -1, PRIME), []
    for divisor, earlier in zip(reversed(divisors), reversed(before[:-1]), strict=True):
        weights.append(product * inverse * earlier % PRIME)
        inverse = inverse * divisor % PRIME
    return tuple(reversed(weights))
