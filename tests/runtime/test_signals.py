"""Every signal at every phase of a run: exit code, output, remaining files, and that the run can be resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import DPCFL, ROOT, assert_nothing_left, command_line, dpcfl, processes_of, write_config
from run_results import last_models, warnings_of

from dpcfl_net.results.summary import read_document

ROUNDS = 6
SETTINGS = {
    "data": {"dataset": "digits", "clients": [1, 1, 1], "train_per_client": 300, "test_per_client": 40},
    "model": {"name": "digits-cnn"}, "rounds": ROUNDS, "algorithm": {"name": "dp-ifca", "clusters": 2},
}  # fmt: skip
MOMENTS = ("starting", "mid-round", "last round", "writing the report")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
QUICK = {
    ("starting", signal.SIGTERM, 1), ("writing the report", signal.SIGINT, 1),
}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> bytes:
    out = tmp_path_factory.mktemp("undisturbed")
    done = dpcfl("run", write_config(out / "c", **SETTINGS), "--out", out / "runs")
    assert done.returncode == 0, done.stderr
    return last_models(next((out / "runs").iterdir()))


def test_a_signal_inside_an_exec_of_text_ends_with_the_usual_code(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from dpcfl_net.launch.cli import commands\n"
        "def app(**_):\n"
        "    exec('raise KeyboardInterrupt')\n"
        "commands._program = lambda: app\n"
        "commands.main([])\n"
    )
    found = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "script"], capture_output=True, text=True, check=False, cwd=tmp_path, env=found
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def started(tmp_path: Path, **sections) -> subprocess.Popen:
    """Start a run as a shell does: in a process group below this session (TSTP is ignored elsewhere), default signals."""
    return subprocess.Popen(
        [*DPCFL, "run", str(write_config(tmp_path / "c", **{**SETTINGS, **sections})), "--out", str(tmp_path / "runs")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in SIGNALS],
    )  # fmt: skip


def wait_for(moment: str, out: Path, run: subprocess.Popen) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and run.poll() is None:
        for folder in out.iterdir() if out.exists() else ():
            kept = folder / "checkpoints"
            if moment == "starting":
                return
            if moment == "mid-round" and (kept / "round_00002").exists():
                return
            if moment == "last round" and (kept / f"round_{ROUNDS - 1:05d}").exists():
                return
            if (
                moment == "writing the report"
                and (folder / "run.json").exists()
                and read_document(folder)["state"] == "finished"
            ):
                return
        time.sleep(0.002)
    raise AssertionError(f"{moment} was not reached: {run.communicate()}")


def cases() -> list:
    found = []
    for moment in MOMENTS:
        for number in SIGNALS:
            for times in (1, 2):
                marks = () if (moment, number, times) in QUICK else pytest.mark.slow
                found.append(pytest.param(moment, number, times, marks=marks, id=f"{moment}-{number.name}-{times}"))
    return found


ENDLESS = """
import pathlib, time, torch
def build(*_):
    if any(pathlib.Path(__file__).with_name("runs").glob("*")):
        time.sleep(120)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""


def endless_preparation(tmp_path: Path) -> dict:
    """A model that waits once the run folder exists, so that a signal reaches the preparation on a busy machine too."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    return {"model": {"name": "endless:build"}}


@pytest.mark.parametrize(("moment", "number", "times"), cases())
def test_a_signal_to_the_whole_group(undisturbed, tmp_path, monkeypatch, moment, number, times):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    run = started(tmp_path, **(endless_preparation(tmp_path) if moment == "starting" else {}))
    wait_for(moment, tmp_path / "runs", run)
    for _ in range(times):
        sent = time.monotonic()
        os.killpg(run.pid, number)
        time.sleep(0.15)
    output, errors = run.communicate(timeout=120)
    took = time.monotonic() - sent
    assert "Traceback" not in output + errors, output + errors
    for folder in (tmp_path / "runs").iterdir():
        assert_nothing_left(folder)
    for log in (tmp_path / "runs").glob("*/logs/*.log"):
        assert "Traceback" not in log.read_text(), log.read_text()
    if moment == "starting":
        assert run.returncode == 130, (output, errors)
        assert "the new run folder was removed" in output
        assert [*(tmp_path / "runs").iterdir()] == []
        return
    (folder,) = (tmp_path / "runs").iterdir()
    document = json.loads((folder / "run.json").read_text())
    if document["state"] == "finished":
        assert moment != "mid-round"  # it may have been over when the signal came
        assert run.returncode in (0, 130), (output, errors)
        if run.returncode == 130 or moment == "writing the report":
            assert (run.returncode, f"not written; write it with: dpcfl report {folder}" in output) == (130, True), (
                output,
                errors,
            )
            assert dpcfl("report", folder).returncode == 0
    else:
        assert document["state"] == "interrupted"
        assert (run.returncode, f"resume with: dpcfl run --resume {folder}" in output) == (130, True), (output, errors)
        assert took < 15
        again = dpcfl("run", "--resume", folder)
        assert again.returncode == 0, again.stderr + again.stdout
    assert (folder / "report.html").exists()
    assert last_models(folder) == undisturbed


def is_stopped(run: subprocess.Popen, limit_s: float = 60) -> bool:
    """Wait until a run is stopped, and a second more; False if it has ended."""
    process, deadline = psutil.Process(run.pid), time.monotonic() + limit_s
    while (status := process.status()) not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
        assert time.monotonic() < deadline, status
        time.sleep(0.02)
    time.sleep(1)
    return status == psutil.STATUS_STOPPED


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("moment", [pytest.param(m, marks=() if m == "mid-round" else pytest.mark.slow) for m in MOMENTS])
def test_ctrl_z_stops_a_run_and_fg_resumes_it(undisturbed, tmp_path, moment, times):
    run = started(tmp_path)
    wait_for(moment, tmp_path / "runs", run)
    stopped = 0
    for _ in range(times):
        os.killpg(run.pid, signal.SIGTSTP)
        stopped += is_stopped(run)
        os.killpg(run.pid, signal.SIGCONT)
        time.sleep(0.3)
    output, errors = run.communicate(timeout=60)
    assert run.returncode == 0, output + errors
    assert stopped == times or moment in ("last round", "writing the report")  # it may have been over when the signal came
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "run.json").read_text())["state"] == "finished"
    assert last_models(folder) == undisturbed
    assert_nothing_left(folder)


@pytest.mark.slow
def test_a_run_that_is_stopped_and_continued_goes_on(undisturbed, tmp_path):
    """Ctrl-Z for longer than any orphan's patience: no process leaves, none is restarted, and the bits are equal."""
    settings = {**SETTINGS, "runtime": {"orphan_timeout_s": 6, "round_timeout_s": 8, "max_restarts": 0}}
    run = subprocess.Popen(
        [*DPCFL, "run", str(write_config(tmp_path / "c", **settings)), "--out", str(tmp_path / "runs")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    wait_for("mid-round", tmp_path / "runs", run)
    (folder,) = (tmp_path / "runs").iterdir()
    family = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
    for process in family:
        process.suspend()
    time.sleep(11)
    for process in family:
        process.resume()
    output, errors = run.communicate(timeout=60)
    assert run.returncode == 0, output + errors
    assert not (folder / "warnings.jsonl").read_text(), (folder / "warnings.jsonl").read_text()
    assert last_models(folder) == undisturbed


@pytest.mark.slow
def test_the_fork_parents_death_ends_no_run(undisturbed, tmp_path):
    run = started(tmp_path)
    wait_for("mid-round", tmp_path / "runs", run)
    (folder,) = (tmp_path / "runs").iterdir()
    (parent,) = [p for p in psutil.Process(run.pid).children(recursive=True) if "parent of all workers" in command_line(p)]
    parent.kill()
    output, errors = run.communicate(timeout=60)
    assert run.returncode == 0, output + errors
    assert last_models(folder) == undisturbed
    assert_nothing_left(folder)


def started_and_in_a_round(tmp_path: Path, **runtime) -> tuple[subprocess.Popen, Path]:
    run = started(tmp_path, runtime=runtime)
    wait_for("mid-round", tmp_path / "runs", run)
    (folder,) = (tmp_path / "runs").iterdir()
    return run, folder


def kill(folder: Path, *titles: str) -> None:
    """Kill the processes of a run that have one of the titles, together."""
    chosen = [p for p in processes_of(folder) if any(f"dpcfl {title}" in command_line(p) for title in titles)]
    assert len(chosen) >= len(titles)
    for process in chosen:
        process.suspend()
    for process in chosen:
        process.kill()


def finished(run: subprocess.Popen, folder: Path) -> dict:
    """run.json of a run that has ended well; every round has been measured, but for those of a dead observer."""
    output, errors = run.communicate(timeout=90)
    assert run.returncode == 0, output + errors
    assert_nothing_left(folder)
    return json.loads((folder / "run.json").read_text())


@pytest.mark.slow  # a killed coordinator without restarts: below
@pytest.mark.parametrize("victim", ["coordinator", pytest.param("observer", marks=pytest.mark.slow)])
def test_a_role_that_dies_starts_again_and_the_run_gives_the_same_bits(undisturbed, tmp_path, victim):
    run, folder = started_and_in_a_round(tmp_path)
    kill(folder, victim)
    document = finished(run, folder)
    assert document["final"]["accuracy_mean"] is not None
    assert last_models(folder) == undisturbed
    (warning,) = [text for text in warnings_of(folder) if "restarted" in text]
    assert warning.startswith(f"{victim} ended with code -9")
    assert "(1 of at most 2 restarts)" in warning
    assert dpcfl("verify", folder).returncode == 0


@pytest.mark.slow
def test_all_processes_but_the_launcher_die_at_once_and_the_run_gives_the_same_bits(undisturbed, tmp_path):
    run, folder = started_and_in_a_round(tmp_path)
    for parent in psutil.Process(run.pid).children():
        assert "dpcfl parent of all processes" in command_line(parent)
        parent.kill()
    kill(folder, "coordinator", "observer", "client")
    finished(run, folder)
    assert last_models(folder) == undisturbed


@pytest.mark.slow
def test_the_observer_dies_after_the_coordinator_has_ended(undisturbed, tmp_path):
    run, folder = started_and_in_a_round(tmp_path)
    (observer,) = [p for p in processes_of(folder) if "dpcfl observer" in command_line(p)]
    observer.suspend()
    while any("dpcfl coordinator" in command_line(p) for p in processes_of(folder)):
        time.sleep(0.02)
    observer.kill()
    document = finished(run, folder)
    assert document["final"]["accuracy_mean"] is not None
    assert last_models(folder) == undisturbed


@pytest.mark.slow
def test_without_restarts_the_run_continues_without_its_observer(undisturbed, tmp_path):
    run, folder = started_and_in_a_round(tmp_path, max_restarts=0)
    kill(folder, "observer")
    document = finished(run, folder)
    assert document["final"]["accuracy_mean"] is not None  # the last round is evaluated after the end
    assert last_models(folder) == undisturbed
    assert any("the run continues without it" in text for text in warnings_of(folder))


@pytest.mark.slow
def test_without_restarts_the_death_of_the_coordinator_is_told_at_once_and_the_run_is_resumed(undisturbed, tmp_path):
    run, folder = started_and_in_a_round(tmp_path, max_restarts=0)
    kill(folder, "coordinator")
    killed = time.monotonic()
    assert run.stderr is not None
    line = run.stderr.readline()
    assert time.monotonic() - killed < 5
    assert line.startswith("error: coordinator ended with code -9"), line
    output, errors = run.communicate(timeout=60)
    assert (run.returncode, errors) == (4, ""), errors
    assert f"dpcfl run --resume {folder}" in output
    assert json.loads((folder / "run.json").read_text())["state"] == "failed"
    assert_nothing_left(folder)
    assert dpcfl("run", "--resume", folder).returncode == 0
    assert last_models(folder) == undisturbed


def test_a_run_whose_launcher_was_killed_is_shown_as_interrupted(tmp_path):
    run = started(tmp_path, rounds=400)
    wait_for("mid-round", tmp_path / "runs", run)
    (folder,) = (tmp_path / "runs").iterdir()
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    assert_nothing_left(folder)
    assert json.loads((folder / "run.json").read_text())["state"] == "running"
    assert read_document(folder)["state"] == "interrupted"
    done = dpcfl("compare", folder)
    assert (done.returncode, "is interrupted after" in done.stderr) == (2, True), done.stderr
