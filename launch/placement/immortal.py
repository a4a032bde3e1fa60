"""Immortal objects: their reference counts do not change, so that the pages that they lie on stay shared after a fork.

A worker uses thousands of functions and classes of its parent. It changes nothing of them but the number of references, which CPython
keeps in the object itself, and so gets a private copy of each of their pages. CPython 3.12 and later leave the count of an object
alone if it has a certain value (PEP 683), but have no function that sets it.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
import types

_IMMORTAL = 0xFFFFFFFF  # low half of the count: immortal in CPython 3.12 to 3.14
# That these are freed has effects beyond their memory. So has it for files and sockets.
_MORTAL = (types.FrameType, types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, types.TracebackType)


def keep_for_ever() -> int:
    """Make every object of this process immortal but for generators, frames, open files and sockets; call it before many forks.

    The objects are never freed, so that this is for processes that have loaded all that their children need. It takes half a second
    in a process that has loaded torch.

    Returns:
        Number of objects that have become immortal; 0 if this interpreter knows none: before CPython 3.12, without the global
        interpreter lock, or another Python.
    """
    if not _supported():
        return 0
    changed = 0
    for address in _addresses():
        count = _count(address)
        if (
            count.value != _IMMORTAL
        ):  # a page that a parent process has in common with this one is not copied for a value that it has
            count.value = _IMMORTAL
            changed += 1
    return changed


def _count(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


def _supported() -> bool:
    """Return True if an object with this count is found to be immortal."""
    if sys.implementation.name != "cpython" or sys.version_info < (3, 12) or sys.byteorder != "little":
        return False
    probe = object()
    count = _count(id(probe))
    if count.value != sys.getrefcount(probe) - 1:  # without the global interpreter lock the object begins with other fields
        return False
    count.value = _IMMORTAL
    several = [probe] * 3
    return bool(several) and count.value == _IMMORTAL


def _addresses() -> set[int]:
    """Return the address of each object that the garbage collector knows, or that one of these refers to."""
    known = gc.get_objects()
    known += gc.get_referents(*known)
    parts = [
        code.co_consts + code.co_names for code in known if type(code) is types.CodeType
    ]  # the collector does not follow them
    known += itertools.chain.from_iterable(parts)
    mortal = {kind for kind in set(map(type, known)) if issubclass(kind, _MORTAL) or hasattr(kind, "fileno")}
    return {id(one) for one in known if type(one) not in mortal}
