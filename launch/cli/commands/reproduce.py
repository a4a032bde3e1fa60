"""`dpcfl reproduce`: figures and claims of the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def reproduce(
    figures: Annotated[list[str] | None, typer.Argument(help="for example r-dpcfl/fig3; --list names them all")] = None,
    scale: Annotated[str, typer.Option(help="laptop, or paper (the paper's settings)")] = "laptop",
    out: Annotated[Path, typer.Option(help="parent of the figure's folder")] = Path("reproductions"),
    every: Annotated[bool, typer.Option("--list", help="list the figures")] = False,
) -> None:
    """Recompute figures of the papers and check the papers' claims."""
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.launch.cli import reproduce as reproductions

    if every:
        reproductions.list_all()
        return
    if not figures:
        raise ConfigError("give one or more figures, or --list")
    reproductions.reproduce(figures, scale, out)
