"""`dpcfl account`, `dpcfl configs`, `dpcfl schema` and `dpcfl diff`: events, configurations and protocols as documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def account(
    json_file: Annotated[Path, typer.Option("--json", help="JSON file with events and delta; -: standard input")],
) -> None:
    """Compute epsilon of mechanisms, or noise for an epsilon.

    With target_epsilon in the file it computes the noise multiplier.
    """
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.core.files import parse_json, read_json, read_stdin, shown
    from dpcfl_net.privacy.accounting.document import account as solve

    most, where = 1 << 20, "standard input" if str(json_file) == "-" else str(json_file)
    document = parse_json(read_stdin(most), where) if str(json_file) == "-" else read_json(json_file, most)
    if not isinstance(document, dict):
        raise ConfigError(f"{where} must hold a JSON object with events and delta, got {shown(document)}")
    typer.echo(json.dumps(solve(document)))


def schema() -> None:
    """Print the JSON schema of configurations.

    It includes the options of all algorithms.
    """
    from dpcfl_net.experiment.config_schema import schema as build

    typer.echo(json.dumps(build(), indent=2))


def configs() -> None:
    """List the packaged configurations.

    `dpcfl run NAME` runs one.
    """
    from dpcfl_net.experiment.config import PACKAGED, packaged_names

    for name in packaged_names():
        first, _, _ = (PACKAGED / f"{name}.yaml").read_text().partition("\n")
        typer.echo(f"{name}\n    {first.removeprefix('#').strip()}")
    typer.echo("\n    Run one:                dpcfl run NAME\n    Show its plan and cost: dpcfl run NAME --dry-run")


def diff(mine: Path, theirs: Path) -> None:
    """Show where two protocol.json files differ."""
    from dpcfl_net.core.protocol import differences, read_protocol

    found = differences(read_protocol(mine), read_protocol(theirs))
    typer.echo("\n".join(found) if found else "the same")
    raise typer.Exit(3 if found else 0)
