"""Output to a reader that may not read, such as a pager: a run does not wait for it."""

from __future__ import annotations

import os
import select
import sys
from typing import IO

STOPPED_S = 1.0  # time for the reader of a run that was stopped or has failed


def has_room(file: IO[str], patience_s: float) -> bool:
    """Return True if a line can be written without waiting, at the latest after `patience_s` seconds.

    A pipe with room takes a line of up to 4,096 bytes. A pipe without a reader, and an output that is no file, always have room.

    Args:
        file: The output.
        patience_s: Longest wait in seconds.
    """
    try:
        room = select.poll()
        room.register(file.fileno(), select.POLLOUT)
    except (OSError, ValueError):
        return True
    return bool(room.poll(1000 * patience_s))


def say_last(text: str) -> None:
    """Print the last line of a stopped or failed command; drop it if the output has no room within `STOPPED_S` seconds."""
    if has_room(sys.stdout, STOPPED_S):
        print(text)


def drop_output() -> None:
    """Drop what is left of the standard output, and what follows."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def drop_unwritten() -> None:
    """Drop what the standard output did not take: CPython 3.14 keeps it after an error, and ends with another exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        drop_output()
