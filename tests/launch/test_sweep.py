"""Sweeps as a person starts them: axes, what is skipped, what goes on after a kill, what a failed cell does to the rest."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import DPCFL, ROOT, SMALL, assert_nothing_left, at_a_terminal, dpcfl, write_config
from hypothesis import given
from hypothesis import strategies as st

from dpcfl_net import __version__
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.locks import locked
from dpcfl_net.experiment import config
from dpcfl_net.launch import sweep_axes, sweep_grid, sweeps
from dpcfl_net.launch.placement import parents
from dpcfl_net.report.page import write_report

TINY = {"dataset": "digits", "clients": [1, 1], "train_per_client": 200, "test_per_client": 20}
AXES = ["algorithm.name=global,local", "seed=0:2"]


def tiny(folder: Path, **changes) -> Path:
    return write_config(folder, **{"data": TINY, "rounds": 2, "algorithm": {"name": "global"}, **changes})


def sweep_folder(out: Path) -> Path:
    (folder,) = out.glob("*-sweep-*")
    return folder


def states(out: Path) -> list[str]:
    return [cell["state"] for cell in json.loads((sweep_folder(out) / "sweep.json").read_text())["cells"]]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A finished sweep of four cells: (its parent folder, its configuration, what it printed)."""
    out = tmp_path_factory.mktemp("sweep")
    path = tiny(out / "c")
    done = dpcfl("sweep", path, *AXES, "--out", out, timeout=240)
    assert done.returncode == 0, done.stderr + done.stdout
    assert_nothing_left(out)
    return out, path, done.stdout


def test_axes_are_lists_ranges_and_yaml_values():
    axes = sweep_axes.parse_axes(
        ["privacy.epsilon=3,5,15", "seed=0:4", "data.clients=[3,6,6],[2, 2]", "name='a,b',\"c\"", "x={a: [1,2], b: 3}", "y=5"]
    )
    assert axes == {
        "privacy.epsilon": ["3", "5", "15"],
        "seed": ["0", "1", "2", "3"],
        "data.clients": ["[3,6,6]", "[2, 2]"],
        "name": ["'a,b'", '"c"'],
        "x": ["{a: [1,2], b: 3}"],
        "y": ["5"],
    }


def test_an_axis_of_names_is_the_axis_of_the_sections_name():
    assert sweep_axes.parse_axes(["algorithm=global,local", "seed=0:2"]) == {
        "algorithm.name": ["global", "local"],
        "seed": ["0", "1"],
    }
    assert sweep_axes.axes_of({"algorithm": ["global", "local"]}) == {"algorithm.name": ["global", "local"]}
    sections = ["{name: global}", "{name: mr-mtl, lam: 0.2}"]
    assert sweep_axes.parse_axes([f"algorithm={','.join(sections)}"]) == {"algorithm": sections}
    with pytest.raises(ConfigError, match=r"axes 'algorithm' and 'algorithm\.name' are the same setting"):
        sweep_axes.parse_axes(["algorithm=global", "algorithm.name=local"])


@given(st.lists(st.lists(st.integers(0, 99), min_size=1).map(str), min_size=1, unique=True))
def test_a_list_of_yaml_lists_is_split_where_it_was_joined(values):
    assert sweep_axes.parse_axes([f"data.clients={','.join(values)}"]) == {"data.clients": values}


@pytest.mark.parametrize("item", ["seed", "=3", "seed=", "seed=1,,2", "seed=4:4", "seed=1,1", "seed=,"])
def test_an_item_that_is_no_axis_is_a_sentence(item):
    with pytest.raises(ConfigError, match=r"axis .*"):
        sweep_axes.parse_axes([item])


@pytest.mark.parametrize("text", ["4:0", "0:0"])
def test_an_empty_range_is_called_empty(text):
    with pytest.raises(ConfigError, match=f"axis 'seed={text}' is an empty range: stop must be above start"):
        sweep_axes.parse_axes([f"seed={text}"])


def test_all_items_that_are_no_axes_are_named_at_once():
    with pytest.raises(ConfigError) as error:
        sweep_axes.parse_axes(["seed=0:2", "seed=3", "flying", "rounds="])
    assert len(error.value.problems) == 3
    assert "axis 'seed' is given twice" in error.value.problems[0]


def test_the_grid_is_every_combination_with_the_last_axis_fastest(tmp_path):
    cells = sweep_grid.grid(tiny(tmp_path), sweep_axes.parse_axes(["privacy.epsilon=3,5", "seed=0:2", "rounds=4"]))
    assert [cell.label for cell in cells] == [f"privacy.epsilon={e} seed={s}" for e in (3, 5) for s in (0, 1)]
    assert cells[1].values == {"privacy.epsilon": 3, "seed": 1, "rounds": 4}
    assert (cells[1].config.privacy.epsilon, cells[1].config.seed, cells[1].config.rounds) == (3.0, 1, 4)
    assert [cell.label for cell in sweep_grid.grid(tiny(tmp_path), {})] == ["as configured"]


def test_every_cell_is_checked_before_the_first_one_runs(tmp_path):
    done = dpcfl("sweep", tiny(tmp_path / "c"), "privacy.epsilon=3,-1", "seed=0:3", "rounds=2,1", "--out", tmp_path / "out")
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 2, lines
    assert "rounds is 1" in lines[0]
    assert "(cell privacy.epsilon=3 seed=0 rounds=1 and 5 more)" in lines[0]
    assert "privacy.epsilon is -1" in lines[1]
    assert not (tmp_path / "out").exists()


def test_an_axis_without_effect_is_refused(tmp_path):
    path = tiny(tmp_path)
    with pytest.raises(ConfigError, match="are the same job: the setting in which they differ has no effect"):
        sweep_grid.grid(path, {"output.keep_checkpoints": ["2", "3"]})


def test_a_common_option_has_its_default_in_the_cells_where_it_has_no_effect(tmp_path):
    path = tiny(tmp_path, algorithm={"name": "r-dpcfl"})
    axes = sweep_axes.parse_axes(["algorithm.clusters=auto,2", "algorithm.max_clusters=6"])
    automatic, given_number = sweep_grid.grid(path, axes)
    assert (automatic.config.options.max_clusters, given_number.config.options.max_clusters) == (6, 8)
    assert sweep_grid.job_key(sweep_grid.cell_at(path, axes, 1).config) == sweep_grid.job_key(given_number.config)
    in_file = tiny(tmp_path / "file", algorithm={"name": "r-dpcfl", "clusters": 1, "max_clusters": 6})
    assert [cell.config.options.max_clusters for cell in sweep_grid.grid(in_file, {"algorithm.clusters": ["auto", "2"]})] == [
        6,
        8,
    ]


@pytest.mark.parametrize(
    ("items", "cells"),
    [
        (["algorithm.clusters=1,2", "algorithm.max_clusters=6"], ["algorithm.clusters=1", "algorithm.clusters=2"]),
        (["algorithm.clusters=auto,2", "algorithm.max_clusters=6,7"], [f"algorithm.clusters=2 algorithm.max_clusters={n}" for n in (6, 7)]),
    ],
)  # fmt: skip
def test_an_option_without_effect_in_any_cell_or_with_an_axis_of_its_own_is_refused(tmp_path, items, cells):
    with pytest.raises(ConfigError) as caught:
        sweep_grid.grid(tiny(tmp_path, algorithm={"name": "r-dpcfl"}), sweep_axes.parse_axes(items))
    assert len(caught.value.problems) == 2
    for problem, cell in zip(caught.value.problems, cells, strict=True):
        assert "must be 8 (the default) with clusters" in problem
        assert problem.endswith(f"(cell {cell})")


def test_an_axis_that_the_section_of_one_algorithm_outweighs_is_refused(tmp_path):
    path = tiny(tmp_path, algorithms={"global": {"local": {"lr": 0.3}}})
    with pytest.raises(ConfigError) as caught:
        sweep_grid.grid(path, {"algorithm.name": ["local", "global"], "local.lr": ["0.1"]})
    assert caught.value.problems == [
        "local.lr is 0.1: it has no effect, since algorithms.global.local.lr is 0.3; set algorithms.global.local.lr "
        "(cell algorithm.name=global)"
    ]


def test_a_job_key_covers_what_changes_a_result_and_nothing_else(tmp_path):
    def key(**changes):
        return sweep_grid.job_key(config.load(tiny(tmp_path, **changes)))

    def in_groups(aggregators):
        return {"runtime": {"aggregators": aggregators}, "output": {"transcript": "off"}}

    plain = key()
    same = [
        {"name": "other"}, {"output": {"transcript": "off"}}, {"runtime": {"slots": 1, "round_timeout_s": 9}},
        {"data": {**TINY, "root": "/elsewhere"}}, {"algorithms": {"local": {"local": {"lr": 0.9}}}},
    ]  # fmt: skip
    other = [
        {"seed": 1}, {"rounds": 3}, {"local": {"lr": 0.1}}, {"algorithm": {"name": "local"}}, {"data": {**TINY, "shift": "none"}},
        {"runtime": {"quorum": 0.5}}, {"runtime": {"transport": {"security": "none"}}}, {"algorithms": {"global": {"local": {"lr": 0.9}}}},
        {"privacy": {"epsilon": 3, "delta": 1e-4}}, in_groups(1), in_groups(2),
    ]  # fmt: skip
    assert key(**in_groups([1, 1])) == key(**in_groups(2))
    assert [key(**change) for change in same] == [plain] * len(same)
    assert len({plain, *(key(**change) for change in other)}) == 1 + len(other)
    assert len(plain) == 64


def test_another_version_is_another_job(tmp_path, monkeypatch):
    plain = sweep_grid.job_key(config.load(tiny(tmp_path)))
    monkeypatch.setattr(sweep_grid, "__version__", __version__ + ".1")
    assert sweep_grid.job_key(config.load(tiny(tmp_path))) != plain


def test_a_sweep_leaves_runs_a_list_a_table_and_a_page(swept):
    out, _, printed = swept
    lines = printed.splitlines()
    assert lines[0].startswith("1/4  algorithm.name=global seed=0  accuracy ")
    assert lines[3].startswith("4/4  algorithm.name=local seed=1  accuracy ")
    assert "cached" not in printed
    assert " +- " in printed
    assert f"report: {sweep_folder(out) / 'report.html'}" in printed
    assert '"accuracy_worst"' in (sweep_folder(out) / "report.html").read_text(encoding="utf-8")
    document = json.loads((sweep_folder(out) / "sweep.json").read_text())
    assert document["axes"] == {"algorithm.name": ["global", "local"], "seed": [0, 1]}
    assert document["cells"][2]["values"] == {"algorithm.name": "local", "seed": 0}
    assert document["config"]["rounds"] == 2
    folders = [(sweep_folder(out) / cell["folder"]).resolve() for cell in document["cells"]]
    assert sorted(folders) == sorted(folder.resolve() for folder in (out / "store").iterdir())
    for folder, cell in zip(folders, document["cells"], strict=True):
        run = json.loads((folder / "run.json").read_text())
        assert (run["state"], run["seed"], run["algorithm"]) == (
            "finished",
            cell["values"]["seed"],
            cell["values"]["algorithm.name"],
        )
        assert folder.name.startswith(f"{run['algorithm']}-")
    assert dpcfl("verify", folders[0]).returncode == 0


def test_the_secret_of_seeded_noise_is_in_no_page_and_in_files_for_their_owner_only(swept, tmp_path):
    """Everyone who got a report could subtract the noise of its run."""
    out, path, _ = swept
    secret = SMALL["privacy"]["noise_seed"].encode()
    found = [file for file in out.rglob("*") if file != path and file.is_file() and secret in file.read_bytes()]
    assert {file.name for file in found} == {"sweep.json", "config.yaml"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in found} == {0o600}
    page = write_report(shutil.copytree(next(out.glob("store/*-*")), tmp_path / "run")).read_text()
    assert "<dt>noise_seed</dt><dd>secret, not shown here</dd>" in page
    assert secret.decode() not in page


def test_what_is_done_is_skipped_by_every_sweep_of_the_same_folder(swept):
    out, path, _ = swept
    before = {path: path.stat().st_mtime_ns for path in (out / "store").rglob("*") if path.is_file()}
    again = dpcfl("sweep", path, *AXES, "--out", out)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("cached") == 4
    listed = dpcfl("sweep", path, "seed=0:3", "name=figure", "--out", out, "--dry-run")
    assert "3 cells, 2 cached, 1 to run" in listed.stdout
    assert "seed=2\n" in listed.stdout
    assert before == {path: path.stat().st_mtime_ns for path in (out / "store").rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_killed_sweep_goes_on_in_the_middle_of_a_run(tmp_path):
    """SIGKILL, which nobody can prepare for: the run it was in is gone on with, not begun anew."""
    path = tiny(tmp_path / "c", rounds=12, seed=5)
    command = ["sweep", str(path), "algorithm.name=global", "--out", str(tmp_path / "out")]
    first = subprocess.Popen([*DPCFL, *command], cwd=ROOT, stdout=subprocess.DEVNULL)
    wait_for_checkpoint(tmp_path / "out" / "store", first)
    first.kill()
    first.wait()
    (folder,) = (path for path in (tmp_path / "out" / "store").iterdir() if (path / "protocol.json").exists())
    assert_nothing_left(folder)
    job, ledger = (folder / "protocol.json").read_bytes(), (folder / "ledgers/client_0000/ledger.jsonl").read_bytes()
    assert states(tmp_path / "out") == ["waiting"]
    second = dpcfl(*command)
    assert second.returncode == 0, second.stderr
    assert states(tmp_path / "out") == ["finished"]
    assert (folder / "protocol.json").read_bytes() == job
    assert (folder / "ledgers/client_0000/ledger.jsonl").read_bytes().startswith(ledger.rpartition(b"\n")[0])
    assert json.loads((folder / "run.json").read_text())["rounds_done"] == 12


@pytest.mark.slow
def test_a_stopped_sweep_says_so_and_leaves_nothing_running(tmp_path):
    path = tiny(tmp_path / "c", rounds=30)
    run = at_a_terminal("sweep", path, "seed=0:2", "--out", tmp_path / "out")
    wait_for_checkpoint(tmp_path / "out" / "store", run)
    run.send_signal(signal.SIGINT)
    printed, _ = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "stopped; run the same command to resume" in printed
    assert states(tmp_path / "out") == ["interrupted", "waiting"]
    assert_nothing_left(tmp_path / "out")


def wait_for_checkpoint(store: Path, run: subprocess.Popen) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and run.poll() is None:
        if list(store.glob("*/checkpoints/round_*")):
            return
        time.sleep(0.01)
    raise AssertionError("no round was reached")


@pytest.mark.slow
def test_a_failed_cell_ends_neither_the_sweep_nor_its_own_chance(swept, tmp_path):
    """One cell's signature is damaged: the others are there, the exit code says 4, and the cell is tried again."""
    out, path, _ = swept
    copy = tmp_path / "out"
    shutil.copytree(out, copy)
    shutil.rmtree(sweep_folder(copy))
    victim = sweep_grid.cell_folder(config.load(path, ["seed=0"]), copy / "store")
    run = json.loads((victim / "run.json").read_text())
    (victim / "run.json").write_text(json.dumps({**run, "state": "failed"}))
    signature = (victim / "experiment.json.sig").read_text()
    (victim / "experiment.json.sig").write_text("00" * (len(signature) // 2))
    failed = dpcfl("sweep", path, *AXES, "--out", copy)
    assert failed.returncode == 4, failed.stdout
    assert "1 of 4 cells failed" in failed.stderr
    assert "algorithm.name=global seed=0: operator-signature" in failed.stderr
    assert states(copy) == ["failed", "finished", "finished", "finished"]
    assert "3 of 4 runs have finished" in (sweep_folder(copy) / "report.html").read_text(encoding="utf-8")
    (victim / "experiment.json.sig").write_text(signature)
    mended = dpcfl("sweep", path, *AXES, "--out", copy)
    assert mended.returncode == 0, mended.stderr
    assert mended.stdout.count("cached") == 3
    assert states(copy) == ["finished"] * 4


def test_run_cells_gives_the_folders_in_order_and_runs_nothing_twice(swept, capsys):
    out, path, _ = swept
    cells = [config.load(path, [f"seed={seed}", f"algorithm.name={name}"]) for seed, name in ((1, "local"), (0, "global"))]
    said: list[str] = []
    outcomes = sweeps.run_cells(cells, out / "store", said.append)
    assert [outcome.folder for outcome in outcomes] == [sweep_grid.cell_folder(cell, out / "store") for cell in cells]
    assert [(outcome.state, outcome.cached) for outcome in outcomes] == [("finished", True)] * 2
    assert len(said) == 2
    assert "small local seed=1" in said[0]
    assert capsys.readouterr().out == ""


def test_a_cell_that_another_process_runs_is_left_to_it(swept, tmp_path):
    import fcntl

    out, path, _ = swept
    copy = tmp_path / "out"
    shutil.copytree(out, copy)
    cell = config.load(path)
    folder = sweep_grid.cell_folder(cell, copy / "store")
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, "state": "running"}))
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        outcome = sweeps.run_cell(cell, copy / "store")
    assert (outcome.state, "run by another process" in outcome.error) == ("in use", True)


def test_a_cell_that_a_signal_stops_before_its_run_begins_is_interrupted(tmp_path, monkeypatch):
    cell = config.load(tiny(tmp_path / "c", runtime={"federation": "in-process"}, output={"transcript": "off"}))
    monkeypatch.setattr(parents, "warm", lambda: signal.raise_signal(signal.SIGTERM))
    assert sweeps.run_cell(cell, tmp_path / "store").state == "interrupted"
    assert not (sweep_grid.cell_folder(cell, tmp_path / "store") / "run.json").exists()


def test_a_cell_whose_job_cannot_be_made_leaves_no_folder(tmp_path):
    """No noise reaches such an epsilon; the store stays clean for the next try."""
    cell = config.load(tiny(tmp_path / "c", privacy={"epsilon": 1e-9, "delta": 1e-12}))
    outcome = sweeps.run_cell(cell, tmp_path / "store")
    assert (outcome.state, "privacy.epsilon is 1e-09" in outcome.error) == ("failed", True)
    assert os.listdir(tmp_path / "store") == []


KILLED = """
import os, signal, sys
from pathlib import Path
from dpcfl_net.experiment import config
from dpcfl_net.launch import sweeps

class Killed:
    def prepare(self, step):
        if step.startswith("noise multiplier"):
            os.kill(os.getpid(), signal.SIGKILL)

sweeps.run_cell(config.load(sys.argv[1]), Path(sys.argv[2]), Killed())
"""


def test_a_cell_that_was_killed_in_its_preparation_leaves_its_keys_until_the_next_try_only(tmp_path):
    path, store = tiny(tmp_path / "c", runtime={"federation": "in-process"}, output={"transcript": "off"}), tmp_path / "store"
    killed = subprocess.run([sys.executable, "-c", KILLED, path, store], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    cell = config.load(path, ["seed=1"])  # another one
    folder, (left,) = sweep_grid.cell_folder(cell, store), store.iterdir()
    assert (left / "keys" / "operator" / "operator.secret").exists()
    preparing = left.with_name(f".{folder.name}.{'a' * 16}")  # by another process, which lives
    preparing.mkdir()
    with locked(preparing / ".lock"):
        assert sweeps.run_cell(cell, store).state == "finished"
    assert sorted(store.iterdir()) == sorted([folder, preparing])
