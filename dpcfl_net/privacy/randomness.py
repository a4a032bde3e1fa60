"""Private randomness: cryptographic generators and keys, all derived one-way from a task's secret key."""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
from randomgen import AESCounter

MIN_KEY_BYTES = 16


def derive(key: bytes, *labels: str | int) -> bytes:
    """32 bytes that say nothing about `key`, others for every other sequence of labels (HMAC-SHA256).

    Labels are encoded with their type and length, so that no two sequences share an encoding. Raises ValueError for a
    key under 16 bytes, TypeError for a label that is neither text nor a whole number.
    """
    if not isinstance(key, bytes) or len(key) < MIN_KEY_BYTES:
        raise ValueError(f"a key is at least {MIN_KEY_BYTES} bytes")
    # HMAC pads short keys with zeros: hashing first keeps key and key + b"\0" apart.
    return hmac.new(hashlib.sha256(key).digest(), b"".join(map(_encode, labels)), hashlib.sha256).digest()


def stream(key: bytes, purpose: str) -> np.random.Generator:
    """A generator over AES-128 in counter mode, keyed by `derive(key, "stream", purpose)`; starts anew at every call."""
    secret = derive(key, "stream", purpose)
    return np.random.Generator(AESCounter(key=int.from_bytes(secret[:16], "little"), counter=0))


def _encode(label: str | int) -> bytes:
    if isinstance(label, bool) or not isinstance(label, (str, int)):
        raise TypeError(f"a label is text or a whole number, got {label!r}")
    body = (b"s" + label.encode()) if isinstance(label, str) else (b"i" + str(label).encode())
    return len(body).to_bytes(8, "big") + body
