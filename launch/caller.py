"""What a run changes in the process that asks for it, and puts back at its end: environment and preloaded parent of workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

VARIABLES = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")  # set by the import of scikit-learn


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore the environment afterwards, and stop the parent that workers are forked from.

    That parent keeps its environment and the user's modules as they were when it started: the next run in a notebook needs a
    new one. A parent that the caller had started before stays.
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
