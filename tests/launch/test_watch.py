"""`dpcfl watch`: follows a run from its folder alone; and the preparation that it shows."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_cases import call
from conftest import assert_nothing_left, at_a_terminal, only_run, write_config
from rich.console import Console
from run_folder import run_json, write_lines, write_round, write_run, write_start

from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError, RunFailed
from dpcfl_net.core.locks import is_held, run_lock
from dpcfl_net.launch import preparation
from dpcfl_net.launch.cli.watch import QUIET_S, watch
from dpcfl_net.launch.preparation import StepRecorder, Steps


class Terminal(Console):
    """A console that keeps its text."""

    def __init__(self, tty: bool) -> None:
        super().__init__(file=io.StringIO(), force_terminal=tty, width=90, height=40, highlight=False)

    @property
    def text(self) -> str:
        return self.file.getvalue()  # type: ignore[attr-defined]


class Script:
    """Replaces waiting: each call runs the next action, and time passes."""

    def __init__(self, *actions) -> None:
        self.actions, self.now = list(actions), 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.actions:
            self.actions.pop(0)()

    def clock(self) -> float:
        return self.now


def end(folder: Path, state: str, rounds: int) -> None:
    (folder / "run.json").write_text(json.dumps(run_json(state=state, rounds_done=rounds)))


def follow(folder: Path, *actions, tty: bool = False) -> tuple[int, str, Script]:
    console, script = Terminal(tty), Script(*actions)
    return watch(folder, console=console, sleep=script.sleep, clock=script.clock), console.text, script


def test_each_round_is_one_line_also_when_a_line_is_written_in_two_parts(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run", 3)
    line = json.dumps({"view": "server", "round": 3, "seconds": 1.5, "time": 1.0, "missing": []}) + "\n"

    def part(text: str) -> None:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(text)

    with run_lock(folder):
        code, text, script = follow(
            folder,
            lambda: write_round(folder, 1, 3),
            lambda: write_round(folder, 2, 3, missing=(7,)),
            lambda: part(line[:20]),
            lambda: part(line[20:]),
            lambda: end(folder, "finished", 3),
        )
    assert code == 0
    assert [each.split()[1] for each in text.splitlines() if each.startswith("round")] == ["1/3", "2/3", "3/3"]
    assert "warning: round 2: no answer from client 7" in text
    assert "Privacy: epsilon 5" in text
    assert script.actions == []


def test_a_finished_run_is_shown_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 4)
    for tty, words in ((False, "round 4/4"), (True, "finished after")):
        code, text, script = follow(folder, tty=tty)
        assert (code, script.now) == (0, 0.0)
        assert words in text
        assert "71.2 %" in text


@pytest.mark.parametrize("state", ["failed", "interrupted"])
def test_a_run_that_stopped_says_how_to_resume_it(tmp_path: Path, state: str) -> None:
    folder = write_start(tmp_path / "run", 9)
    write_round(folder, 1, 9)
    end(folder, state, 1)
    code, text, _ = follow(folder)
    assert code == 4
    assert f"stopped after round 1 of 9, {state}; resume with: dpcfl run --resume {folder}" in text
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(
        json.dumps({**run, "error": "client 5 ended"})
    )  # of an interrupted run: of an earlier attempt
    assert ("failed: client 5 ended" in follow(folder)[1]) == (state == "failed")
    (folder / "placement.json").write_text("{}")
    assert f"dpcfl launch --resume {folder} --on ..." in follow(folder)[1]


def test_a_run_whose_launcher_was_killed_is_dead_once_it_is_quiet(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run", 9)
    (folder / ".lock").touch()
    write_round(folder, 1, 9)
    # Without the observer's figures of round 2: its line waits for them until the run is dead.
    code, text, script = follow(
        folder,
        lambda: write_round(folder, 2, 9),
        lambda: write_lines(folder / "metrics.jsonl", [{"view": "server", "round": 3, "seconds": 1.0}]),
    )
    assert code == 4
    assert f"dead: run.json says 'running', and no process holds {folder / '.lock'}; resume with: dpcfl run --resume" in text
    assert "round 3/9" in text
    assert script.now >= 2 + QUIET_S, "new lines put it off"


def test_a_folder_that_is_removed_is_not_followed_for_ever(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run", 9)
    (folder / ".lock").touch()
    write_round(folder, 1, 9)
    actions = [lambda: folder.rename(tmp_path / "other"), *[lambda: None] * 60, lambda: pytest.fail("still followed")]
    with run_lock(folder), pytest.raises(RunFailed, match=r"run was removed or renamed while it was watched$"):
        follow(folder, *actions)


def test_a_resumed_run_is_followed_although_its_last_state_is_interrupted(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run", 2)
    write_round(folder, 1, 2)
    end(folder, "interrupted", 1)
    with run_lock(folder):
        code, text, _ = follow(
            folder, lambda: end(folder, "running", 1), lambda: write_round(folder, 2, 2), lambda: end(folder, "finished", 2)
        )
    assert code == 0
    assert "round 2/2" in text


@pytest.mark.parametrize("rounds", [(1, 2, 3), (1, 3)])  # a crash of the machine may take the lines of a round
def test_manually_started_processes_have_no_lock_and_end_with_their_last_round(tmp_path: Path, rounds: tuple[int, ...]) -> None:
    folder = write_start(tmp_path / "run", 3)
    (folder / "run.json").unlink()

    def wait_on() -> None:
        raise AssertionError("it waits for another round")

    code, text, script = follow(folder, *(partial(write_round, folder, at, 3) for at in rounds), wait_on)
    assert (code, script.actions) == (0, [wait_on])
    assert f"write its report with: dpcfl report {folder}" in text


def test_once_is_one_picture_of_a_running_dead_or_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_start(tmp_path / "run", 9)
    write_round(folder, 1, 9)
    with run_lock(folder):
        done = call(capsys, "watch", folder, "--once")
        assert (done.code, done.err) == (0, "")
        assert all(words in done.out for words in ("fmnist-r-dpcfl", "round 1/9", "elapsed", "A minority"))
        assert "workers" in done.out
    dead = call(capsys, "watch", folder, "--once").out
    assert "dead: no process runs it" in dead
    assert "workers" not in dead
    end(folder, "finished", 9)
    assert "finished after 2:48" in call(capsys, "watch", folder, "--once").out


def test_what_is_no_run_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").touch()
    for name, words in {
        "absent": "does not exist (yet)",
        "file": "it is a file",
        "empty": "holds no file of a run",
        "sweep": "is a sweep",
    }.items():
        done = call(capsys, "watch", tmp_path / name)
        assert (done.code, done.out) == (2, "")
        assert words in done.err


def test_a_run_that_is_being_prepared_shows_the_steps_that_are_done(tmp_path: Path, monkeypatch) -> None:
    now = iter([100.0, 101.5, 101.5, 101.5])
    monkeypatch.setattr(preparation, "time", SimpleNamespace(monotonic=lambda: next(now)))
    folder = tmp_path / "run"
    folder.mkdir()
    console, seen = Terminal(False), []
    with run_lock(folder):
        steps = StepRecorder(folder, seen.append)
        steps.begin("data set digits")
        steps.begin("noise multiplier for epsilon 5")
        assert watch(folder, once=True, console=console) == 0
        steps.end()
        steps.end()
    assert "prepared: data set digits, 1.5 s" in console.text
    assert seen == ["data set digits", "noise multiplier for epsilon 5"]
    spans = runlog.read(folder / "spans.jsonl")
    assert [(span["who"], span["what"], span["round"]) for span in spans] == [("launcher", step, 0) for step in seen]
    assert all(span["start"] <= span["end"] for span in spans)


def test_steps_add_up() -> None:
    now = iter([0.0, 1.5, 1.5, 4.0, 4.0, 4.0])
    steps = Steps(lambda: next(now))
    assert (steps.summary(), steps.running) == ("", None)
    steps.begin("a")
    steps.begin("b")
    assert steps.running == ("b", 2.5)
    steps.end()
    steps.end()
    assert steps.summary() == "prepared in 4.0 s (a, 1.5 s; b, 2.5 s)"


def test_a_run_starts_while_it_is_watched(tmp_path: Path) -> None:
    """The probe of a lock holds it for a moment, which must not keep a launcher from its folder."""
    (tmp_path / ".lock").touch()
    stop = threading.Event()

    def probe() -> None:
        while not stop.is_set():
            is_held(tmp_path)

    watcher = threading.Thread(target=probe)
    watcher.start()
    try:
        for _ in range(200):
            with run_lock(tmp_path):
                assert is_held(tmp_path) in (True, None)
    finally:
        stop.set()
        watcher.join()
    started = time.monotonic()
    with run_lock(tmp_path), pytest.raises(ConfigError, match="being run by another process"), run_lock(tmp_path):
        pass
    assert time.monotonic() - started < 30
    assert is_held(tmp_path) is False
    os.remove(tmp_path / ".lock")
    assert is_held(tmp_path) is None


@pytest.mark.slow
def test_a_real_run_is_followed_by_another_process_and_its_death_is_reported(tmp_path: Path) -> None:
    run = at_a_terminal("run", write_config(tmp_path / "c", rounds=400), "--out", tmp_path / "out")
    try:
        lines = iter(run.stdout.readline, "")
        assert any(line.startswith("round 1/400") for line in lines)
        folder = only_run(tmp_path / "out")
        first = at_a_terminal("watch", folder)
        assert first.stdout.readline().startswith("round 1/400")
        first.send_signal(signal.SIGINT)
        assert (first.wait(30), run.poll()) == (130, None)
        assert "the run is not affected" in first.stdout.read()
        second = at_a_terminal("watch", folder)
        assert second.stdout.readline().startswith("round 1/400")
        assert any(line.startswith("round 2/400") for line in lines)
    finally:
        run.kill()
        run.wait(30)
    said, _ = second.communicate(timeout=60)
    assert second.returncode == 4
    assert "round 2/400" in said
    assert said.splitlines()[-1].endswith(f"resume with: dpcfl run --resume {folder}")
    assert_nothing_left(folder, 30)
