"""Ends of logs of processes on other hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path
from dpcfl_net.launch.placement.remote_processes import RemoteProcess
process = RemoteProcess(Path(sys.argv[1]))
process.ended(70, "Cl\\u00e9 \\ufffd")
assert process.poll() == 70
"""


def test_a_launcher_of_another_encoding_takes_the_log_of_a_host(tmp_path: Path):
    """The text could not be written, and the launcher never heard of the end of the process."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "log"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "log").read_text(encoding="utf-8") == "Clé \ufffd\n"
