"""Error messages and exit codes of commands."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from dpcfl_net.core.errors import ConfigError, DpcflError
from dpcfl_net.core.files import reason, shown, used_up
from dpcfl_net.launch.cli.output_room import drop_output

LONGEST_LINE = 2_000  # characters of one message


def is_unread() -> bool:
    """Return True if the reader of the output, such as `head`, has ended; further output is then dropped."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
        return True
    return False


def print_error(text: str) -> None:
    """Print a line on stderr; where it cannot be written, as on a full disk, the exit code alone says that the command failed.

    Args:
        text: The line.
    """
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        # What is left of the line would change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def allow_any_encoding() -> None:
    """Print `?` for characters that the terminal's encoding lacks, such as frames of tables in Latin-1 or ASCII."""
    if not isinstance(sys.stdout, io.TextIOWrapper):
        return
    # In the C locale errors is surrogateescape, which with UTF-8 prints undecodable bytes of file names as they are.
    if sys.stdout.errors == "strict" or not sys.stdout.encoding.lower().startswith("utf"):
        sys.stdout.reconfigure(errors="replace")


def report(error: Exception) -> int | None:
    """Print one line for each problem of an error.

    Args:
        error: What a command raised.

    Returns:
        The exit code; None for an error that only a bug can raise, of which nothing is printed.
    """
    problems, code = [str(error)], 2
    if isinstance(error, DpcflError):
        code = error.exit_code
        if isinstance(error, ConfigError):
            problems = [" ".join(problem.splitlines()) for problem in error.problems]
        if error.printed:
            return code
    elif why := used_up(error, "output"):
        problems, code = [why], 4
    elif isinstance(error, OSError) and error.filename is not None:
        problems = [f"{error.filename}: {reason(error)}"]
    elif isinstance(error, UnicodeEncodeError) and (encoding := sys.getfilesystemencoding()) != "utf-8":
        # A name or a path of a configuration, which is UTF-8 on every system.
        problems = [f"{shown(error.object)} is not {encoding.upper()}, the encoding of this system: set PYTHONUTF8=1"]
    elif type(error).__module__.split(".")[0] in ("click", "typer") and hasattr(error, "format_message"):
        message = _usage(error)
        if type(error).__name__ == "NoArgsIsHelpError":  # a command without arguments shows its help
            try:
                print(message, flush=True)
            except BrokenPipeError:
                is_unread()
                return 130
            return code
        problems = [_with_hint(message, getattr(error, "ctx", None), getattr(error, "option_name", ""))]
    else:
        return None
    for problem in problems:
        print_error(f"error: {_printable(problem)}")
    return code


def _usage(error: Any) -> str:
    """Message of a wrong command line; a value of a wrong type or out of range is named as in a configuration."""
    cause, parameter = error.__cause__, getattr(error, "param", None)
    if type(cause).__name__ != "ValidationError" or parameter is None:
        return str(error.format_message())
    from dpcfl_net.core.config_messages import sentences

    return "; ".join(sentences(cause, lambda key: "", max(parameter.opts, key=len)))


def _with_hint(message: str, context: Any, option: str) -> str:
    """Add where to read on, unless the message ends with a suggestion; for a setting given as an option, how to give it."""
    if context is None or message.endswith("?"):
        return message
    key = option.lstrip("-")
    if "." in key and any((parameter.metavar or "").startswith("KEY=VALUE") for parameter in context.command.params):
        return f"{message}; a setting has no dashes: {key}=VALUE"
    return f"{message.rstrip('.')}; see `{context.command_path} --help`"


def _printable(text: str) -> str:
    """Replace control characters and shorten long lines."""
    lines = ["".join(c if c.isprintable() else "?" for c in line) for line in text.splitlines()]
    return "\n".join(line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..." for line in lines)
