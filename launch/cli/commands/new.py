"""`dpcfl new`: start a project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpcfl_net.launch.cli.commands.parameters import AsJson


def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="new or empty folder; its name is that of the project")],
    as_json: AsJson = False,
) -> None:
    """Start a project with data set, algorithm and tests.

    It writes a configuration, a data set and an algorithm of your own, a test, README.md and pyproject.toml.
    """
    import shlex
    from importlib.util import find_spec

    from dpcfl_net.launch.cli.json_output import print_json
    from dpcfl_net.launch.cli.new import create

    files = create(folder)
    if as_json:
        print_json({"folder": folder, "files": files})
        return
    typer.echo("\n".join(map(str, files)))
    install = "" if find_spec("pytest") else "pip install pytest && "
    typer.echo(f"\nnext: cd {shlex.quote(str(folder))} && {install}pytest && dpcfl run config.yaml")
