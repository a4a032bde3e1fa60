"""`import dpcfl_net`: cheap, complete, and with the errors of a module."""

from __future__ import annotations

import ast
import contextlib
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from conftest import ROOT

import dpcfl_net as dpcfl


def test_settings_as_arguments_of_run_are_refused_with_the_way_to_change_them():
    with pytest.raises(
        TypeError, match=r"dpcfl\.run has no argument 'rounds'; change settings by dpcfl\.load: .*rounds=\.\.\."
    ):
        dpcfl.run("quickstart", rounds=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda out: dpcfl.run("quickstart", out, callbacks=print),
            r"^callbacks is <built-in .*: must be a list, for example \[print\]$",
        ),
        (
            lambda out: dpcfl.run("quickstart", out, callbacks=[print, "tb"]),
            r"^callbacks\[1\] is 'tb': must be a function of a round's",
        ),
        (
            lambda out: dpcfl.run("quickstart", out, callbacks=[dpcfl.TensorBoard]),
            r"^callbacks\[0\] is the class TensorBoard: must be",
        ),
        (lambda out: dpcfl.resume(out / "none", callbacks="tb"), "^callbacks is 'tb': must be a list"),
        (lambda out: dpcfl.tune("quickstart", "local", {"local.lr": [1]}, out=out), "^algorithms is 'local': must be a list"),
        (
            lambda out: dpcfl.tune("quickstart", ["local"], {"local.lr": [1]}, {"trials": 2}, out),
            "^options is of type dict: must be Tune",
        ),
        (lambda out: dpcfl.compare("runs/one"), r"^runs is 'runs/one': must be a list, for example \[run, 'runs/NAME'\]$"),
        (
            lambda out: dpcfl.account(dpcfl.SampledGaussian(1.0, 0.1, 9), 1e-5),
            r"^events is SampledGaussian\(.*: must be a list",
        ),
        (lambda out: dpcfl.run("quickstart", None), r"^out is None: must be a path, for example 'runs'$"),
        (lambda out: dpcfl.run("quickstart", ""), r"^out is '': must be a path; write '\.' for the current folder$"),
        (lambda out: dpcfl.compare([out, 5]), r"^runs\[1\] is 5: must be a path, for example 'runs'$"),
        (lambda out: dpcfl.load("quickstart", 5), r"^overrides is 5: must be a dictionary, for example {'rounds': 3}$"),
        (lambda out: dpcfl.load(None), "^config is of type NoneType: must be a file, the name of a packaged"),
        (lambda out: dpcfl.sweep(7, {"seed": [0]}, out), "^config is of type int: must be a file, the name of a packaged"),
    ],
)
def test_an_argument_of_another_type_is_a_sentence_before_anything_runs(call, words, tmp_path):
    """A callback that cannot be called was found after the first round, which was charged."""
    with pytest.raises(dpcfl.ConfigError, match=words):
        call(tmp_path)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "use",
    [
        lambda name, out: dpcfl.load(name),
        lambda name, out: dpcfl.run(name, out, "by-magic"),
        lambda name, out: dpcfl.sweep(name, {"seeds": [0]}, out),
        lambda name, out: dpcfl.tune(name, ["local"], {"seeds": [0]}, out=out),
    ],
    ids=["load", "run", "sweep", "tune"],
)
@pytest.mark.parametrize("name", ["configs/quickstart.yaml", Path("quickstart.yaml")], ids=str)
def test_a_packaged_configuration_in_place_of_a_file_is_a_warning(name, use, tmp_path, monkeypatch):
    """The command line said it; from Python a mistyped folder ran another experiment without a word."""
    monkeypatch.chdir(tmp_path)
    words = f"^there is no file {re.escape(str(name))} here: using the packaged configuration quickstart$"
    with pytest.warns(UserWarning, match=words) as caught, contextlib.suppress(dpcfl.ConfigError):
        use(name, tmp_path / "out")
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]
    with warnings.catch_warnings(), contextlib.suppress(dpcfl.ConfigError):
        warnings.simplefilter("error")
        use("quickstart", tmp_path / "out")


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
