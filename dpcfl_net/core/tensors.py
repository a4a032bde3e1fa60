"""Serialisation of named arrays: little-endian, deterministic, without pickle."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgpack
import numpy as np

from dpcfl_net.core.buffers import empty

# b2 is bfloat16, the upper half of a float32; numpy has no such type, so its bits are held as whole numbers.
DTYPES: dict[str, np.dtype[Any]] = {
    "f4": np.dtype("<f4"),
    "i8": np.dtype("<i8"),
    "f2": np.dtype("<f2"),
    "b2": np.dtype("<u2"),
    "i1": np.dtype("i1"),
    "i4": np.dtype("<i4"),
    "u1": np.dtype("u1"),
    "u4": np.dtype("<u4"),
    "f8": np.dtype("<f8"),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
Memory = tuple[int, tuple[int, ...], tuple[int, ...]]  # address, shape and strides
CLIENT_DTYPES = frozenset(DTYPES) - {"f8"}  # f8: sums of aggregators only
_BLOCK = 1 << 16  # elements
MOST_HEAD = 1 << 20  # bytes of packed tensors in which their rows end
_ALIGNED = 64  # bytes; in its buffer the payload of large packed tensors begins at a multiple of them
_ROW = 4096  # squares that are added in float32
_BFLOAT16_EXPONENT = 0x7F80  # all bits set: an infinity or a NaN


def describe(tensors: Mapping[str, np.ndarray], allowed: Collection[str] = frozenset(DTYPES)) -> list[list[Any]]:
    """Describe arrays as rows [name, dtype, shape, bytes] in name order.

    Args:
        tensors: Named arrays.
        allowed: Codes of `DTYPES` that the arrays may have.

    Raises:
        ValueError: If an array has another dtype.
    """
    rows: list[list[Any]] = []
    for name in sorted(tensors):
        array = tensors[name]
        code = _CODES.get(array.dtype)
        if code is None or code not in allowed:
            raise ValueError(f"tensor {name!r} has dtype {array.dtype}, allowed: {dtype_names(allowed)}")
        rows.append([name, code, list(array.shape), array.nbytes])
    return rows


def dtype_names(codes: Collection[str]) -> str:
    """Return the NumPy names of dtypes, for a message.

    Args:
        codes: Codes of `DTYPES`.
    """
    return ", ".join(sorted(DTYPES[code].name for code in codes))


def finite(array: np.ndarray) -> bool:
    """Return True if an array of one of `DTYPES` holds no NaN and no infinity."""
    if array.dtype == DTYPES["b2"]:
        return all(bool(((block & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT).all()) for block in _blocks(array))
    return array.dtype.kind != "f" or all(bool(np.isfinite(block).all()) for block in _blocks(array))


def norm(array: np.ndarray) -> float:
    """Compute the L2 norm of an array in float64, without a copy of the array."""
    flat = array.reshape(-1)
    return math.sqrt(float(np.einsum("i,i->", flat, flat, dtype=np.float64)))


def surely_within(array: np.ndarray, bound: float) -> bool:
    """Return True only if `norm` of an array is at most `bound`; False if that takes `norm` to decide.

    The sums of 4,096 squares are taken in float32, seven times as fast as `norm`. Such a sum is wrong by less than 2^-11 of
    itself in any order of its terms, and by 2^-126 for each square that underflows.

    Args:
        array: An array; for other types than float32 the answer is False.
        bound: Bound on the L2 norm.
    """
    if array.dtype != np.float32:
        return False
    flat = array.reshape(-1)
    rows, rest = flat[: flat.size // _ROW * _ROW].reshape(-1, _ROW), flat[flat.size // _ROW * _ROW :]
    with np.errstate(over="ignore"):  # the result is infinite, and not within the bound
        squares = float(np.einsum("ij,ij->i", rows, rows).sum(dtype=np.float64)) + norm(rest) ** 2
    return math.sqrt(squares * (1 + 2.0**-11) + flat.size * 2.0**-126) <= bound


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Pieces of the flattened array that fit a processor's cache."""
    flat = array.reshape(-1)
    return (flat[at : at + _BLOCK] for at in range(0, flat.size, _BLOCK))


def buffers(tensors: Mapping[str, np.ndarray]) -> list[memoryview]:
    """Return the bytes of the arrays in name order; contiguous arrays are not copied."""
    return [
        memoryview(np.ascontiguousarray(tensors[name]).reshape(-1)).cast("B")
        for name in sorted(tensors)
        if tensors[name].nbytes
    ]


def pack(tensors: Mapping[str, np.ndarray]) -> bytes | memoryview:
    """Encode arrays as one self-describing byte string, the msgpack of [rows, payload]; the payload is copied once."""
    parts = buffers(tensors)
    size = sum(part.nbytes for part in parts)
    start = head(describe(tensors), size)
    if size < MOST_HEAD:
        return b"".join([start, *parts])
    before = -len(start) % _ALIGNED
    packed, at = empty(before + len(start) + size)[before:], len(start)
    packed[:at] = start
    for part in parts:
        packed[at : at + part.nbytes] = part
        at += part.nbytes
    return packed.toreadonly()


def head(rows: list[list[Any]], size: int) -> bytes:
    """Return what precedes the payload of `size` bytes: the pair, its rows, and the head of a byte string."""
    if size >= 1 << 32:
        raise ValueError(f"tensors of {size} bytes, at most {(1 << 32) - 1} can be packed")
    length = (
        bytes([0xC4, size]) if size < 1 << 8 else struct.pack(">BH" if size < 1 << 16 else ">BI", 0xC5 + (size >> 16 > 0), size)
    )
    return b"\x92" + msgpack.packb(rows) + length


def payload(packed: bytes | memoryview) -> tuple[list[list[Any]], memoryview]:
    """Split the output of `pack` without a copy; only for trusted bytes.

    Returns:
        The rows, and the bytes of all arrays.

    Raises:
        ValueError: If bytes are missing or left over.
    """
    reader = msgpack.Unpacker()
    reader.feed(memoryview(packed)[:MOST_HEAD])
    try:
        reader.read_array_header()
        rows = reader.unpack()
    except msgpack.OutOfData:
        raise ValueError(f"{len(packed)} bytes, fewer than the rows of the tensors take") from None
    start = len(head(rows, size := sum(row[3] for row in rows)))
    if start + size != len(packed):
        raise ValueError(f"{len(packed)} bytes, expected {start + size}")
    return rows, memoryview(packed)[start:]


def unpack(data: bytes | memoryview) -> dict[str, np.ndarray]:
    """Decode the output of `pack`; only for trusted bytes, such as the process's own files.

    Args:
        data: The bytes. The arrays lie in them, where they are aligned.

    Raises:
        ValueError: If bytes are missing or left over.
    """
    return {name: aligned(array) for name, array in split(*payload(data)).items()}


def memory_of(array: np.ndarray) -> Memory:
    """Return address, shape and strides: while both are alive, arrays of one dtype with equal ones hold the same numbers."""
    return array.__array_interface__["data"][0], array.shape, array.strides


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a read-only view of an array."""
    view = array.view()
    view.flags.writeable = False
    return view


def aligned(array: np.ndarray) -> np.ndarray:
    """Return a read-only array as it is, or a copy if its address is no multiple of its item size, which is slow to read."""
    if array.flags.aligned:
        return array
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def split(rows: list[list[Any]], raw: bytes | bytearray | memoryview) -> dict[str, np.ndarray]:
    """Split concatenated bytes into read-only arrays.

    Args:
        rows: Rows as returned by `describe`.
        raw: Bytes of all arrays in that order.

    Raises:
        ValueError: If shapes and sizes do not match the bytes exactly.
    """
    out: dict[str, np.ndarray] = {}
    at = 0
    for name, code, shape, size in rows:
        dtype = DTYPES[code]
        count = 1
        for side in shape:
            count *= side
        if count * dtype.itemsize != size:
            raise ValueError(f"tensor {name!r}: shape {shape} needs {count * dtype.itemsize} bytes, header says {size}")
        if at + size > len(raw):
            raise ValueError(f"tensor {name!r} runs past the end of the payload")
        array = np.frombuffer(raw, dtype=dtype, count=count, offset=at).reshape(shape)
        array.flags.writeable = False
        out[name] = array
        at += size
    if at != len(raw):
        raise ValueError(f"{len(raw) - at} bytes left over after the last tensor")
    return out
