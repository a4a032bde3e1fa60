"""Restores the environment of the calling process after a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

VARIABLES = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")  # set by the import of scikit-learn


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore the environment afterwards, and stop the preloaded parent of the workers.

    The parent keeps the environment and the user's modules of its start, so the next run in a notebook needs a new one. A
    parent that ran before stays.
    """
    before = {name: os.environ.get(name) for name in VARIABLES}
    server: Any = forkserver._forkserver
    started_before = server._forkserver_pid is not None
    modules = server._preload_modules
    try:
        yield
    finally:
        if not started_before:
            server._stop()
        server._preload_modules = modules
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
