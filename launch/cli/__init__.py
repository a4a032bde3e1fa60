"""The command line: one module for each group of commands, the live screen and the errors that users see."""

from dpcfl_net.launch.cli.commands import app, main

__all__ = ["app", "main"]
