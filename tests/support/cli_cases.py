"""The command line called in this process, as its tables of bad input do it hundreds of times."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dpcfl_net.launch import cli


@dataclass(frozen=True)
class Done:
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> Done:
    """Run `dpcfl` with these arguments here; an exception that would be a traceback passes through."""
    with pytest.raises(SystemExit) as left:
        cli.main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return Done(left.value.code, printed.out, printed.err)
