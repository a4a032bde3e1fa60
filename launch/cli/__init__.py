"""The command line."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit, quietly with 130 if Ctrl-C comes before or after the command itself.

    Args:
        arguments: Command line without the program's name; `sys.argv` if None.

    Raises:
        SystemExit: Always, with the exit code.
    """
    try:
        from dpcfl_net.launch.cli.commands import main as run

        run(arguments)
    except KeyboardInterrupt:
        exec("")  # see the end of commands.main
        sys.exit(130)
