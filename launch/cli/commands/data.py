"""`dpcfl data`: download data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpcfl_net.launch.cli.commands import completion

FETCHABLE = (
    "mnist", "fashion-mnist", "cifar10", "cifar100", "emnist-balanced", "emnist-byclass", "emnist-bymerge", "emnist-digits",
    "emnist-letters", "emnist-mnist",
)  # fmt: skip

BUILT_IN = ("digits", "regression")


def fetch(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="mnist, fashion-mnist, cifar10, cifar100, or emnist-balanced, which gets all parts of EMNIST",
            autocompletion=completion.one_of(FETCHABLE),
        ),
    ],
    root: Annotated[Path | None, typer.Option(help="target folder (default: DPCFL_DATA, or the cache folder)")] = None,
    mirror: Annotated[str | None, typer.Option(metavar="URL", help="folder on a web server with the same files")] = None,
) -> None:
    """Download a data set.

    It comes from its official address, or from --mirror; its checksums are compared.
    """
    from dpcfl_net.data.datasets import fetch as download
    from dpcfl_net.launch.interrupts import Interrupts

    # TERM and HUP would else end the process before it has removed the incomplete file.
    with Interrupts() as interrupts, interrupts.raising():
        where = download(name, root, mirror, lambda url: typer.echo(f"downloading {url}", err=True))
    typer.echo(f"{name} needs no download" if name in BUILT_IN else f"{name} is in {where}")
