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


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_starts_without_docstrings(program):
    """The agent of a host of `dpcfl launch` ended with a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", f"dpcfl_net.{program}", "--help"], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONOPTIMIZE": "2", "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage:" in done.stdout
