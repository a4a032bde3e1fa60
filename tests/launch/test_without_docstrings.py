"""Programs that start without docstrings, as under PYTHONOPTIMIZE=2."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import ROOT

PROGRAMS = (
    "adversaries.fuzz", "adversaries.hostile_worker", "adversaries.malicious_coordinator", "adversaries.malicious_sums",
    "launch.placement.agent",
)  # fmt: skip


@pytest.mark.parametrize(
    "program", [*(pytest.param(program, marks=pytest.mark.slow) for program in PROGRAMS[:-1]), PROGRAMS[-1]]
)
def test_a_program_starts_without_docstrings(program):
    """The agent of a host of `dpcfl launch` ended with a traceback."""
    assert "usage:" in help_of(f"dpcfl_net.{program}", optimize="2")


@pytest.mark.parametrize("command", [[], ["verify"], ["attack", "invert"]])
def test_commands_have_the_same_help_without_docstrings(command):
    assert help_of("dpcfl_net", *command, optimize="2") == help_of("dpcfl_net", *command, optimize="")


def help_of(program: str, *command: str, optimize: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", program, *command, "--help"], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONOPTIMIZE": optimize, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
