"""Immortal objects: their reference counts do not change, so that the pages that they lie on stay shared after a fork.

A worker uses thousands of functions and classes of its parent. It changes nothing of them but the number of references, which CPython
keeps in the object itself, and so gets a private copy of each of their pages. CPython 3.12 and later leave the count of an object
alone if it has a certain value (PEP 683), but have no function that sets it. From 3.14 on they also read a flag of the object.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
import types

_IMMORTAL = 0xFFFFFFFF  # low half of the count: immortal in CPython 3.12 to 3.14
_HAS_FLAG = sys.version_info >= (3, 14)
_FLAG_AT, _FLAG = 6, 1  # _Py_IMMORTAL_FLAGS, in the last two bytes of what was the count
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
    return sum(map(_keep, _addresses()))


def _keep(address: int) -> bool:
    """Make an object immortal; return False if it is."""
    count = _count(address)
    if count.value == _IMMORTAL:  # not written again: that would copy a page that a parent process has in common with this one
        return False
    count.value = _IMMORTAL
    if _HAS_FLAG:
        _flags(address).value |= _FLAG
    return True


def _count(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


def _flags(address: int) -> ctypes.c_uint16:
    return ctypes.c_uint16.from_address(address + _FLAG_AT)


def _supported() -> bool:
    """Return True if an object that is made immortal is found to be so, however it is used."""
    if sys.implementation.name != "cpython" or sys.version_info < (3, 12) or sys.byteorder != "little":
        return False
    probe = object()
    count = _count(id(probe))
    before, several = count.value, [probe] * 3
    if count.value != before + len(several):  # without the global interpreter lock the object begins with other fields
        return False
    if _HAS_FLAG and _flags(id(probe)).value & _FLAG:
        return False
    _keep(id(probe))
    used = [probe] * 3
    for _ in range(3):
        id(used[0])  # without the flag the count would be one less after each call
    return count.value == _IMMORTAL


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
