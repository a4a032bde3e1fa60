"""Modules that a test writes into its own folder and imports in the process of all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpcfl_net.launch.placement import parents


@contextmanager
def own_modules(folder: Path) -> Iterator[None]:
    """Restore the module path afterwards, and forget the modules that were imported from files below a folder.

    A parent of workers that an earlier test has left may have imported others of the same names for its first job.
    """
    path, before = [*sys.path], {*sys.modules}
    parents.close()
    try:
        yield
    finally:
        parents.close()
        sys.path[:] = path
        for name in {*sys.modules} - before:
            if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
