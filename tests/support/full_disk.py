"""A stand-in for a full disk: files of this process do not grow."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from dpcfl_net.core.files import naming


@contextmanager
def files_do_not_grow() -> Iterator[None]:
    """Let writes that would make a file longer fail, with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(path: str) -> None:
    """Fail as a write to a file on a full disk does; the main function of a child process."""
    with naming(path), open("/dev/full", "wb", buffering=0) as file:
        file.write(b"more than there is space for")
