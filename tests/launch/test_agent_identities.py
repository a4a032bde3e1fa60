"""The agent of a host makes identities where the job needs them, keeps the secret parts, and tells what its host refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest
from agent_reports import reports_of

from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.launch.placement.messages import AgentError, PrepareKeys, PublicKeys, read_report
from dpcfl_net.transport.identities import read_identity


def keys_of(folder, *commands):
    """The public keys that an agent reports."""
    return [report for report in reports_of(folder, *commands) if isinstance(report, PublicKeys)]


@pytest.mark.parametrize("identities", [False, True])
def test_a_host_makes_identities_only_if_it_is_asked(tmp_path, identities):
    (made,) = keys_of(tmp_path / "run", PrepareKeys(clients=[1, 4], existing=False, identities=identities))
    assert sorted(made.keys) == [1, 4]
    assert sorted(made.identities) == ([1, 4] if identities else [])
    for client, public in made.identities.items():
        assert len(read_identity(RunFolder(tmp_path / "run").keys, client, public)) == 32
    (again,) = keys_of(tmp_path / "run", PrepareKeys(clients=[1, 4], existing=True, identities=identities))
    assert again == made


@pytest.mark.parametrize(
    ("root", "said", "code"),
    [
        ("/proc/1/nowhere", "/proc/1/nowhere: no such file or folder", 2),
        ("FILE/below", "a part of this path is a file, not a folder", 2),
    ],
)
def test_a_root_that_the_host_does_not_give_is_one_line_and_no_traceback(tmp_path, root, said, code):
    """The launcher showed the last kilobyte of the agent's traceback."""
    (tmp_path / "file").write_text("")
    words = ["--root", root.replace("FILE", str(tmp_path / "file")), "--run", "r", "--node", "a"]
    line = PrepareKeys(clients=[0], existing=False, identities=False).line()
    command = [sys.executable, "-m", "dpcfl_net.launch.placement.agent", *words]
    done = subprocess.run(command, input=line, capture_output=True, timeout=120, check=False)
    report = read_report(done.stdout.splitlines()[-1])
    assert isinstance(report, AgentError)
    assert report.code == done.returncode == code
    assert said in report.reason
    assert b"Traceback" not in done.stderr
