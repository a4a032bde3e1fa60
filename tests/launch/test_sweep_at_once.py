"""Sweeps whose cells run at the same time: order, shares of the cores, failures, two sweeps of one folder, Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from conftest import DPCFL, ROOT, assert_nothing_left, at_a_terminal, command_line, dpcfl, write_config
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.locks import run_lock
from dpcfl_net.experiment import config as configuration
from dpcfl_net.launch import running, sweep_grid, sweeps
from dpcfl_net.launch.cells import local, memory, process, queue
from dpcfl_net.launch.cells.labels import labels
from dpcfl_net.launch.cells.local import CellProcess, LocalCells, share
from dpcfl_net.launch.cells.outcome import CellOutcome
from dpcfl_net.launch.cells.queue import CellQueue
from dpcfl_net.launch.cells.run_cell import run_cell, with_slots
from dpcfl_net.launch.cli import reproduce
from dpcfl_net.launch.cli.cell_screen import CellScreen, ShownCells
from dpcfl_net.launch.sweeps import Sweep

TINY = {
    "data": {"dataset": "digits", "clients": [1, 1], "train_per_client": 200, "test_per_client": 20},
    "rounds": 2,
    "algorithm": {"name": "global"},
    "runtime": {"federation": "in-process"},
    "output": {"transcript": "off"},
    "privacy": {"epsilon": 5, "delta": 1e-4},
}


def tiny(folder: Path, **changes) -> Path:
    return write_config(folder, **{**TINY, **changes})


def states(out: Path) -> list[str]:
    (path,) = out.glob("*-sweep-*/sweep.json")
    return [cell["state"] for cell in json.loads(path.read_text())["cells"]]


# The order in which cells run


class Place:
    """Runs at most `size` cells at once; `ends` gives the states with which a cell ends, one per start."""

    def __init__(self, folders: list[Path], size: int, **ends: list[str]) -> None:
        self.folders, self.size, self.ends = folders, size, {int(k[1:]): list(states) for k, states in ends.items()}
        self.started, self.busy, self.closed, self.most = [], [], False, 0

    def free(self):
        return len(self.busy) < self.size

    def start(self, index, left):
        self.started.append((index, left))
        self.busy.append(index)
        self.most = max(self.most, len(self.busy))

    def wait(self, also, timeout_s):
        if not self.busy:
            time.sleep(0.01)
            return []
        index = self.busy.pop(0)
        state = self.ends[index].pop(0) if self.ends.get(index) else "finished"
        return [(index, CellOutcome(self.folders[index], state))]

    def stop(self):
        ended, self.busy = [(index, CellOutcome(self.folders[index], "interrupted")) for index in self.busy], []
        return ended

    def close(self):
        self.closed = True


def folders(path: Path, count: int) -> list[Path]:
    made = [path / str(k) for k in range(count)]
    for folder in made:
        folder.mkdir()
    return made


def test_cells_start_in_the_order_of_the_grid_and_no_more_than_fit(tmp_path):
    runs = folders(tmp_path, 5)
    place, ended = Place(runs, 2, _3=["failed"]), []
    outcomes = CellQueue(runs, place, lambda index, outcome: ended.append(index)).run()
    assert [outcome.state for outcome in outcomes] == ["finished"] * 3 + ["failed", "finished"]
    assert [index for index, _ in place.started] == [0, 1, 2, 3, 4]
    assert [left for _, left in place.started] == [5, 5, 4, 3, 2]
    assert ended == [0, 1, 2, 3, 4]
    assert (place.most, place.closed) == (2, True)


def test_finished_cells_take_no_place(tmp_path):
    runs = folders(tmp_path, 2)
    (runs[0] / "run.json").write_text('{"state": "finished"}')
    place = Place(runs, 1)
    outcomes = CellQueue(runs, place, lambda index, outcome: None).run()
    assert [(outcome.state, outcome.cached) for outcome in outcomes] == [("finished", True), ("finished", False)]
    assert [index for index, _ in place.started] == [1]


def test_labels_have_what_tells_runs_of_one_algorithm_apart():
    cells = [
        configuration.load(ROOT / "configs" / "rr_cluster" / "regression.yaml", settings)
        for settings in (
            ["algorithm.name=dp-fedavg", "privacy.epsilon=2"],
            ["algorithm.min_cluster_size=0", "privacy.epsilon=2"],
            ["algorithm.min_cluster_size=9", "privacy.epsilon=4", "seed=3"],
        )
    ]
    assert [label.partition(" ")[2] for label in labels(cells)] == [
        "dp-fedavg epsilon=2 seed=0",
        "rr-cluster epsilon=2 min_cluster_size=0 seed=0",
        "rr-cluster epsilon=4 min_cluster_size=9 seed=3",
    ]


def test_no_cell_starts_after_its_time(tmp_path, monkeypatch):
    runs = folders(tmp_path, 5)
    (runs[3] / "run.json").write_text('{"state": "finished"}')
    clock = iter([1.0, 2.0, 3.0, 4.0])  # one look per cell that could start
    monkeypatch.setattr(queue.time, "monotonic", lambda: next(clock))
    place, ended = Place(runs, 2), []
    limited = CellQueue(runs, place, lambda index, outcome: ended.append(index), until=2.5)
    outcomes = limited.run()
    assert [outcome.state for outcome in outcomes] == ["finished", "finished", "waiting", "finished", "waiting"]
    assert [index for index, _ in place.started] == [0, 1]
    assert limited.late == [2, 4]
    assert sorted(ended) == [0, 1, 3]
    assert place.closed


def test_a_cell_that_another_process_runs_comes_last(tmp_path):
    runs, tried, ended = folders(tmp_path, 3), [], []

    class Watcher:
        def update(self, running, in_use):
            tried.append((list(running), list(in_use)))
            if len(tried) > 5 and held:
                held.pop().__exit__(None, None, None)

        def close(self):
            tried.append("closed")

    held = [run_lock(runs[0])]
    held[0].__enter__()
    place = Place(runs, 1, _1=["in use"])  # cell 1 is taken between the look at its lock and its start
    outcomes = CellQueue(runs, place, lambda index, outcome: ended.append(index), Watcher()).run()
    assert [outcome.state for outcome in outcomes] == ["finished"] * 3
    assert ended == [2, 1, 0]
    assert [index for index, _ in place.started][:2] == [1, 2]
    assert [index for index, _ in place.started].count(0) == 1
    assert not held
    assert tried[:4] == [([], [0, 1]), ([], [0, 1]), ([], [0]), ([], [0])]
    assert tried[-2:] == [([], []), "closed"]


@pytest.mark.parametrize("how", ["a cell", "a signal"])
def test_an_interrupted_cell_or_a_signal_stops_the_sweep(tmp_path, monkeypatch, how):
    runs = folders(tmp_path, 4)
    place, signals = Place(runs, 2, _0=["interrupted"]), iter([signal.SIGTERM])
    if how == "a signal":
        monkeypatch.setattr(place, "wait", lambda also, timeout_s: signal.raise_signal(next(signals)) or [])
    outcomes = CellQueue(runs, place, lambda index, outcome: None).run()
    assert [outcome.state for outcome in outcomes] == ["interrupted", "interrupted", "waiting", "waiting"]
    assert sweeps.stopped(outcomes)


def test_a_signal_at_the_end_of_a_cell_stops_the_sweep_that_runs_it_in_this_process(tmp_path, monkeypatch):
    """The cell hears of it, and has finished: what is recorded at its end takes seconds."""
    cells = [configuration.load(tiny(tmp_path / "c"), [f"seed={seed}"]) for seed in range(3)]
    runs = [sweep_grid.cell_folder(cell, tmp_path) for cell in cells]
    for run in runs:
        run.mkdir()
        (run / "protocol.json").touch()
    monkeypatch.setattr(running, "run_in", lambda *_: (signal.raise_signal(signal.SIGINT), ({"state": "finished"}, None))[1])
    place = queue.InThisProcess(lambda index: run_cell(cells[index], tmp_path, running.Quiet()))
    outcomes = CellQueue(runs, place, lambda index, outcome: None).run()
    assert [outcome.state for outcome in outcomes] == ["finished", "waiting", "waiting"]


def test_a_signal_at_the_end_of_the_last_run_ends_the_command_that_would_start_more(tmp_path, monkeypatch):
    """`dpcfl reproduce` runs a figure in several lists of runs."""

    def finish(folder, *_):
        signal.raise_signal(signal.SIGINT)
        document = {"state": "finished", "final": {"accuracy_mean": 0.5, "accuracy_worst": 0.5}}
        (folder / "run.json").write_text(json.dumps(document))
        return document, None

    cell, said = configuration.load(tiny(tmp_path / "c")), []
    run = sweep_grid.cell_folder(cell, tmp_path)
    run.mkdir()
    (run / "protocol.json").touch()
    monkeypatch.setattr(running, "run_in", finish)
    with pytest.raises(KeyboardInterrupt):
        sweeps.run_cells([cell], tmp_path, said.append)
    assert len(said) == 1
    sweeps.run_cells([cell], tmp_path, said.append)  # finished: no signal, and nothing runs


# Shares of the machine


@given(st.integers(1, 256), st.integers(1, 256))
def test_cells_share_the_cores_equally_and_leave_none_idle(cores, cells):
    assert share(cores, cells) >= 1
    assert share(cores, cells) * cells >= cores
    assert (share(cores, cells) - 1) * cells < cores


def test_a_share_sets_the_slots_unless_the_configuration_does(tmp_path):
    auto = configuration.load(tiny(tmp_path))
    fixed = configuration.load(tiny(tmp_path), ["runtime.slots=7"])
    assert with_slots(auto, 3).runtime.slots == 3
    assert with_slots(auto, None).runtime.slots == "auto"
    assert with_slots(fixed, 3).runtime.slots == 7
    assert sweep_grid.job_key(with_slots(auto, 3)) == sweep_grid.job_key(auto)


def test_the_note_on_memory_warns_only_if_the_cells_may_not_fit(tmp_path):
    cells = [configuration.load(tiny(tmp_path))] * 8
    said = re.fullmatch(
        r"4 cells at once take about (.*) GiB besides .*; 64\.0 GiB are available", memory.note(cells, 4, available=64 << 30)
    )
    assert said
    assert 0.5 < float(said[1]) < 8
    assert memory.note(cells, 4, available=1 << 30).startswith("warning: 4 cells at once take about ")
    assert memory.note(cells[:2], 4, available=64 << 30).startswith("2 cells at once")
    many = configuration.load(tiny(tmp_path, runtime={}), ["data.clients=[2,2]"])
    largest = memory.note([many] * 2, 2, available=64 << 30)
    assert memory.note([*cells, many, many], 2, available=64 << 30) == largest != memory.note(cells, 2, available=64 << 30)


# Stands in for `cells.process`: each cell ends as its seed says, and tells its slots as its seconds.
PLAYED = """
import json, os, signal, sys, time
for line in sys.stdin:
    cell = json.loads(line)
    seed = cell["config"]["seed"]
    if seed == 1:
        sys.exit("burnt")
    if seed == 5:  # ends as it is stopped
        signal.signal(signal.SIGTERM, lambda *_: stopped.append(0))
    if seed > 3:
        stopped = []
        open(cell["run"], "x").close()
        while not stopped:
            time.sleep(0.01)
    outcome = dict(state="interrupted" if seed == 3 else "finished", cached=False, seconds=float(cell["slots"]), error="")
    os.write(1, b"no outcome" if seed == 2 else json.dumps(outcome).encode())
    os.write(1, b"\\n")
"""


def test_processes_run_one_cell_after_another_and_report_every_end(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "MAIN", PLAYED)
    monkeypatch.setattr(local, "usable_cores", lambda: 5)
    configs = [configuration.load(tiny(tmp_path), [f"seed={seed}"]) for seed in range(6)]
    store = tmp_path / "store"
    store.mkdir()
    place, ended = LocalCells(tmp_path / "sweep", configs, store, 2), {}

    def start(*cells: int, left: int) -> None:
        for cell in cells:
            assert place.free()
            place.start(cell, left)

    def take(count: int) -> None:
        deadline = time.monotonic() + 60
        while len(ended) < count:
            assert time.monotonic() < deadline
            ended.update(place.wait([], 20))

    try:
        start(0, 1, left=6)
        assert not place.free()
        take(2)
        assert (ended[0].state, ended[0].seconds, ended[0].folder.parent) == ("finished", 3.0, store)  # 5 cores for 2 cells
        burnt = f"its process ended with code 1: burnt (log: {tmp_path}/sweep/logs/cells_1.log)"
        assert (ended[1].state, ended[1].error) == ("failed", burnt)
        start(2, 3, left=1)
        take(4)
        assert (ended[2].state, "outcome" in ended[2].error) == ("failed", True)
        assert (ended[3].state, ended[3].seconds, ended[3].error) == ("failed", 5.0, "stopped by a signal")
        start(4, 5, left=2)
        runs = [sweep_grid.cell_folder(config, store) for config in configs[4:]]
        deadline = time.monotonic() + 60
        while not all(run.exists() for run in runs):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert place.wait([], 0) == []
        assert place.stop() == [
            (4, CellOutcome(runs[0], "interrupted")), (5, CellOutcome(runs[1], "finished", seconds=3.0)),
        ]  # fmt: skip
        assert place.free()
    finally:
        place.close()
    assert sorted(log.name for log in (tmp_path / "sweep/logs").iterdir()) == [f"cells_{k}.log" for k in range(3)]
    assert not [child for child in psutil.Process().children() if PLAYED in child.cmdline()]


# What other processes read


def test_a_process_reads_the_cell_that_the_sweep_has_written(tmp_path):
    plan = Sweep.of(tiny(tmp_path / "c"), ["privacy.epsilon=3,1e1", "seed=0:3"], tmp_path / "out")
    plan.write(["waiting"] * 6)
    for index, cell in enumerate(plan.cells):
        read, store = sweeps.read_cell(plan.folder, index)
        assert (read.label.replace("10.0", "1e1"), read.values) == (cell.label, cell.values)
        assert sweep_grid.cell_folder(read.config, store) == plan.folders()[index]
    with pytest.raises(ConfigError, match="the sweep has 6 cells"):
        sweeps.read_cell(plan.folder, 6)


@pytest.mark.parametrize("name", ["quickstart", "asynchronous", "secure/r_dpcfl_digits"])
def test_a_process_reads_the_configuration_that_a_line_holds(name, tmp_path):
    config = configuration.load(name)
    run = sweep_grid.cell_folder(config, tmp_path)
    line = json.loads(json.dumps({"config": config.model_dump(mode="json"), "run": str(run)}))
    assert process.given(line) == (config, tmp_path)
    with pytest.raises(ConfigError, match="belongs to"):
        process.given({**line, "run": str(run.with_name("global-0"))})


def test_no_cell_runs_for_a_sweep_that_ended_while_its_process_started(tmp_path):
    plan = Sweep.of(tiny(tmp_path / "c"), ["seed=0:1"], tmp_path / "out")
    (run,) = plan.folders()
    cell = CellProcess(plan.folder, tmp_path / "log")
    cell.start({"config": plan.cells[0].config.model_dump(mode="json"), "run": str(run)}, 1)
    cell.hang_up()  # as the kernel does when the sweep is killed
    assert cell.outcomes.read() == b""  # until the end of the process
    cell.close(5)
    assert not (run / "run.json").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"state": "failed"}', '{"state": 1, "cached": false, "seconds": 1, "error": ""}'])
def test_a_damaged_outcome_is_named(tmp_path, text):
    with pytest.raises(ConfigError, match=f"the outcome of {tmp_path} is damaged: "):
        CellOutcome.from_json(tmp_path, text)


def test_a_cell_of_another_version_is_refused(tmp_path, monkeypatch):
    plan = Sweep.of(tiny(tmp_path / "c"), ["seed=0:2"], tmp_path / "out")
    plan.write(["waiting"] * 2)
    monkeypatch.setattr(sweep_grid, "__version__", "0.0.0")
    with pytest.raises(ConfigError, match="this host has another version of dpcfl_net"):
        sweeps.read_cell(plan.folder, 1)


def test_the_screen_has_a_row_per_cell_as_far_as_they_fit(tmp_path):
    plan = Sweep.of(tiny(tmp_path / "c"), ["seed=0:30"], tmp_path / "out")
    console = Console(record=True, width=100, height=16, force_terminal=True, file=(tmp_path / "terminal").open("w"))
    screen = CellScreen(ShownCells.of(plan), console, clock=lambda: 0.0)
    screen.ended(1, CellOutcome(plan.folders()[0], "failed", error="burnt"))
    console.print(screen.draw([1, 2], [3]))
    text = console.export_text()
    assert "1/30  seed=0  failed: burnt" in text
    assert "1 of 30 cells ended, 2 run, 1 failed" in text
    rows = [line.split()[1:3] for line in text.splitlines() if line.startswith("│ seed=")]
    assert rows[:5] == [
        ["seed=0", "failed"],
        ["seed=1", "running"],
        ["seed=2", "running"],
        ["seed=3", "in"],
        ["seed=4", "waiting"],
    ]
    assert len(rows) + 6 + 1 <= 16
    assert f"and {30 - len(rows)} more" in text


# Whole sweeps


@pytest.mark.slow
def test_failed_cells_stop_no_other_and_are_listed_at_the_end(tmp_path):
    """No noise reaches an epsilon of 1e-9, so that half of the cells fail; the others finish in two processes."""
    path = tiny(tmp_path / "c", privacy={"epsilon": 5, "delta": 1e-12})
    done = dpcfl("sweep", path, "privacy.epsilon=5,1e-9", "seed=0:2", "--jobs", 2, "--out", tmp_path / "out")
    assert done.returncode == 4, done.stderr
    assert states(tmp_path / "out") == ["finished", "finished", "failed", "failed"]
    assert "2 cells at once take about" in done.stdout
    assert "report: " in done.stdout
    problems = done.stderr.splitlines()
    assert problems[0] == "error: 2 of 4 cells failed; run the same command to try them again"
    assert [line.partition(":")[0] for line in problems[1:]] == [f"privacy.epsilon=1e-9 seed={seed}" for seed in (0, 1)]
    assert all("privacy.epsilon is 1e-09" in line for line in problems[1:])
    assert_nothing_left(tmp_path / "out")


def wait_for_rounds(store: Path, runs: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while len({path.parent for path in store.glob("*/checkpoints/round_*")}) < runs:  # only the newest rounds are kept
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)


@pytest.mark.slow
def test_ctrl_c_ends_all_cells_within_five_seconds_and_they_resume(tmp_path):
    path = tiny(tmp_path / "c", rounds=150, runtime={})
    command = ["sweep", path, "seed=0:3", "--jobs", "2", "--out", tmp_path / "out"]
    run = at_a_terminal(*command)
    wait_for_rounds(tmp_path / "out" / "store", 2, run)
    run.send_signal(signal.SIGINT)
    pressed = time.monotonic()
    printed, _ = run.communicate(timeout=60)
    taken = time.monotonic() - pressed
    assert run.returncode == 130
    assert "stopped; run the same command to resume" in printed
    assert states(tmp_path / "out") == ["interrupted", "interrupted", "waiting"]
    assert_nothing_left(tmp_path / "out", seconds=1)
    assert taken < 6  # 5 s, and the end of the interpreter on a loaded machine
    jobs = {folder: (folder / "protocol.json").read_bytes() for folder in (tmp_path / "out" / "store").iterdir()}
    again = dpcfl(*command, timeout=240)
    assert again.returncode == 0, again.stderr
    assert states(tmp_path / "out") == ["finished"] * 3
    assert all((folder / "protocol.json").read_bytes() == job for folder, job in jobs.items())


@pytest.mark.slow
def test_two_sweeps_of_one_folder_run_each_cell_once(tmp_path):
    command = [*DPCFL, "sweep", tiny(tmp_path / "c"), "seed=0:5", "--out", tmp_path / "out", "--jobs", "2"]
    both = [
        subprocess.Popen([*map(str, command)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    printed = [run.communicate(timeout=240)[0] for run in both]
    assert [run.returncode for run in both] == [0, 0], printed
    lines = [line for output in printed for line in output.splitlines() if "/5  seed=" in line]
    assert len(lines) == 10
    ran = [line.split()[1] for line in lines if not line.endswith("cached")]
    assert sorted(ran) == [f"seed={seed}" for seed in range(5)], printed


@pytest.mark.slow
def test_a_killed_process_of_a_cell_is_a_failed_cell(tmp_path):
    path = tiny(tmp_path / "c", rounds=200)
    run = subprocess.Popen(
        [*DPCFL, "sweep", str(path), "seed=0:3", "--out", str(tmp_path / "out"), "--jobs", "2"], cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_rounds(tmp_path / "out" / "store", 2, run)
    cells = [child for child in psutil.Process(run.pid).children() if "dpcfl_net.launch.cells.process" in command_line(child)]
    assert len(cells) == 2
    cells[0].kill()
    printed, problems = run.communicate(timeout=240)
    assert run.returncode == 4, printed
    assert "1 of 3 cells failed" in problems
    assert "its process ended with code -9 (killed" in problems
    assert sorted(states(tmp_path / "out")) == ["failed", "finished", "finished"]
    assert_nothing_left(tmp_path / "out")


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_cell_behind(tmp_path):
    path = tiny(tmp_path / "c", rounds=300)
    run = subprocess.Popen(
        [*DPCFL, "sweep", str(path), "seed=0:2", "--out", str(tmp_path / "out"), "--jobs", "2"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    wait_for_rounds(tmp_path / "out" / "store", 2, run)
    run.kill()
    run.wait()
    assert_nothing_left(tmp_path / "out", seconds=15)


# Figures of papers


def test_runs_of_a_figure_run_at_once_and_are_those_of_one_after_another(tmp_path):
    said = []

    class Context(reproduce.RunContext):
        def say(self, line):
            said.append(line)

    path = tiny(tmp_path, privacy={**TINY["privacy"], "noise": "seeded", "noise_seed": "5eed" * 16})
    grids = [(path, {"seed": [0, 1]}), (path, {"local.lr": [0.1], "seed": [1]})]
    at_once = Context("laptop", tmp_path / "figure", tmp_path / "store", jobs=2).finished(grids)
    assert [[result.seed for result in part] for part in at_once] == [[0, 1], [1]]
    first, second = (result.folder for result in at_once[0])
    assert (second / "config.yaml").stat().st_mtime < (first / "run.json").stat().st_mtime  # began before the end of the first
    assert said[0].startswith("2 cells at once take about ")
    assert [line.split("  ")[1] for line in sorted(said[1:])] == [
        "small global lr=0.5 seed=0", "small global lr=0.5 seed=1", "small global lr=0.1 seed=1",
    ]  # fmt: skip
    alone = Context("laptop", tmp_path / "figure", tmp_path / "again").finished(grids)
    for part, other in zip(at_once, alone, strict=True):
        assert [result.final for result in part] == [result.final for result in other]

    late = Context("laptop", tmp_path / "figure", tmp_path / "store", until=0.0, jobs=2)
    assert [len(part) for part in late.finished([*grids, (path, {"seed": [7, 8]})])] == [2, 1, 0]
