"""Sweeps, comparisons and accounting from Python: the same as the commands give."""

from __future__ import annotations

import csv
import io
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from api_runs import TINY
from conftest import dpcfl, write_config

import dpcfl_net as api
from dpcfl_net.launch import sweep_axes

QUICK = {**TINY, "rounds": 2, "runtime": {"federation": "in-process"}, "output": {"transcript": "off"}}
AXES = {"algorithm.name": ["global", "local"], "seed": range(2)}
EVENTS = [{"type": "SampledGaussian", "noise_multiplier": 1.0, "sampling_rate": 0.05, "steps": 100}]
SETTINGS = {**QUICK, "algorithm": {"name": "global"}}


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> api.SweepResult:
    return api.sweep(SETTINGS, AXES, tmp_path_factory.mktemp("sweep"), progress=False)


def test_a_sweep_returns_its_runs_in_the_order_of_its_grid(swept):
    assert [(run.config.algorithm["name"], run.config.seed) for run in swept] == [
        ("global", 0), ("global", 1), ("local", 0), ("local", 1),
    ]  # fmt: skip
    assert swept.values[2] == {"algorithm.name": "local", "seed": 0}
    assert {run.state for run in swept} == {"finished"}
    assert swept.report().parent == swept.path
    assert "4 runs" in repr(swept)
    shown = swept._repr_html_()
    assert "<th>algorithm.name</th><th>seed</th><th>accuracy</th><th>privacy</th><th>folder</th>" in shown
    assert f"<tr><td>local</td><td>1</td><td>{100 * swept[3].final['accuracy_mean']:.1f} %</td>" in shown


def test_the_command_line_finds_the_cells_that_python_has_run(swept, tmp_path):
    path = write_config(tmp_path, **SETTINGS)
    again = dpcfl("sweep", path, "algorithm.name=global,local", "seed=0:2", "--out", swept.path.parent)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("cached") == 4


def test_two_threads_that_sweep_into_one_folder_share_its_runs(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        started = [pool.submit(api.sweep, SETTINGS, {"seed": range(4)}, tmp_path, progress=False) for _ in range(2)]
    one, other = (each.result() for each in started)
    assert [run.path for run in one] == [run.path for run in other]
    assert len(list((tmp_path / "store").iterdir())) == 4


def test_axes_are_lists_of_any_values():
    assert sweep_axes.axes_of({"local.lr": np.array([0.1, 0.2]), "data.clients": [(2, 2)], "name": ["on"]}) == {
        "local.lr": ["0.1", "0.2"], "data.clients": ["[2, 2]"], "name": ["'on'"],
    }  # fmt: skip
    with pytest.raises(api.ConfigError) as error:
        sweep_axes.axes_of({"seed": 3, "rounds": [], "name": "abc", "local.lr": [1, 1]})
    assert len(error.value.problems) == 4


def test_every_problem_of_every_cell_is_named_before_anything_runs(tmp_path):
    with pytest.raises(api.ConfigError) as error:
        api.sweep(SETTINGS, {"rounds": [2, 1], "privacy.epsilon": [3, -1]}, tmp_path / "out", progress=False)
    assert len(error.value.problems) == 2
    assert not (tmp_path / "out").exists()


def test_a_failed_cell_is_an_error_after_the_last_one(tmp_path):
    settings = {**SETTINGS, "privacy": {"epsilon": 3, "delta": 1e-4}, "runtime": {"federation": "in-process", "max_epsilon": 4}}
    with pytest.raises(api.RunFailed, match="1 of 2 cells failed"):
        api.sweep(settings, {"privacy.epsilon": [5, 3]}, tmp_path, progress=False)


def test_comparisons_are_tables(swept, tmp_path):
    table = api.compare(swept)
    assert [row["algorithm"] for row in table.rows] == ["global", "local"]
    assert [row["runs"] for row in table.rows] == ["2", "2"]
    assert " +- " in table.rows[0]["mean %"]
    assert len(table) == len(table.records) == 4
    text = table.to_csv(tmp_path / "runs.csv")
    assert (tmp_path / "runs.csv").read_text() == text
    assert [row["seed"] for row in csv.DictReader(io.StringIO(text))] == ["0", "1", "0", "1"]
    assert str(table).splitlines()[0].startswith("algorithm")
    assert table._repr_html_().startswith("<table>")
    assert api.compare(list(swept)).rows == api.compare([swept.path]).rows == table.rows


def test_runs_of_different_privacy_are_not_compared(swept, with_epsilon):
    with pytest.raises(api.ConfigError, match="--force, or force=True in Python, shows them with a mark"):
        api.compare([*swept, with_epsilon])
    marked = api.compare([*swept, with_epsilon], force=True)
    assert "NOT COMPARABLE" in str(marked)
    with pytest.raises(api.ConfigError, match="nothing to compare"):
        api.compare([])


def test_account_takes_objects_dictionaries_and_the_commands_document(tmp_path):
    document = {"events": EVENTS, "delta": 1e-5}
    (tmp_path / "events.json").write_text(json.dumps(document))
    printed = json.loads(dpcfl("account", "--json", tmp_path / "events.json").stdout)
    assert api.account(document) == printed
    assert api.account(EVENTS, delta=1e-5) == printed
    assert api.account([api.SampledGaussian(1.0, 0.05, 100)], delta=1e-5) == printed
    assert api.account([api.Unprotected("raw")], delta=1e-5)["reason"] == "raw"


def test_account_finds_the_noise_multiplier_for_a_target():
    open_event = {"type": "SampledGaussian", "sampling_rate": 0.05, "steps": 100}
    found = api.account([open_event], delta=1e-5, target_epsilon=2)
    assert found["epsilon"] <= 2
    noise = found["noise_multiplier"]
    assert api.account([api.SampledGaussian(noise, 0.05, 100)], delta=1e-5)["epsilon"] == found["epsilon"]


def test_account_takes_numbers_of_numpy():
    event = {"type": "SampledGaussian", "noise_multiplier": np.float32(1), "sampling_rate": 0.05, "steps": np.int64(100)}
    found = api.account([event], delta=np.float64(1e-5))
    assert (found, type(found["delta"])) == (api.account(EVENTS, delta=1e-5), float)
    with pytest.raises(
        ValueError, match=r"steps must be a whole number >= 0, got np\.int64\(3\): write int\(\.\.\.\) around it"
    ):
        api.SampledGaussian(1.0, 0.05, np.int64(3))  # type: ignore[arg-type]


def test_account_names_what_is_wrong():
    with pytest.raises(api.ConfigError, match="delta must lie strictly between 0 and 1, got None"):
        api.account(EVENTS)
    with pytest.raises(api.ConfigError, match="a complete document holds delta"):
        api.account({"events": EVENTS, "delta": 1e-5}, delta=1e-5)
    with pytest.raises(api.ConfigError, match=r"events\[0\]: must be an object"):
        api.account(["a"], delta=1e-5)  # type: ignore[list-item]
