"""Ends of logs of processes on other hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dpcfl_net.launch.placement.host_aggregator import end_of_log

PROGRAM = """
import sys
from pathlib import Path
from dpcfl_net.launch.placement.remote_processes import RemoteProcess
process = RemoteProcess(Path(sys.argv[1]))
process.ended(70, "Cl\\u00e9 \\ufffd")
assert process.wait(0) == 70
"""


def test_a_launcher_of_another_encoding_takes_the_log_of_a_host(tmp_path: Path):
    """The text could not be written, and the launcher never heard of the end of the process."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "log"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "log").read_text(encoding="utf-8") == "Clé \ufffd\n"


def test_the_message_of_a_failure_is_the_last_line_of_the_log_of_a_host(tmp_path: Path):
    log, reason = tmp_path / "log", "RunFailed: no room"
    assert end_of_log(log, 0, reason) == reason
    log.write_text(before := "of an earlier process\n")
    log.open("a").write("begins\n")
    assert end_of_log(log, len(before), reason) == f"begins\n{reason}"
    log.open("a").write(f"{reason}\n")
    assert end_of_log(log, len(before), reason) == f"begins\n{reason}\n"
    log.open("a").write("client 3: begins\n")  # another thread, before the process ends
    assert end_of_log(log, len(before), reason) == f"begins\n{reason}\nclient 3: begins\n{reason}"
