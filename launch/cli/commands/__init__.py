"""The `dpcfl` command line: one module for each group of commands, assembled here. Heavy imports stay inside the commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from dpcfl_net.launch.cli.commands import (
    attack,
    bench,
    compare,
    data,
    doctor,
    documents,
    launch,
    processes,
    reproduce,
    run,
    sweep,
)

COMMANDS: tuple[Callable[..., None], ...] = (
    run.run, launch.launch, sweep.sweep, compare.compare, run.quickstart, run.job, processes.keygen, documents.diff,
    processes.coordinator, processes.worker, processes.observer, documents.account, documents.configs, documents.schema, run.inspect, run.verify,
    attack.audit, run.report, bench.bench, reproduce.reproduce, doctor.doctor,
)  # fmt: skip
GROUPS: dict[str, tuple[str, tuple[Callable[..., None], ...]]] = {
    "data": ("Data sets.", (data.fetch,)),
    "attack": ("Attacks of a server on the runs that it recorded.", (attack.nan_oracle, attack.selections, attack.invert)),
}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Differentially private clustered federated learning with real processes and a server that nobody trusts.",
)
for _command in COMMANDS:
    app.command()(_command)
for _name, (_help, _commands) in GROUPS.items():
    _group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=_help)
    for _command in _commands:
        _group.command()(_command)
    app.add_typer(_group, name=_name)


def _version(asked: bool) -> None:
    if asked:
        from dpcfl_net import __version__

        print(f"dpcfl_net {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Differentially private clustered federated learning as real processes and real messages."""


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line and exit.

    A user's mistake becomes one line on stderr and an exit code; only a bug shows a traceback.

    Args:
        arguments: Command line without the program's name; `sys.argv` if None.

    Raises:
        SystemExit: Always, with the exit code.
    """
    from dpcfl_net.launch.cli.errors import is_unread, report

    try:
        code = app(args=arguments, standalone_mode=False)
        if sys.stdout is not None:  # closed by the process that started this one
            sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort, SystemExit):  # SystemExit: the reader of the output has left, as `head` does
        code = 130
    except Exception as error:
        code = 130 if isinstance(error, BrokenPipeError) and is_unread() else report(error)
        if code is None:
            raise
    sys.exit(code if isinstance(code, int) else 0)
