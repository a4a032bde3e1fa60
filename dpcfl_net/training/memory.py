"""Memory of a process: freed memory is kept while it computes and returned to the system when it is idle.

By default glibc returns memory after every layer, at 2,200 page faults and a fifth of the time of a step.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
_KEEP = 256 << 20
MOST_KEPT = 64 << 20  # more than this is returned after a task even if the next one comes at once
IDLE_S = 3.0  # time without a task after which a process is idle: longer than the rounds of a few clients with small tasks
_SHARE = 0.02  # of the time that `give_back_freed` may take
_LARGEST_MMAP_THRESHOLD = 32 << 20
_CHUNK = 2**19
_LARGEST_GAP, _SMALLEST_GAP = 1 << 20, 24  # sizes that `fill_gaps` tries, in bytes


def keep_freed() -> None:
    """Keep up to 256 MiB of freed memory in this process and use one heap for all threads.

    A forked process inherits it. No effect on allocators other than glibc's.
    """
    if (mallopt := _glibc("mallopt")) is not None:
        mallopt(_ARENA_MAX, 1)  # threads compute in turns, and every heap more keeps its own free memory
        mallopt(_TRIM_THRESHOLD, _KEEP)
        mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)


_may_look_at = -math.inf  # on the monotonic clock


def give_back_freed() -> None:
    """Return freed memory to the system if it is more than `MOST_KEPT` bytes, or if its size is unknown.

    To measure it takes time for every free piece: 40 ms in a notebook whose heap has 200,000. So that this takes at most a
    fiftieth of the time, a call that comes too soon after the last one does nothing.
    """
    global _may_look_at
    if (start := time.monotonic()) < _may_look_at:
        return
    if freed_bytes() > MOST_KEPT:
        give_back_all()
    end = time.monotonic()
    _may_look_at = end + (end - start) / _SHARE


def give_back_all() -> None:
    """Return all freed memory to the system, so that idle processes stay small."""
    if (trim := _glibc("malloc_trim")) is not None:
        trim(0)


def freed_bytes() -> float:
    """Return the bytes that are freed and not returned to the system; inf where glibc cannot tell (before 2.33)."""
    return math.inf if (state := _state()) is None else float(state.fordblks)


def fill_gaps() -> None:
    """Allocate the free pieces between blocks in use, for ever; for a process that forks many.

    Otherwise the blocks that a child allocates are spread over the shared pages of its parent, which become private: 0.7 MiB of
    gaps cost every child 3 MiB.
    """
    malloc, free = _glibc("malloc"), _glibc("free")
    if malloc is None or free is None or _state() is None:
        return
    malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    size = _LARGEST_GAP
    while size >= _SMALLEST_GAP:
        before = _state()
        block = malloc(size)
        if _is_new(before, _state()):  # no gap of this size is left
            free(block)
            size = min(size * 3 // 4, size - 16)


def _is_new(before: _MallocInfo | None, after: _MallocInfo | None) -> bool:
    """Return True if a block came from the end of the heap or from the system, not from a gap."""
    if before is None or after is None:
        return True
    return (before.arena, before.hblkhd, before.keepcost) != (after.arena, after.hblkhd, after.keepcost)


def _state() -> _MallocInfo | None:
    if (mallinfo := _glibc("mallinfo2")) is None:
        return None
    mallinfo.restype = _MallocInfo
    state: _MallocInfo = mallinfo()
    return state


def add(total: torch.Tensor, part: torch.Tensor) -> None:
    """Add a vector to a wider one in place, in chunks: torch would convert all of `part` first, into new memory.

    Args:
        total: Sum, (p,) float64; changed.
        part: Addend, (p,).
    """
    for some, more in zip(total.split(_CHUNK), part.split(_CHUNK), strict=True):
        some += more


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


@cache
def _glibc(name: str) -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
