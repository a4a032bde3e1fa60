"""Restores the environment of the calling process after a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from dpcfl_net.launch.placement import parents

VARIABLES = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")  # set by the import of scikit-learn


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore the environment afterwards, and end the parents of the processes.

    They keep the environment and the user's modules of their start, so the next run in a notebook needs new ones. Parents that
    ran before stay.
    """
    before = {name: os.environ.get(name) for name in VARIABLES}
    try:
        with parents.for_a_call():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
