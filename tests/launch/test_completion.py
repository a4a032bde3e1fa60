"""Completion in shells: configurations, override keys and their values, without torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import ROOT

from dpcfl_net.algorithms.base import registry
from dpcfl_net.experiment import config, config_overrides
from dpcfl_net.experiment.config_keys import allowed_values
from dpcfl_net.launch.bench.registry import ROWS
from dpcfl_net.launch.cli.commands import bench, completion
from dpcfl_net.launch.cli.commands.completion import complete_override

ASK = """
import sys
from dpcfl_net.launch.cli import main
try:
    main()
finally:
    print(sorted({"torch", "opacus", "sklearn", "scipy", "plotly", "ray"} & set(sys.modules)))
"""


def ask_bash(*words: str) -> list[str]:
    """What the process answers when bash asks for the last of some words, and its heavy modules."""
    asked = {"COMP_WORDS": "\n".join(["dpcfl", *words]), "COMP_CWORD": str(len(words)), completion.VARIABLE: "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **asked}, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_bash_gets_keys_and_loads_nothing_heavy():
    assert ask_bash("run", "quickstart", "privacy.de") == ["privacy.delta=", "privacy.delta=VALUE", "[]"]


def test_bash_splits_words_at_the_equals_sign():
    assert ask_bash("sweep", "quickstart", "seed", "=", "0:2", "algorithm", "=", "global,lo") == ["global,local", "[]"]


def test_names_of_configurations_are_completed():
    assert ask_bash("run", "quick") == ["quickstart", "[]"]
    assert set(completion.configurations("threats/")) > {"threats/invert_dp", "threats/invert_raw"}


@pytest.mark.parametrize(
    ("before", "word", "found"),
    [
        ([], "priv", ["privacy.epsilon=", "privacy.delta="]),
        ([], "privacy.tr", ["privacy.trust=", "privacy.trust=secure-aggregation"]),
        ([], "privacy.unit=", ["privacy.unit=sample", "privacy.unit=client"]),
        ([], "algorithm=glo", ["algorithm=global"]),
        ([], "algorithm=global,mr", ["algorithm=global,mr-mtl"]),
        ([], "algorithm.name=or", ["algorithm.name=oracle"]),
        ([], "algorithm.la", ["algorithm.lam="]),
        ([], "data.dataset=fa", ["data.dataset=fashion-mnist"]),
        ([], "model=digits", ["model=digits-cnn"]),
        ([], "runtime.durable=", ["runtime.durable=true", "runtime.durable=false"]),
        (["rounds=3", "algorithm"], "em", ["em-fdro"]),
        (["algorithm=global"], "roun", ["rounds="]),
    ],
)
def test_keys_and_values_are_completed(before, word, found):
    assert set(found) <= set(complete_override(before, word))


def test_unknown_words_have_no_completion():
    assert complete_override([], "privacy.nothing") == complete_override([], "privacy.epsilon=5") == []


def test_fish_gets_a_single_candidate():
    assert complete_override([], "rou", "complete_fish") == ["rounds="]


def test_the_top_level_is_short():
    found = complete_override([], "")
    assert {"rounds=", "privacy.", "algorithm=", "algorithm."} <= set(found)
    assert len(found) < 25


def test_every_completed_key_is_a_key_of_the_configuration():
    keys = allowed_values()
    assert set(keys["algorithm"]) == set(registry())
    document = config.read_document(config.find("quickstart"))
    for key in keys:
        if key != "algorithm" and not key.startswith("algorithm."):
            config_overrides.change(document, [f"{key}=[[]]"])  # no setting has this value, but a known key
    with pytest.raises(config.ConfigError) as error:
        config.resolve(document)
    assert not [problem for problem in error.value.problems if "unknown key" in problem]
    assert len(error.value.problems) > 50


def test_benchmarks_are_those_of_the_registry():
    assert (*ROWS, "all", *bench.RUNS) == bench.BENCHMARKS
