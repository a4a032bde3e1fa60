"""`dpcfl watch` and `trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpcfl_net.launch.cli.commands.parameters import Track

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="run folder, also of a run in progress")]


def watch(
    folder: RunFolder,
    once: Annotated[bool, typer.Option("--once", help="show the run once and exit")] = False,
    track: Track = None,
    as_json: Annotated[bool, typer.Option("--json", help="with --once: print the run as one JSON document")] = False,
) -> None:
    """Follow a run that another process started.

    Ctrl-C ends the command, not the run. Exit code 4 if the run did not finish.
    """
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.launch.cli import watch as watching

    if as_json:
        from dpcfl_net.launch.cli.json_output import print_json

        if not once or track:
            raise ConfigError("--json belongs to --once, without --track: it prints one document")
        print_json(watching.document(folder))
        return
    try:
        if track:
            from dpcfl_net.report.trackers.named import open_trackers

            raise typer.Exit(watching.watch(folder, once=once, trackers=open_trackers(track)))
        raise typer.Exit(watching.watch(folder, once=once))
    except KeyboardInterrupt:
        typer.echo(f"stopped watching; the run is not affected; follow it again with: dpcfl watch {folder}")
        raise typer.Exit(130) from None


def trace(
    folder: RunFolder,
    out: Annotated[
        Path | None, typer.Option(help="file to write, compressed if it ends in .gz; default: RUN/trace.json")
    ] = None,
) -> None:
    """Write the times of a run for Perfetto.

    Chrome trace event JSON: open it at ui.perfetto.dev or in chrome://tracing.
    """
    from dpcfl_net.report.trace import write_trace

    typer.echo(write_trace(folder, out))
