"""`dpcfl reproduce`: figures and claims of the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpcfl_net.launch.cli.commands.parameters import MOST_CELLS, AsJson

WHOLE = ("all", "matrix")


def reproduce(
    figures: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIGURE",
            help="names that --list shows, e.g. r-dpcfl/fig3; all: every figure without a result; matrix: render the results",
        ),
    ] = None,
    scale: Annotated[
        str | None, typer.Option(help="laptop: sizes for two cores; paper: the paper's settings (default: laptop)")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="parent of the output folders (default: reproductions)")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="number of seeds per figure, which start at 0 (default: the figure's own)")
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="PAPER", help="with all: one paper, e.g. rr-cluster")] = None,
    time_budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="start no figure and no run after it, e.g. 2h; repeat the command to continue"),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_CELLS, help="runs of a figure at once; they share the cores of this machine (default: 1)"),
    ] = None,
    earlier: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="parent of earlier output folders, e.g. docs/measured: runs that their data.csv has are not run again",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--list", help="list all figures")] = False,
    as_json: AsJson = False,
) -> None:
    """Recompute a paper's figures and check its claims."""
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.launch.cli import reproduce as reproductions
    from dpcfl_net.launch.cli.json_output import messages_to_stderr, print_json

    whole = [name for name in figures or () if name in WHOLE]
    of_runs = {"--scale": scale, "--seeds": seeds, "--time-budget": time_budget, "--jobs": jobs}
    if every:
        others = {"FIGURE": figures, "--out": out, "--only": only, "--earlier": earlier, **of_runs}
        if given := [name for name, value in others.items() if value]:
            raise ConfigError(f"{', '.join(given)}: not with --list, which lists every figure")
        if as_json:
            print_json(reproductions.list_document())
        else:
            reproductions.list_all()
        return
    if not figures:
        raise ConfigError("give one or more figures, for example r-dpcfl/fig4; `dpcfl reproduce --list` lists all")
    if whole and len(figures) > 1:
        raise ConfigError(f"{whole[0]!r} is given together with figures: give it without them")
    if only is not None and whole != ["all"]:
        raise ConfigError("--only belongs to `dpcfl reproduce all`")
    if whole == ["matrix"] and (given := [name for name, value in of_runs.items() if value]):
        raise ConfigError(f"{', '.join(given)}: not with matrix, which runs nothing")
    if earlier is not None and whole:
        raise ConfigError(f"--earlier belongs to single figures, not to {whole[0]!r}")
    from dpcfl_net.launch.cli import reproduce_all

    scale, out, jobs = scale or "laptop", out or Path("reproductions"), jobs or 1
    with messages_to_stderr(as_json) as stdout:
        if whole == ["matrix"]:
            found: Any = reproduce_all.matrix(out)
        elif whole:
            found = reproduce_all.reproduce_all(scale, out, only, time_budget, seeds, jobs)
        else:
            found = reproductions.reproduce(figures, scale, out, time_budget, seeds, jobs, earlier)
    if as_json:
        print_json(found, stdout)
