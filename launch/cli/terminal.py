"""Standard streams that are closed, and output to a terminal that may go away while a command runs, as with a lost ssh connection."""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
from typing import Any


class _Terminal(io.FileIO):
    """A terminal; once it has gone away, output is dropped."""

    def write(self, data: Any, /) -> int:
        """Write, and redirect to the null device if there is no terminal any more."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        return super().write(data)


def open_closed_streams() -> None:
    """Open the null device in place of a closed stdin, stdout or stderr, as after `>&-`.

    The next file that is opened, such as a ledger, would otherwise get its number, and what a library prints would be written into it.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            os.set_inheritable(null, True)
            setattr(sys, name, open(null, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def terminal_width() -> int | None:
    """Return the width of the terminal on stdout in characters; None if stdout is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def outlive_terminal() -> None:
    """Let the command continue without output when its terminal goes away: only the signal HUP, if it comes, ends it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.isatty():
            stream.flush()
            buffer = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True))
