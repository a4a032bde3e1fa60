"""A terminal that goes away while a command runs: a lost ssh connection, a closed window."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from conftest import DPCFL, ROOT, assert_nothing_left, only_run, write_config

from dpcfl_net.core import runlog


@pytest.fixture
def terminal():
    """The two ends of a terminal: that of its window, and that of the command."""
    window, command = pty.openpty()
    yield window, command
    os.close(command)


def output_until(window: int, done) -> str:
    """Read what a command shows until a condition holds."""
    found, deadline = b"", time.monotonic() + 60
    output = select.poll()  # select.select takes no descriptor above 1,023
    output.register(window, select.POLLIN)
    while not done(found.decode(errors="replace")) and time.monotonic() < deadline:
        if output.poll(20):
            found += os.read(window, 65536)
    return found.decode(errors="replace")


def test_without_a_hang_up_signal_a_command_continues_without_output(terminal, tmp_path):
    window, command = terminal
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "from dpcfl_net.launch.cli import commands\n"
        "def app(**_):\n"
        "    print('shown')\n"
        "    sys.stdin.read()\n"
        "    print('dropped', flush=True)\n"
        "    print('dropped', file=sys.stderr)\n"
        "    return 5\n"
        "commands._program = lambda: app\n"
        "commands.main([])\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-m", "script"], stdin=subprocess.PIPE, stdout=command, stderr=command, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    assert "shown" in output_until(window, lambda text: "shown" in text)
    os.close(window)
    run.communicate(timeout=30)
    assert run.returncode == 5


def test_the_hang_up_of_its_terminal_interrupts_a_run_which_keeps_its_report(terminal, tmp_path):
    window, command = terminal
    settings = write_config(tmp_path / "c", rounds=2000, runtime={"federation": "in-process"}, output={"transcript": "off"})

    def take_the_terminal() -> None:
        fcntl.ioctl(command, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup ignore it

    run = subprocess.Popen(
        [*DPCFL, "run", str(settings), "--out", str(tmp_path / "runs")], stdin=command, stdout=command, stderr=command, cwd=ROOT,
        start_new_session=True, preexec_fn=take_the_terminal,
    )  # fmt: skip

    def in_a_round(text: str) -> bool:
        return any(runlog.read(path) for path in (tmp_path / "runs").glob("*/metrics.jsonl"))

    output_until(window, in_a_round)
    os.close(window)  # the kernel sends HUP
    assert run.wait(60) == 130
    folder: Path = only_run(tmp_path / "runs")
    assert json.loads((folder / "run.json").read_text())["state"] == "interrupted"
    assert (folder / "report.html").exists()
    assert_nothing_left(folder)
