"""`dpcfl doctor`: what this machine can do."""

from __future__ import annotations

from typing import Annotated

import typer

from dpcfl_net.launch.cli.commands.parameters import MOST_CLIENTS


def doctor(
    clients: Annotated[int, typer.Option(min=1, max=MOST_CLIENTS, help="number of workers to check for")] = 21,
) -> None:
    """Show what this machine can do, what would fail here and how to fix it."""
    from dpcfl_net.launch.cli import doctor as doctors

    raise typer.Exit(doctors.run(clients))
