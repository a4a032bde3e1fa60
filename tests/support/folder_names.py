"""Folders whose names a power failure may take, with all that is in them, after the process that created them was killed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest


def after_each_kill(root: Path, patch: pytest.MonkeyPatch, use: Callable[[Path, set[str]], object]) -> None:
    """Call `use` twice on the same missing folder: killed before each creation or flush of a folder, and then not.

    Args:
        root: An empty folder.
        patch: Patches the calls of the operating system.
        use: Gets a folder, two levels of which are missing, and the set of the created folders whose names were not flushed so far.
    """
    real = os.mkdir
    for last in itertools.count():
        above, steps, unflushed = root / str(last), itertools.count(), set[str]()
        above.mkdir()

        def kill(steps: itertools.count[int] = steps, last: int = last) -> None:
            if next(steps) == last:
                raise KeyboardInterrupt

        def mkdir(path: Path, *mode: int, before: Callable[[], None], unflushed: set[str] = unflushed) -> None:
            before()
            real(path, *mode)
            unflushed.add(str(path))

        def fsync(fd: int, *, before: Callable[[], None], unflushed: set[str] = unflushed) -> None:
            before()
            flushed = os.readlink(f"/proc/self/fd/{fd}")
            unflushed -= {name for name in unflushed if os.path.dirname(name) == flushed}

        for before in (kill, lambda: None):
            with patch.context() as inner, suppress(KeyboardInterrupt):
                inner.setattr(os, "mkdir", partial(mkdir, before=before))
                inner.setattr(os, "fsync", partial(fsync, before=before))
                use(above / "run" / "folder", unflushed)
        assert unflushed == set()
        if next(steps) <= last:
            return
