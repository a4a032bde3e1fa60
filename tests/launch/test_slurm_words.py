"""What is said to SLURM's programs: the lines of batch scripts, and the options of the steps that start agents."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import call
from conftest import write_config
from fake_slurm import options_of

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.launch.placement import slurm, slurm_batch
from dpcfl_net.launch.placement.slurm_batch import Resources

ARGUMENTS = f"""#!{sys.executable}
import json, sys
print(json.dumps(sys.argv))
"""


@pytest.fixture
def programs(tmp_path, monkeypatch) -> Path:
    """A folder at the start of the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_batch_script_requests_one_task_per_node_that_is_told_of_its_time_limit_and_may_start_again(tmp_path):
    """`B:` sends the signal to the command alone, which ends its agents in order. The log of a requeued job is continued."""
    text = slurm_batch.script("true", "a name/of: mine", Resources(nodes=2))
    assert options_of(write(tmp_path / "script", text)) == {
        "job-name": "a_name_of__mine", "nodes": "2", "ntasks-per-node": "1", "cpus-per-task": "1", "time": "1:00:00",
        "output": "dpcfl-%j.log", "open-mode": "append", "requeue": "", "signal": "B:USR1@60",
    }  # fmt: skip


def test_the_command_of_an_array_does_not_run_outside_of_one(tmp_path):
    script = write(tmp_path / "script", slurm_batch.script('echo "$((1000 + SLURM_ARRAY_TASK_ID))"', "n", Resources()))
    runs = [
        subprocess.run([script], env=variables, capture_output=True, text=True, check=False)
        for variables in ({"SLURM_ARRAY_TASK_ID": "7"}, {})
    ]
    assert [run.stdout for run in runs] == ["1007\n", ""]
    assert "SLURM_ARRAY_TASK_ID: unbound variable" in runs[1].stderr


# As SLURM 22.05 reads them: it does not keep a backslash between single quotes either, and begins a comment with #.
QUOTED = {
    "a b": '"a b"', "a#b": '"a#b"', "it's": '"it\'s"', 'say "so"': '"say \\"so\\""', "a\\b": '"a\\\\b"', "plain-1:2@3%j": "plain-1:2@3%j",
}  # fmt: skip


@pytest.mark.parametrize("value", QUOTED)
def test_values_are_quoted_as_sbatch_reads_them(tmp_path, value):
    text = slurm_batch.script("true", "n", Resources(more=(f"comment={value}",)))
    line = f"#SBATCH --comment={QUOTED[value]}"
    assert line in text.splitlines()
    assert options_of(write(tmp_path / "script", line))["comment"] == value


def test_an_option_of_sbatch_is_given_once():
    assert Resources(more=("qos=long", "exclusive")).more == ("qos=long", "exclusive")
    with pytest.raises(ConfigError, match="--slurm gives 'qos' 2 times"):
        Resources(more=("qos=long", "exclusive", "qos=short"))


@pytest.mark.parametrize("time", ["5", "0", "2:00:00", "1-12", "1-12:30:00"])
def test_times_in_slurms_format(time):
    assert Resources(time=time).time == time
    with pytest.raises(ConfigError, match="--time is"):
        Resources(time=f"{time}h")


@pytest.mark.parametrize(("time", "enough"), [
    ("1", False), ("2", False), ("2:00", False), ("0:02:00", False), ("0-0:2", False), ("2:01", True), ("3", True), ("0:02:01", True),
    ("1:00:00", True), ("0-1", True), ("1-0", True),
])  # fmt: skip
def test_a_time_limit_leaves_room_before_its_signal(time, enough):
    """The signal came before the run had begun, and the job ended without a word."""
    if enough:
        assert Resources(time=time).time == time
        return
    with pytest.raises(ConfigError, match=r"--time is .*: must be above 2 minutes"):
        Resources(time=time)
    for own in ("signal=B:USR1@20", "time=3"):
        assert Resources(time=time, more=(own,)).time == time


def test_a_signal_before_the_command_handles_it_does_not_end_it(tmp_path):
    program = shlex.join([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); print('begins')"])
    script = write(tmp_path / "script", slurm_batch.script(program, "n", Resources()))
    assert subprocess.run([script], capture_output=True, text=True, check=False).stdout == "begins\n"


def test_an_agent_is_a_step_of_one_task_with_all_of_its_node_beside_the_launchers_step(programs, tmp_path):
    write(programs / "srun", ARGUMENTS)
    hosts = slurm.make_hosts([("n1", 4), ("n7", 2)], python="py", root="~/r", run="run-1", logs=tmp_path, cpu=True)
    assert [(host.name, host.location, host.workers) for host in hosts] == [("node-0", "n1", 4), ("node-1", "n7", 2)]
    connection = hosts[1].connect()
    _, *words = json.loads(next(iter(connection.reports())))
    connection.close(10)
    options = {word for word in words if word.startswith("--")} - {"--root", "--run", "--node", "--cpu"}
    assert options == {
        "--quiet", "--overlap", "--unbuffered", "--nodes=1", "--ntasks=1", "--nodelist=n7", "--cpus-per-task=2", "--mem=0",
        "--job-name=dpcfl-agent",
    }  # fmt: skip
    module = "dpcfl_net.launch.placement.agent"
    assert words[len(options) :] == ["py", "-P", "-m", module, "--root", "~/r", "--run", "run-1", "--node", "node-1", "--cpu"]


def test_an_allocation_that_cannot_be_read_is_a_clear_error(programs, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.delenv("SLURM_JOB_CPUS_PER_NODE", raising=False)
    with pytest.raises(ConfigError, match="SLURM_JOB_CPUS_PER_NODE is not set"):
        slurm.allocation()
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "72(x2),36")
    write(programs / "scontrol", "#!/bin/sh\necho 'no controller' >&2; exit 1\n")
    with pytest.raises(ConfigError, match=r"scontrol does not know the nodes 'n\[1-3\]': no controller"):
        slurm.allocation()
    write(programs / "scontrol", '#!/bin/sh\n[ "$*" = "show hostnames n[1-3]" ] && printf "n1\\nn2\\nn3\\n"\n')
    assert slurm.allocation() == [("n1", 72), ("n2", 72), ("n3", 36)]


def test_a_job_does_not_resume_the_run_of_an_earlier_one_with_its_id(tmp_path, capsys, monkeypatch):
    """Job ids begin again when SLURM's database is made anew, or after the largest."""
    config, before = write_config(tmp_path / "c"), signal.getsignal(signal.SIGUSR1)
    folder = tmp_path / "out" / "small-r-dpcfl-slurm-7"
    folder.mkdir(parents=True)
    for name in ("operator.pub", "placement.json"):
        (folder / name).write_text("of an earlier job")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    try:
        done = call(capsys, "launch", config, "--on", "slurm", "--requeue", "--out", tmp_path / "out")
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"error: {folder} is the run of an earlier job 7, and SLURM has not started this job before")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        done = call(capsys, "launch", config, "--on", "slurm", "--requeue", "--out", tmp_path / "out")
        assert done.out.startswith(f"job 7 was started again (1): resuming {folder}")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (folder / "operator.pub").read_text() == "of an earlier job"
