"""Parameter types and checks shared by several commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dpcfl_net.launch.cli.commands import completion

# As in the configuration and in sweeps, whose modules are not imported for `--help`; a test compares them.
MOST_CLIENTS, MOST_SECONDS, MOST_ROUNDS, MOST_EPSILON = 1_000_000, 1_000_000, 100_000, 100_000
MOST_AGGREGATORS, MOST_CELLS = 1_000, 5_000


def above_zero(value: float) -> float:
    """Refuse zero and negative numbers."""
    if not value > 0:
        raise typer.BadParameter(f"{value:g} is not above 0")
    return value


def at_most(value: float | None, most: float) -> float | None:
    """Refuse numbers outside (0, most]."""
    if value is not None and not 0 < value <= most:
        raise typer.BadParameter(f"{value:g} is not above 0 and at most {most:,}")
    return value


def seconds(value: float) -> float | None:
    """Refuse durations outside (0, MOST_SECONDS]."""
    return at_most(value, MOST_SECONDS)


def address(value: str | None) -> str | None:
    """Refuse a text that is no address, so that the error names the option."""
    from dpcfl_net.core.errors import ConfigError
    from dpcfl_net.transport.sockets import host_of

    try:
        if value is not None:
            host_of(value)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    return value


def epsilon(value: float | None) -> float | None:
    """Refuse an epsilon outside (0, MOST_EPSILON]."""
    return at_most(value, MOST_EPSILON)


def delta(value: float | None) -> float | None:
    """Refuse a delta outside (0, 1)."""
    if value is not None and not 0 < value < 1:
        raise typer.BadParameter(f"{value:g} is not between 0 and 1")
    return value


def budget(epsilon: float | None, delta: float | None) -> tuple[float, float] | None:
    """The budget of a record as (epsilon, delta); None if neither is given."""
    if epsilon is None and delta is None:
        return None
    if epsilon is None or delta is None:
        raise typer.BadParameter(f"--budget-epsilon is {epsilon}, --budget-delta {delta}: give both or none")
    return epsilon, delta


def use_log_level(level: str | None) -> str | None:
    """Choose the level of the logs of this process and of those that it starts."""
    from dpcfl_net.core import process_log

    if level is not None:
        os.environ[process_log.VARIABLE] = process_log.checked_level(level, "--log-level")
        process_log.log_to_stderr()
    return level


NO_CONFIG = "give a configuration (a YAML file or a name that `dpcfl configs` lists), or --resume RUN"


def say_if_packaged(config: Path | None) -> Path | None:
    """Say so if a packaged configuration stands in for a file that is not there."""
    from dpcfl_net.experiment.packaged import replacement_note

    if config is not None and (note := replacement_note(config)):
        typer.echo(f"note: {note}", err=True)
    return config


_CONFIG = typer.Argument(
    metavar="CONFIG",
    help="YAML file, or a name that `dpcfl configs` lists",
    autocompletion=completion.configurations,
    callback=say_if_packaged,
)
Config = Annotated[Path, _CONFIG]
OptionalConfig = Annotated[Path | None, _CONFIG]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="settings to change, e.g. privacy.epsilon=3 algorithm=global",
        autocompletion=completion.overrides,
    ),
]
Out = Annotated[Path, typer.Option(help="parent of the run folder")]
Resume = Annotated[Path | None, typer.Option(help="resume the run in this folder after it stopped, crashed or failed")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="run folder")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout, and all messages on stderr")]
LogLevel = Annotated[
    str | None,
    typer.Option(
        callback=use_log_level,
        help="level of the logs: debug, info, warning or error (default: DPCFL_LOG_LEVEL, or info)",
        autocompletion=completion.one_of(("debug", "info", "warning", "error")),
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print errors only, and JSON with --json")]
Track = Annotated[
    list[str] | None,
    typer.Option(help="also send the rounds to tensorboard:FOLDER, mlflow:URI or wandb:PROJECT; may be repeated"),
]
DataRoot = Annotated[Path | None, typer.Option(help="folder of the data sets (default: that of the run)")]
