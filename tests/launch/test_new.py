"""`dpcfl new`: the project that it writes loads, keeps its budget and runs; bad folders are refused."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib

import pytest
from cli_cases import call
from conftest import DPCFL, ROOT

import dpcfl_net as dpcfl
from dpcfl_net.experiment.build import make_job
from dpcfl_net.launch.cli import new
from dpcfl_net.transport.keys import make_keys

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A new project, which is the current folder."""
    folder = tmp_path / "my-study"
    new.create(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "my_study":
            del sys.modules[name]


def test_it_writes_a_project_named_after_its_folder(capsys, tmp_path):
    done = call(capsys, "new", tmp_path / "my-study", "--json")
    found = json.loads(done.out)
    files = {path.relative_to(tmp_path / "my-study") for path in (tmp_path / "my-study").rglob("*") if path.is_file()}
    assert len(found["files"]) == len(files) == 7
    assert tomllib.loads((tmp_path / "my-study/pyproject.toml").read_text())["project"]["name"] == "my-study"
    assert not [path for path in files if "{{" in (tmp_path / "my-study" / path).read_text()]


@pytest.mark.parametrize(("spec", "install"), [(None, "pip install pytest && "), (object(), "")])
def test_the_next_commands_install_pytest_where_it_is_missing(capsys, monkeypatch, tmp_path, spec, install):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "pytest" else None)
    done = call(capsys, "new", tmp_path / "my-study")
    assert done.out.splitlines()[-1] == f"next: cd {tmp_path / 'my-study'} && {install}pytest && dpcfl run config.yaml"


def test_its_configuration_loads_with_its_data_and_its_algorithm(project):
    config = dpcfl.load("config.yaml")
    assert config.algorithm == {"name": "my_study.algorithm:MomentumFedAvg", "beta": 0.5}
    assert config.data.sha256
    assert config.privacy.delta < 1 / config.data.train_per_client
    with pytest.raises(dpcfl.ConfigError, match=r"algorithm\.beta is 1\.5"):
        dpcfl.load("config.yaml", {"algorithm.beta": 1.5})
    assert dpcfl.load("config.yaml", algorithm="global").algorithm["name"] == "global"


def test_its_plan_calibrates(capsys, project):
    done = call(capsys, "run", "config.yaml", "--dry-run")
    assert done.code == 0, done.err
    assert "privacy: epsilon 5" in done.out


def test_the_preparation_of_its_run_names_its_data_set(project):
    config, steps = dpcfl.load("config.yaml"), []
    make_keys(project / "keys", config.data.client_count)
    make_job(config, project / "keys", on_step=steps.append)
    assert steps[0] == "data set my_study.data:load"


def test_what_it_writes_passes_our_own_checks(project):
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [*ruff, *command, "--config", ROOT / "pyproject.toml", "."],
            capture_output=True,
            text=True,
            cwd=project,
            check=False,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("full", "not empty"), ("file", "is a file"), ("file/below", "a part of this path is a file"), ("numpy", "Python has a module 'numpy'"),
        ("tests", "choose another name"), ("class", "'class' is a word of Python's own"), ("1st", "beginning with a letter"), ("ümlaut", "letters a to z"), ("a b!", "beginning with a letter"),
        ("x" * 61, "up to 60 letters"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_a_project_is_refused(capsys, tmp_path, name, words):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("x")
    done = call(capsys, "new", tmp_path / name)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "thesis.tex"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_tests_pass_and_it_runs(project):
    tests = subprocess.run([sys.executable, "-m", "pytest", "-q"], capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert tests.returncode == 0, tests.stdout
    run = subprocess.run(
        [*DPCFL, "run", "config.yaml", "--json"], capture_output=True, text=True, env=ENVIRONMENT, check=False, timeout=600
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert (found["state"], found["privacy"]["epsilon"]) == ("finished", 5)
    assert found["final"]["accuracy_mean"] > 0.8
