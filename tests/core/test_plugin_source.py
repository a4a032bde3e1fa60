"""Source code of plug-ins: which files it covers, and what a change does to the cells of sweeps."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import write_config

import dpcfl_net as dpcfl
from dpcfl_net.core import plugin_source
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.launch import sweep_grid

FILES = {
    "study/__init__.py": "",
    "study/model.py": "import json\nfrom . import sizes\nfrom .layers.linear import build\n",
    "study/sizes.py": "WIDTH = 3\n",
    "study/layers/__init__.py": "import beside\n",
    "study/layers/linear.py": "def build(shape, classes):\n    from .. import late\n    return late.build(shape, classes)\n",
    "study/late.py": (
        "def build(shape, classes):\n    import torch\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))\n"
    ),
    "beside.py": "LIMIT = 1\n",
    "study/unused.py": "",
    "torch_free.py": "",
}
COVERED = sorted(set(FILES) - {"study/unused.py", "torch_free.py"})
MODEL = "study.model:build"
COMMAND = [sys.executable, "-P", "-c", "from dpcfl_net.launch.cli import main; main()"]


@pytest.fixture
def study(tmp_path, monkeypatch):
    """The modules of FILES in the current folder; forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name, text in FILES.items():
        write(tmp_path / name, text)
    before = set(sys.modules)
    yield tmp_path
    forget(set(sys.modules) - before)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def forget(modules: set[str]) -> None:
    for name in modules:
        if name.partition(".")[0] in ("study", "beside"):
            sys.modules.pop(name, None)


def in_a_new_process() -> str:
    """The sha256 as a process gives it that has imported nothing yet."""
    forget(set(sys.modules))
    importlib.invalidate_caches()
    return plugin_source.sha256("model.name", MODEL)


@pytest.mark.parametrize("name", COVERED)
def test_every_own_module_that_is_imported_is_covered(study, name):
    before = in_a_new_process()
    assert in_a_new_process() == before
    write(study / name, FILES[name] + "# changed\n")
    assert in_a_new_process() != before


@pytest.mark.parametrize("name", ["study/unused.py", "torch_free.py", "study/notes.txt"])
def test_other_files_are_not_covered(study, name):
    before = in_a_new_process()
    write(study / name, "changed = True\n")
    assert in_a_new_process() == before


def test_the_folder_makes_no_difference(study, tmp_path, monkeypatch):
    before = in_a_new_process()
    elsewhere = tmp_path / "elsewhere"
    for name, text in FILES.items():
        write(elsewhere / name, text)
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(study)])
    assert in_a_new_process() == before


def test_a_change_counts_when_it_is_imported(study):
    before = plugin_source.sha256("model.name", MODEL)
    plugin_source.check_unchanged("model.name", MODEL)
    write(study / "study/sizes.py", "WIDTH = 4\n")
    assert plugin_source.sha256("model.name", MODEL) == before
    with pytest.raises(ConfigError, match=r"model\.name is 'study\.model:build': its code has changed since this process"):
        plugin_source.check_unchanged("model.name", MODEL)
    importlib.reload(sys.modules["study.model"])
    assert plugin_source.sha256("model.name", MODEL) != before
    plugin_source.check_unchanged("model.name", MODEL)


def test_packages_beside_an_installed_plugin_are_not_covered(study, monkeypatch):
    before = in_a_new_process()
    monkeypatch.setattr(plugin_source.site, "getsitepackages", lambda: [str(study)])
    installed = in_a_new_process()
    write(study / "beside.py", "LIMIT = 2\n")
    assert in_a_new_process() == installed != before
    write(study / "study/sizes.py", "WIDTH = 4\n")
    assert in_a_new_process() != installed


def test_a_plugin_of_this_package_is_covered_by_its_version():
    names = ("dpcfl_net.threats.nan_probe:NanProbe", "dpcfl_net.attacks.nan_probe:NanProbe")
    assert {plugin_source.sha256("algorithm.name", name) for name in names} == {""}


def test_a_sweep_runs_a_cell_again_whose_code_has_changed(study):
    """Before, it presented the results of the old code as those of the new one."""
    few = {"dataset": "digits", "clients": [2], "train_per_client": 100, "test_per_client": 10}
    path = write_config(
        study,
        rounds=2,
        output={},
        model={"name": MODEL},
        runtime={"federation": "in-process"},
        data=few,
        algorithm={"name": "global"},
    )

    def states() -> list[bool]:
        command = [*COMMAND, "sweep", path, "seed=0:1", "--out", study / "out", "--json"]
        done = subprocess.run(list(map(str, command)), cwd=study, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        return [cell["cached"] for cell in json.loads(done.stdout)["cells"]]

    assert states() == [False]
    assert states() == [True]
    write(study / "study/late.py", FILES["study/late.py"].replace("Linear(64, classes)", "Linear(64, classes, bias=False)"))
    assert states() == [False]
    assert len(list((study / "out" / "store").iterdir())) == 2


def test_a_grid_of_code_that_has_changed_since_its_import_is_refused(study):
    path = write_config(study, rounds=2, model={"name": MODEL})
    sweep_grid.grid(path, {"seed": ["0", "1"]})
    write(study / "beside.py", "LIMIT = 2\n")
    with pytest.raises(ConfigError, match="restart the interpreter or the notebook's kernel"):
        sweep_grid.grid(path, {"seed": ["0", "1"]})


def test_a_resumed_run_says_that_own_code_has_changed(study):
    """Before, the rounds of two algorithms were presented as those of one, without a word."""
    few = {"dataset": "digits", "clients": [2], "train_per_client": 100, "test_per_client": 10}
    settings = {
        "rounds": 4,
        "model": {"name": MODEL},
        "data": few,
        "algorithm": {"name": "global"},
        "privacy": {"epsilon": 5, "delta": 1e-4},
    }
    path = write_config(study, output={}, **settings)

    def two_rounds(begin) -> dpcfl.Run:
        return begin(callbacks=[lambda metrics: metrics.round % 2 == 1], progress=False)

    run = two_rounds(partial(dpcfl.run, path, study / "runs", "in-process"))
    resumed = two_rounds(partial(dpcfl.resume, run.path))
    assert (resumed.rounds_done, resumed.warnings) == (4, [])

    run = two_rounds(partial(dpcfl.run, path, study / "runs", "in-process"))
    with (run.path / "metrics.jsonl").open("a") as file:  # of a round that was charged and not completed
        file.write('{"view":"server","round":3,"epsilon_spent_by_client":[1.0,1.0]}\n')
    write(study / "study/sizes.py", "WIDTH = 4\n")
    importlib.reload(sys.modules["study.model"])
    resumed = two_rounds(partial(dpcfl.resume, run.path))
    said = f"model.name is '{MODEL}': its code has changed after round 2 of this run; the remaining rounds run the changed code"
    assert (resumed.rounds_done, resumed.warnings) == (4, [said])
