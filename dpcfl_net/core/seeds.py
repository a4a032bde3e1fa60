"""Seeds derived one-way from a secret, one for each purpose."""

from __future__ import annotations

import hashlib


def derive_seed(secret: bytes, purpose: str, bits: int = 63) -> int:
    """Derive a seed for one purpose; it reveals neither the secret nor the seed of another purpose.

    Args:
        secret: Secret bytes.
        purpose: Name of the purpose.
        bits: Length of the seed in bits, at most 256.

    Returns:
        The seed, in [0, 2^bits).
    """
    return int.from_bytes(hashlib.sha256(b"dpcfl-seed\0" + purpose.encode() + b"\0" + secret).digest(), "big") >> (256 - bits)
