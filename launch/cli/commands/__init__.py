"""The `dpcfl` command line: one module for each group of commands, assembled here. Heavy imports stay inside the commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import check_text
from dpcfl_net.launch.cli.commands import (
    account,
    attack,
    bench,
    compare,
    completion,
    conformance,
    data,
    doctor,
    documents,
    launch,
    new,
    processes,
    reproduce,
    run,
    serve,
    sweep,
    tune,
    watch,
)
from dpcfl_net.launch.cli.commands.sections import SectionedGroup, description

ATTACKS = "Measure privacy by attacks"
# Commands by what one wants to do, in the order of `dpcfl --help`.
SECTIONS: dict[str, tuple[Callable[..., None], ...]] = {
    "Run experiments": (run.quickstart, run.run, sweep.sweep, tune.tune, launch.launch),
    "Look at results": (
        watch.watch, run.report, compare.compare, serve.serve, watch.trace, run.clients, run.inspect, run.verify, run.export, reproduce.reproduce,
    ),
    "Configure": (new.new, documents.configs, documents.schema, account.account),
    ATTACKS: (attack.audit, conformance.conformance),
    "Check this machine": (doctor.doctor, bench.bench),
    "Start processes manually": (
        run.job, processes.keygen, processes.coordinator, processes.aggregator, processes.worker, processes.observer, documents.diff,
    ),
}  # fmt: skip
# Groups of commands: section, help and commands.
GROUPS: dict[str, tuple[str, str, tuple[Callable[..., None], ...]]] = {
    "data": ("Configure", "Download data sets.", (data.fetch,)),
    "attack": (
        ATTACKS,
        "Attack a recorded run as its server could.",
        (attack.nan_oracle, attack.selections, attack.invert, attack.membership),
    ),
}
CLASSES: dict[Callable[..., None], type[TyperCommand]] = {account.account: account.AccountCommand}

app = typer.Typer(
    cls=SectionedGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Differentially private clustered federated learning with an untrusted server, simulated with real processes. "
    "To start: dpcfl quickstart. For each command: dpcfl COMMAND --help.",
)
for _section, _commands in SECTIONS.items():
    for _command in _commands:
        app.command(help=description(_command), rich_help_panel=_section, cls=CLASSES.get(_command))(_command)
for _name, (_section, _help, _commands) in GROUPS.items():
    _group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=_help)
    for _command in _commands:
        _group.command(help=description(_command))(_command)
    app.add_typer(_group, name=_name, rich_help_panel=_section)


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
    """Options of `dpcfl` before a command."""
    from dpcfl_net.core import process_log

    process_log.log_if_chosen()


@cache
def _program() -> Any:
    """Build the program from the signatures of all commands; this takes longer than most command lines, so it happens once."""
    return typer.main.get_command(app)


def _check(arguments: list[str]) -> None:
    """Refuse empty arguments, which as a path would name the current folder, and those that no JSON or HTML file can hold.

    Raises:
        ConfigError: If there is one.
    """
    for index, argument in enumerate(arguments):
        check_text(argument, f"argument {index + 1}")
        if not argument or (argument.startswith("--") and argument.endswith("=")):
            after = f", after {arguments[index - 1]}" if index and not argument else ""
            raise ConfigError(f"argument {argument or index + 1} is empty{after}: is a variable of the shell unset?")


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line and exit.

    A user error prints one line on stderr and sets the exit code; only a bug shows a traceback.

    Args:
        arguments: Command line without the program's name; `sys.argv` if None.

    Raises:
        SystemExit: Always, with the exit code.
    """
    from dpcfl_net.launch.cli.errors import allow_any_encoding, is_unread, report
    from dpcfl_net.launch.cli.output_room import drop_unwritten
    from dpcfl_net.launch.cli.terminal import open_closed_streams, outlive_terminal

    open_closed_streams()
    outlive_terminal()
    allow_any_encoding()
    try:
        _check(sys.argv[1:] if arguments is None else arguments)
        code = _program()(args=arguments, prog_name="dpcfl", standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as exit_:  # of completion; otherwise the reader of the output, such as `head`, has ended
        code = exit_.code if completion.VARIABLE in os.environ or not exit_.code else 130
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        code = 130 if isinstance(error, BrokenPipeError) and is_unread() else report(error)
        if code is None:
            raise
        drop_unwritten()
    # CPython ends with SIGINT after any KeyboardInterrupt inside an exec of text, even a caught one, such as that of a dataclass during
    # an import. The next exec of text forgets it.
    exec("")
    sys.exit(code if isinstance(code, int) else 0)
