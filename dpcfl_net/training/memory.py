"""Memory of steps: freed memory is kept between them and returned to the system after a task; sums need no copies.

By default glibc returns memory after every layer, at 2,200 page faults and a fifth of the time of a step.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEEP = 256 << 20
_LARGEST_MMAP_THRESHOLD = 32 << 20
_CHUNK = 2**19


def keep_freed() -> None:
    """Keep up to 256 MiB of freed memory in this process; no effect on allocators other than glibc's."""
    if (mallopt := _glibc("mallopt")) is not None:
        mallopt(_TRIM_THRESHOLD, _KEEP)
        mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)


def give_back_freed() -> None:
    """Return freed memory to the system, so that waiting workers stay small."""
    if (trim := _glibc("malloc_trim")) is not None:
        trim(0)


def add(total: torch.Tensor, part: torch.Tensor) -> None:
    """Add a vector to a wider one in place, in chunks: torch would convert all of `part` first, into new memory.

    Args:
        total: Sum, (p,) float64; changed.
        part: Addend, (p,).
    """
    for some, more in zip(total.split(_CHUNK), part.split(_CHUNK), strict=True):
        some += more


def _glibc(name: str) -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
