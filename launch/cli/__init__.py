"""The command line."""

from dpcfl_net.launch.cli.commands import app, main

__all__ = ["app", "main"]
