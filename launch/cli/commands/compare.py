"""`dpcfl compare`: finished runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dpcfl_net.launch.cli.commands.parameters import AsJson


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN|SWEEP", help="folders of runs or sweeps")],
    force: Annotated[bool, typer.Option("--force", help="compare runs whose privacy or data differ, and mark them")] = False,
    form: Annotated[
        Literal["table", "latex", "csv"], typer.Option("--format", help="how to print the table; --csv writes single runs")
    ] = "table",
    csv: Annotated[Path | None, typer.Option(help="write one line per run as CSV")] = None,
    page: Annotated[Path | None, typer.Option(help="write plots and table as one HTML file")] = None,
    fairness: Annotated[
        bool, typer.Option("--fairness", help="add F_acc and F_loss, measured against models trained without privacy")
    ] = False,
    target: Annotated[
        float | None,
        typer.Option(
            help="mean accuracy such as 0.7: rounds and seconds until each run reached it (default: 95 % of the lowest of the "
            "runs' best accuracies)"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare finished runs over seeds.

    It refuses runs whose privacy or data differ, unless --force is given.
    """
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.launch.cli import compare as comparison

    if as_json and form != "table":
        raise ConfigError(f"--json and --format {form} both choose how the table is printed: give one of them")
    chosen = "json" if as_json else form
    comparison.compare_runs(folders, force=force, csv=csv, page=page, fairness=fairness, target=target, form=chosen)
