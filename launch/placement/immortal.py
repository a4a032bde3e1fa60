"""Immortal objects: their reference counts do not change, so that the pages that they lie on stay shared after a fork.

A worker uses thousands of functions and classes of its parent. It changes nothing of them but the number of references, which CPython
keeps in the object itself, and so gets a private copy of each of their pages. CPython 3.12 and 3.13 leave the count of an object
alone if it has a certain value (PEP 683), but have no function that sets it. In 3.14 the value does not suffice: processes crash.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
import types

_VERSIONS = ((3, 12), (3, 13))
_IMMORTAL = 0xFFFFFFFF  # low half of the count: immortal in these versions
# That these are freed has effects beyond their memory. So has it for files and sockets.
_MORTAL = (types.FrameType, types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, types.TracebackType)


def keep_for_ever() -> int:
    """Make every object of this process immortal but for generators, frames, open files and sockets; call it before many forks.

    The objects are never freed, so that this is for processes that have loaded all that their children need. It takes half a second
    in a process that has loaded torch.

    Returns:
        Number of objects that have become immortal; 0 and no change for other versions than CPython 3.12 and 3.13, and without the
        global interpreter lock.
    """
    if not _supported():
        return 0
    changed = 0
    for one in _objects():  # the list holds them: at the address of an object that was freed there may be another
        count = _count(id(one))
        # Not written again: that would copy a page that a parent process has in common with this one.
        if count.value != _IMMORTAL:
            count.value = _IMMORTAL
            changed += 1
    return changed


def _count(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


def _supported() -> bool:
    """Return True if an object with this count is found to be immortal."""
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in _VERSIONS or sys.byteorder != "little":
        return False
    probe = object()
    count = _count(id(probe))
    before, several = count.value, [probe] * 3
    if count.value != before + len(several):  # without the global interpreter lock the object begins with other fields
        return False
    count.value = _IMMORTAL
    more = [probe] * 3
    return bool(more) and count.value == _IMMORTAL


def _objects() -> list[object]:
    """Return each object that the garbage collector knows, or that one of these refers to, once or more; not those to be freed."""
    known = gc.get_objects()
    known += gc.get_referents(*known)
    parts = [
        code.co_consts + code.co_names for code in known if type(code) is types.CodeType
    ]  # the collector does not follow them
    known += itertools.chain.from_iterable(parts)
    mortal = {kind for kind in set(map(type, known)) if issubclass(kind, _MORTAL) or hasattr(kind, "fileno")}
    return [one for one in known if type(one) not in mortal]
