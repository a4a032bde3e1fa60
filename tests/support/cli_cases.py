"""Calls of the command line in this process, for tables with hundreds of bad inputs."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest

from dpcfl_net.launch import cli
from dpcfl_net.launch.cli import steps


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> Done:
    """Run `dpcfl` with these arguments in this process; unexpected exceptions pass through.

    On a machine that pauses, a step of a preparation would take long enough to be told on stderr among the errors.
    """
    with mock.patch.object(steps, "LONG_S", 3600.0), pytest.raises(SystemExit) as left:
        cli.main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return Done(left.value.code, printed.out, printed.err)
