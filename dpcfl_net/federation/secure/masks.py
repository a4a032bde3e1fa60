"""Masks of vectors: key streams of AES-256 in counter mode, added to words modulo 2^32."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

_BLOCK = 1 << 15  # words; key stream and words of a block fit a processor's cache
_OPEN = 256  # streams at a time
_WORDS = np.dtype("<u4")


def apply(words: np.ndarray, plus: Sequence[bytes], minus: Sequence[bytes] = ()) -> None:
    """Add and subtract masks in place.

    Args:
        words: (d,) uint32, contiguous and writable.
        plus: Keys of the masks to add, 32 bytes each, every one used for one mask only.
        minus: Keys of the masks to subtract.

    Raises:
        ValueError: If `words` is of another type.
    """
    if words.dtype != _WORDS or words.ndim != 1 or not words.flags.c_contiguous or not words.flags.writeable:
        raise ValueError("masks are added to a contiguous, writable vector of uint32")
    zeros = bytes(4 * min(_BLOCK, words.size))
    stream = bytearray(len(zeros) + 15)  # the cipher asks for room for one more block less a byte
    mask = np.frombuffer(stream, _WORDS, len(zeros) // 4)
    for keys, change in ((plus, np.add), (minus, np.subtract)):
        for first in range(0, len(keys), _OPEN):
            ciphers = [_cipher(key) for key in keys[first : first + _OPEN]]
            for at in range(0, words.size, _BLOCK):
                block = words[at : at + _BLOCK]
                data = memoryview(zeros)[: block.nbytes]
                for cipher in ciphers:
                    cipher.update_into(data, stream)
                    change(block, mask[: block.size], out=block)


def _cipher(key: bytes) -> CipherContext:
    """The counter starts at zero: a key belongs to one mask."""
    return Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
