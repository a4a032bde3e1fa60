"""`import dpcfl_net`: cheap, complete, and with the errors of a module."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import dpcfl_net as dpcfl


def test_settings_as_arguments_of_run_are_refused_with_the_way_to_change_them():
    with pytest.raises(
        TypeError, match=r"dpcfl\.run has no argument 'rounds'; change settings by dpcfl\.load: .*rounds=\.\.\."
    ):
        dpcfl.run("quickstart", rounds=3)  # type: ignore[call-arg]


def test_the_import_is_cheap():
    heavy = {"torch", "numpy", "pydantic", "rich", "dpcfl_net.launch", "dpcfl_net.experiment"}
    code = f"import sys; before = set(sys.modules); import dpcfl_net; dir(dpcfl_net); print({heavy!r} & (set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "set()"


def test_every_public_name_is_there_and_listed():
    assert sorted(set(dpcfl.__all__)) == sorted(dpcfl.__all__)
    for name in dpcfl.__all__:
        assert getattr(dpcfl, name) is not None
        assert name in dir(dpcfl)
    assert {"load", "run", "resume", "open_run", "sweep", "compare", "account", "__version__"} <= set(dpcfl.__all__)


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(dpcfl.__file__).read_text())
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dpcfl_net")
    ]
    assert {alias.name for node in imports for alias in node.names} == set(dpcfl.__all__) - {"__version__"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'dpcfl_net' has no attribute 'fit'"):
        dpcfl.fit  # noqa: B018


def test_load_takes_names_dictionaries_and_changes():
    config = dpcfl.load("quickstart", {"privacy.delta": 1e-5}, rounds=3, privacy={"epsilon": 2}, data__clients=(2, 2))
    assert (config.rounds, config.privacy.epsilon, config.privacy.delta, config.data.clients) == (3, 2, 1e-5, [2, 2])
    assert dpcfl.load(config) is config
    assert dpcfl.load(config, algorithm__name="global").algorithm["name"] == "global"
    with pytest.raises(dpcfl.ConfigError, match="rounds is 1: must be greater than or equal to 2"):
        dpcfl.load("quickstart", rounds=1)
    with pytest.raises(dpcfl.ConfigError, match="no such configuration file: quickstrat; did you mean 'quickstart'"):
        dpcfl.load("quickstrat")
