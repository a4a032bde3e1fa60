"""Keep freed memory between steps and give it back after a task.

Left alone, glibc returns memory to the system after every layer: 2,200 page faults and a fifth of the time of a step.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEEP = 256 << 20
_LARGEST_MMAP_THRESHOLD = 32 << 20


def keep_freed() -> None:
    """From now on this process keeps what it frees, up to 256 MiB. Does nothing on an allocator other than glibc's."""
    if (mallopt := _glibc("mallopt")) is not None:
        mallopt(_TRIM_THRESHOLD, _KEEP)
        mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)


def give_back_freed() -> None:
    """Return freed memory to the system, so that workers that wait stay small."""
    if (trim := _glibc("malloc_trim")) is not None:
        trim(0)


def _glibc(name: str) -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
