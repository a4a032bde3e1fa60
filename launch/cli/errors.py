"""What a command prints when it cannot go on, and its exit code."""

from __future__ import annotations

import os
import sys

from dpcfl_net.core.errors import ConfigError, DpcflError
from dpcfl_net.core.files import EXHAUSTED, reason

LONGEST_LINE = 2_000  # characters of one message


def is_unread() -> bool:
    """Whether the reader of the output has left, as `head` does; what is left to print is dropped then."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def report(error: Exception) -> int | None:
    """Print what went wrong, a line for each problem; the exit code, or None for what only a bug can raise."""
    problems, code = [str(error)], 2
    if isinstance(error, DpcflError):
        code = error.exit_code
        if isinstance(error, ConfigError):
            problems = [" ".join(problem.splitlines()) for problem in error.problems]
        if error.told:
            return code
    elif isinstance(error, OSError) and error.errno in EXHAUSTED:
        problems, code = [f"{error.filename or 'output'}: {reason(error)}"], 4
    elif isinstance(error, OSError) and error.filename is not None:
        problems = [f"{error.filename}: {reason(error)}"]
    elif type(error).__module__.split(".")[0] in ("click", "typer") and hasattr(error, "format_message"):
        problems = [error.format_message()]
        if type(error).__name__ == "NoArgsIsHelpError":  # a command without arguments shows its help
            print(problems[0])
            return code
    else:
        return None
    for problem in problems:
        print(f"error: {_printable(problem)}", file=sys.stderr)
    return code


def _printable(text: str) -> str:
    """Text from anywhere as a terminal may print it: no control characters, no line without end."""
    lines = ["".join(c if c.isprintable() else "?" for c in line) for line in text.splitlines()]
    return "\n".join(line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..." for line in lines)
