"""Ctrl-C in a terminal: what a run shows until its prompt is back."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import select
import subprocess
import termios
import time

from conftest import DPCFL, ROOT, only_run, write_config

from dpcfl_net.core import runlog


def read_all(window: int, seconds: float = 60) -> str:
    """Read what a command shows until it closes its end of the terminal."""
    found, deadline = b"", time.monotonic() + seconds
    output = select.poll()
    output.register(window, select.POLLIN)
    while time.monotonic() < deadline:
        if output.poll(100):
            try:
                found += os.read(window, 65536)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                break
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", found.decode(errors="replace"))


def test_an_interrupted_run_shows_what_it_still_computes(tmp_path):
    """Epsilon of hundreds of rounds takes seconds, after the screen of the run has gone."""
    settings = write_config(
        tmp_path / "c", rounds=2000, privacy={"epsilon": 5, "delta": 1e-4}, output={"transcript": "off"},
        runtime={"federation": "in-process"},
    )  # fmt: skip
    window, command = pty.openpty()
    termios.tcsetwinsize(command, (24, 80))
    run = subprocess.Popen(
        [*DPCFL, "run", str(settings), "--out", str(tmp_path / "runs")], stdin=command, stdout=command, stderr=command, cwd=ROOT,
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(command, termios.TIOCSCTTY, 0),
        env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(command)
    deadline = time.monotonic() + 60
    shown = ""
    while not any(runlog.read(path) for path in (tmp_path / "runs").glob("*/metrics.jsonl")):
        assert time.monotonic() < deadline, shown
        shown += read_all(window, 0.2)
    os.write(window, b"\x03")
    shown += read_all(window)
    assert run.wait(30) == 130
    os.close(window)
    stages = (
        r"round \d+/2000.*computing epsilon by round and writing models: \d+ s.*writing the report: \d+ s.*stopped after round"
    )
    assert re.search(stages, shown, re.DOTALL), shown
    assert (only_run(tmp_path / "runs") / "report.html").exists()
