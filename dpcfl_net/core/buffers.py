"""Large buffers, used again once nothing refers to them: the system clears fresh memory, which takes longer than to fill it."""

from __future__ import annotations

import math
import weakref
from collections import deque

import numpy as np
from numpy.typing import DTypeLike

LEAST = 1 << 20  # bytes; malloc keeps smaller ones
IDLE_S = 3.0  # time without a large message after which a process returns its free buffers to the system

# Of the whole process: `append` and `popleft` are atomic, and a loan may end in any thread.
_free: deque[np.ndarray] = deque()
_most_free = math.inf


def empty(size: int) -> memoryview:
    """Return memory of `size` bytes whose content is undefined.

    A large buffer is lent: it is free again when nothing refers to the returned memory or to an array over it. A buffer that has
    to be allocated takes the place of free ones of other sizes, so that a process hardly holds more than were in use at once.

    Args:
        size: Length in bytes.
    """
    if size < LEAST:
        return memoryview(np.empty(size, np.uint8))
    found = _take(size)
    buffer = np.empty(size, np.uint8) if found is None else found  # numpy asks for huge pages, which fault less often
    lent = buffer.view()
    weakref.finalize(lent, _return, buffer).atexit = False
    return memoryview(lent)


def array(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Return an array whose content is undefined, as `numpy.empty`, in memory of `empty`.

    Args:
        shape: Shape of the array.
        dtype: Type of its elements.
    """
    kind = np.dtype(dtype)
    return np.frombuffer(empty(math.prod(shape) * kind.itemsize), kind).reshape(shape)


def keep_at_most(size: float) -> None:
    """Limit the free buffers of this process; those beyond are returned to the system.

    Args:
        size: Bytes of all free buffers; inf by default.
    """
    global _most_free
    _most_free = size
    while free_bytes() > size:
        _drop_oldest()


def give_back() -> None:
    """Return all free buffers to the system."""
    _free.clear()


def free_bytes() -> int:
    """Return the bytes of all free buffers."""
    return sum(buffer.nbytes for buffer in _free.copy())


def _return(buffer: np.ndarray) -> None:
    if free_bytes() + buffer.nbytes <= _most_free:
        _free.append(buffer)


def _take(size: int) -> np.ndarray | None:
    """Remove a free buffer of a size; without one, remove free ones of that many bytes in all, the oldest first."""
    for _ in range(len(_free)):
        try:
            buffer = _free.popleft()
        except IndexError:  # another thread was faster
            break
        if buffer.nbytes == size:
            return buffer
        _free.append(buffer)
    removed = 0
    while removed < size and (dropped := _drop_oldest()):
        removed += dropped
    return None


def _drop_oldest() -> int:
    """Return the oldest free buffer to the system; 0 if there is none, else its bytes."""
    try:
        return _free.popleft().nbytes
    except IndexError:
        return 0
