"""`dpcfl configs`, `dpcfl schema` and `dpcfl diff`: configurations and protocols as documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpcfl_net.launch.cli.commands.parameters import AsJson


def schema() -> None:
    """Print the JSON schema of configurations.

    It includes the options of all algorithms.
    """
    from dpcfl_net.experiment.config_schema import schema as build

    typer.echo(json.dumps(build(), indent=2))


def configs(as_json: AsJson = False) -> None:
    """List the packaged configurations.

    Run one with: dpcfl run NAME
    """
    from dpcfl_net.experiment.packaged import packaged
    from dpcfl_net.launch.cli.json_output import print_json

    found = packaged()
    if as_json:
        print_json([{"name": name, "description": description} for name, description in found.items()])
    else:
        typer.echo("\n".join(f"{name}\n    {description}" for name, description in found.items()))


def diff(
    mine: Annotated[
        Path, typer.Argument(metavar="MINE", help="protocol.json of a job, or a folder that holds it, such as a run")
    ],
    theirs: Annotated[Path, typer.Argument(metavar="THEIRS", help="the same of another job")],
) -> None:
    """Show where two protocol.json files differ.

    The exit code is 3 if they differ.
    """
    from dpcfl_net.core.job_differences import differences
    from dpcfl_net.core.job_reader import read_protocol
    from dpcfl_net.core.run_folder import RunFolder

    files = []
    for path in (mine, theirs):
        folder = RunFolder(path)
        if path.is_dir():
            folder.require(folder.protocol)
        files.append(folder.protocol if path.is_dir() else path)
    found = differences(*map(read_protocol, files))
    typer.echo("\n".join(found) if found else "the same")
    raise typer.Exit(3 if found else 0)
