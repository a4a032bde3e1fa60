"""Hash of payloads: BLAKE3, which takes a quarter of the time of SHA-256 on large models; all other hashes are SHA-256."""

from __future__ import annotations

from blake3 import blake3


def hasher() -> blake3:
    """Return an incremental hasher, with `update` and `hexdigest`; one thread computes it."""
    return blake3()


def payload_hash(*buffers: bytes | bytearray | memoryview) -> str:
    """Compute the hash of a payload.

    Args:
        buffers: Its bytes, in order.

    Returns:
        BLAKE3 of all bytes, 64 hex digits.
    """
    found = hasher()
    for buffer in buffers:
        found.update(buffer)
    return found.hexdigest()


NOTHING = payload_hash()  # hash of a payload without bytes
