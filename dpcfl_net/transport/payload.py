"""Payloads: tensors cut into chunks once and shared by many peers, and their bounded reassembly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpcfl_net.core import tensors as named
from dpcfl_net.core.buffers import empty
from dpcfl_net.core.errors import Refused
from dpcfl_net.core.payload_hash import hasher, payload_hash
from dpcfl_net.transport.messages import CHUNK, Header, WireError

SHARED = 8192  # bytes that ZeroMQ receives at once: a small message would keep the memory of all


class Payload:
    """Tensors ready to send to any number of peers.

    The arrays are not copied (except chunks that span two of them) and must not change while the payload is in use.

    Attributes:
        rows: Rows (name, dtype, shape, bytes) for the header.
        size: Bytes in all.
        chunks: Pieces of at most CHUNK bytes.
        blake3: Hash of all bytes, hex; empty without bytes.
    """

    def __init__(self, rows: Sequence[Sequence[Any]], parts: Sequence[memoryview], blake3: str = "") -> None:
        self.rows = tuple((name, dtype, tuple(shape), size) for name, dtype, shape, size in rows)
        self.size = sum(part.nbytes for part in parts)
        self.chunks = _cut(parts)
        self.blake3 = (blake3 or payload_hash(*parts)) if self.size else ""

    @classmethod
    def of(cls, tensors: Mapping[str, np.ndarray]) -> Payload:
        """Create a payload from named arrays.

        Args:
            tensors: Arrays of a dtype in `core.tensors.DTYPES`.

        Raises:
            ValueError: For another dtype.
        """
        return cls(named.describe(tensors), named.buffers(tensors))

    @classmethod
    def from_packed(cls, packed: bytes | memoryview, blake3: str = "") -> Payload:
        """Create a payload from the bytes of `tensors.pack`, which are sent unchanged.

        Args:
            packed: The bytes.
            blake3: Hash of all bytes of the tensors, hex, where it is known; "" computes it.
        """
        if not packed:
            return cls((), ())
        rows, raw = named.payload(packed)
        return cls(rows, [raw] if raw else [], blake3)


def as_payload(tensors: Payload | Mapping[str, np.ndarray] | bytes) -> Payload:
    """Convert tensors, or bytes of `tensors.pack`, to a Payload."""
    if isinstance(tensors, Payload):
        return tensors
    return Payload.from_packed(tensors) if isinstance(tensors, bytes) else Payload.of(tensors)


def _cut(parts: Sequence[memoryview]) -> list[memoryview]:
    """Pieces of CHUNK bytes of the concatenated parts; the last may be shorter."""
    chunks: list[memoryview] = []
    held: list[memoryview] = []  # start of a chunk that continues in the next part
    missing = CHUNK
    for part in parts:
        at = 0
        while at < part.nbytes:
            piece = part[at : at + missing]
            at += piece.nbytes
            held.append(piece)
            missing -= piece.nbytes
            if not missing:
                chunks.append(_join(held))
                held, missing = [], CHUNK
    return [*chunks, _join(held)] if held else chunks


def _join(pieces: list[memoryview]) -> memoryview:
    return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


class Assembly:
    """An arriving message: a buffer of the announced size, filled in order, or its only chunk, which is not copied.

    Create it only after the header has passed every check, including the template, which makes its size trustworthy.

    Args:
        header: The message's header.
    """

    def __init__(self, header: Header) -> None:
        self.header = header
        self.received = 0
        self._size = header.size
        self._copies = header.chunks > 1 or self._size <= SHARED
        self._buffer = empty(self._size) if self._copies else memoryview(b"")
        self._digest = hasher()

    def add(self, index: int, chunk: memoryview) -> bool:
        """Add the next chunk.

        Args:
            index: Position of the chunk.
            chunk: Its bytes.

        Returns:
            True if it was the last one.

        Raises:
            WireError: "chunk" for another position or length.
        """
        start = index * CHUNK
        expected = min(CHUNK, self._size - start)
        if index != self.received or chunk.nbytes != expected:
            raise WireError("chunk", f"chunk {index} of {chunk.nbytes} bytes, expected chunk {self.received} of {expected}")
        if self._copies:
            self._buffer[start : start + expected] = chunk
        else:
            self._buffer = chunk
        self._digest.update(chunk)
        self.received += 1
        return self.received == self.header.chunks

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the arrays, read-only.

        Raises:
            WireError: "hash" if the bytes differ from the announced hash, "non-finite" for a NaN or an infinity.
        """
        if self._size and self._digest.hexdigest() != self.header.blake3:
            raise WireError("hash", "the payload is not the one that the header announced")
        found = named.split([list(row) for row in self.header.tensors], self._buffer)
        for name, array in found.items():
            if not named.finite(array):
                raise WireError("non-finite", f"tensor {name} holds a NaN or an infinity")
        return {name: named.aligned(array) for name, array in found.items()}


def checked(assembly: Assembly, check: Any, *about: Any) -> dict[str, np.ndarray]:
    """Return the tensors of a message after the owner's check (the norm bound).

    Args:
        assembly: The complete message.
        check: Called with `about` and the tensors; None: no check.
        about: First arguments of `check`.

    Raises:
        WireError: As `Assembly.tensors`, or with the code of the check's Refused.
    """
    found = assembly.tensors()
    if check is not None:
        try:
            check(*about, found)
        except Refused as error:
            raise WireError(error.code, error.reason) from None
    return found
