"""Private randomness: keys and cryptographic generators, derived one-way from a task's secret key."""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
from randomgen import AESCounter

MIN_KEY_BYTES = 16


def derive(key: bytes, *labels: str | int) -> bytes:
    """Derive a key (HMAC-SHA256).

    Labels are encoded with their type and length, so that no two sequences share an encoding.

    Args:
        key: Secret of at least 16 bytes.
        *labels: Purpose of the new key, text and whole numbers.

    Returns:
        32 bytes that reveal nothing about `key`, different for every sequence of labels.

    Raises:
        TypeError: If a label is neither text nor a whole number.
        ValueError: If the key is too short.
    """
    if not isinstance(key, bytes) or len(key) < MIN_KEY_BYTES:
        raise ValueError(f"a key is at least {MIN_KEY_BYTES} bytes")
    # HMAC pads short keys with zeros: hashing first keeps key and key + b"\0" apart.
    return hmac.new(hashlib.sha256(key).digest(), b"".join(map(_encode, labels)), hashlib.sha256).digest()


def stream(key: bytes, purpose: str) -> np.random.Generator:
    """Build a generator over AES-128 in counter mode.

    Args:
        key: Secret of at least 16 bytes.
        purpose: Label of the stream.

    Returns:
        A generator keyed by `derive(key, "stream", purpose)`; every call starts the same stream.

    Raises:
        ValueError: If the key is too short.
    """
    secret = derive(key, "stream", purpose)
    return np.random.Generator(AESCounter(key=int.from_bytes(secret[:16], "little"), counter=0))


def _encode(label: str | int) -> bytes:
    if isinstance(label, bool) or not isinstance(label, (str, int)):
        raise TypeError(f"a label is text or a whole number, got {label!r}")
    body = (b"s" + label.encode()) if isinstance(label, str) else (b"i" + str(label).encode())
    return len(body).to_bytes(8, "big") + body
