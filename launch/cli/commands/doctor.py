"""`dpcfl doctor`: checks of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from dpcfl_net.launch.cli.commands.parameters import MOST_CLIENTS, AsJson


def doctor(
    clients: Annotated[int, typer.Option(min=1, max=MOST_CLIENTS, help="number of worker processes of the planned run")] = 21,
    measure: Annotated[
        bool, typer.Option("--measure", help="measure the costs of runs on this host, from which dpcfl job predicts")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check whether runs work on this machine.

    It prints each check, what would fail and how to fix it. The exit code is 4 if a run would fail.
    """
    from dpcfl_net.launch.cli import doctor as doctors
    from dpcfl_net.launch.cli.json_output import messages_to_stderr, print_json
    from dpcfl_net.launch.cli.steps import computing

    with messages_to_stderr(as_json) as stdout:
        if measure:
            found = doctors.measure()
        else:
            with computing("checking"):
                found = doctors.check(clients)
    if as_json:
        print_json(found, stdout)
    else:
        typer.echo("\n".join(doctors.cost_lines(found) if measure else doctors.lines(found)))
    raise typer.Exit(0 if measure or found["able"] else 4)
