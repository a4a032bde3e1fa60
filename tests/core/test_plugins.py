"""Plugin data sets, models and algorithms: found, checked, shared, pinned by the job, and run as processes."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, SMALL, assert_nothing_left, only_run
from own_modules import own_modules
from simulate import simulate
from torch import nn

import dpcfl_net as dpcfl
from dpcfl_net.algorithms.base import algorithm_of
from dpcfl_net.core import plugins, runlog
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.data import cache, datasets, own
from dpcfl_net.data.records import ClientData
from dpcfl_net.experiment import config, config_schema
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.model_template import model_template
from dpcfl_net.experiment.statement import privacy_statement
from dpcfl_net.federation.engine import Engine
from dpcfl_net.launch.placement import parents
from dpcfl_net.runtime import evaluation
from dpcfl_net.runtime.one_process import federation
from dpcfl_net.training import model_check, models
from dpcfl_net.training.dpsgd import Trainer
from dpcfl_net.transport.identities import make_identities
from dpcfl_net.transport.keys import make_keys
from dpcfl_net.transport.observer_notes import Models

EXAMPLES = ROOT / "docs" / "examples"
# Without the current folder on the path: what is found there was put there by the command itself.
COMMAND = [sys.executable, "-P", "-c", "from dpcfl_net.launch.cli import main; main()"]

DATA = """
import numpy as np

def load(root):
    rng = np.random.default_rng(0)
    given = dict(
        train_x=rng.integers(0, 256, (120, 1, 6, 6), np.uint8), train_y=rng.integers(0, 3, 120),
        test_x=rng.integers(0, 256, (30, 1, 6, 6), np.uint8), test_y=rng.integers(0, 3, 30), classes=3, mean=0.5, std=0.25)
    CHANGE
    return given
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes modules into a folder of their own, which is the current one; forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own._content.cache_clear()

    def write(name: str, text: str) -> None:
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    with own_modules(tmp_path):
        yield write
    own._content.cache_clear()


def data(change: str = "pass") -> str:
    return DATA.replace("CHANGE", change)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("mine:", "", ["package.module:function"]),
        ("os.path:../x", "", ["package.module:function"]),
        ("absent:load", "", ["no module 'absent'", "current"]),
        ("mine.py:load", "", ["name the module, without .py: mine:load"]),
        ("mine.deeper:load", "", ["no module 'mine.deeper'"]),
        ("mine:lod", "def load(root): pass", ["mine has no 'lod'"]),
        ("mine:load", "load = 3", ["of type int, not a function"]),
        ("mine:load", "import absent_library", ["importing mine", "'absent_library'", "mine.py, line 1"]),
        ("mine:load", "\n\n1 / 0", ["ZeroDivisionError: division by zero", "mine.py, line 3"]),
        ("mine:load", "def load(root:", ["SyntaxError: '(' was never closed (mine.py, line 1)\n"]),
        ("mine:load", "raise SystemExit(0)", ["SystemExit"]),
        (
            "mine:load",
            "def load(root):\n    raise OSError('no disk')",
            ["the function raised OSError: no disk", "mine.py, line 2"],
        ),
        ("mine:load", "def load(): pass", ["the function raised TypeError", "0 positional arguments but 1"]),
    ],
)
def test_what_cannot_be_found_or_called_is_a_sentence(module, tmp_path, name, text, words):
    module("mine", text)
    with pytest.raises(ConfigError) as caught:
        plugins.call("data.dataset", name, tmp_path)
    (problem,) = caught.value.problems
    words = [str(tmp_path) if word == "current" else word for word in [f"data.dataset is {name!r}", *words]]
    assert [word for word in words if word not in f"{problem}\n"] == []


@pytest.mark.parametrize("scope", ["run", "dataset"])
def test_a_record_book_refuses_a_function_whose_records_differ_from_call_to_call(module, tmp_path, scope):
    """Its records would be new to the book in every run, and a budget would never be used up."""
    ledger = {"scope": "dataset", "root": str(tmp_path / "book")} if scope == "dataset" else {}
    asked = {**document(), "ledger": ledger, "privacy": {"epsilon": 5, "delta": 1e-2}}
    module("mine", data().replace("default_rng(0)", "default_rng()"))
    if scope == "run":
        assert config.resolve(asked).data.sha256
        return
    with pytest.raises(
        ConfigError, match=r"ledger\.scope is 'dataset': mine:load returned other records when it was called again"
    ):
        config.resolve(asked)
    pinned = config.resolve({**asked, "ledger": {}}).data.sha256
    again = config.resolve({**asked, "data": {**asked["data"], "sha256": pinned}})
    assert again.data.sha256 == pinned
    del sys.modules["mine"]
    module("mine", data())
    own._content.cache_clear()
    assert config.resolve(asked).data.sha256 != pinned


def test_a_function_of_a_package_in_the_current_folder_is_found(module):
    module("packed.inner", "def load(root): return root")
    assert plugins.is_plugin("packed.inner:load")
    assert not plugins.is_plugin("fashion-mnist")
    assert plugins.call("data.dataset", "packed.inner:load", 7) == 7


def test_code_of_a_notebook_is_refused_before_a_run_starts(monkeypatch):
    """The run started, and other processes said that __main__ has no such function."""
    monkeypatch.setattr(sys.modules["__main__"], "net", len, raising=False)
    with pytest.raises(ConfigError, match=r"cannot import the code of a script or notebook; .*give the name my_code:net$"):
        plugins.load("model.name", "__main__:net")
    for document in ({"model": plugins.load}, {"model": {"name": plugins.load}}):
        with pytest.raises(ConfigError, match=r"give its name, 'dpcfl_net\.core\.plugins:load'$"):
            config.load("quickstart", document)


def test_a_configuration_alone_executes_no_command(module, tmp_path):
    """`data.dataset: os:system` executed `data.root` in a shell, also with --dry-run, and shutil:rmtree removed the data sets."""
    (tmp_path / "data").mkdir()
    for name, root in (("os:system", f"x; touch {tmp_path}/executed"), ("shutil:rmtree", "data"), ("builtins:exec", "data")):
        document = {**SMALL, "data": {**SMALL["data"], "dataset": name, "root": root, "shift": "none"}}
        with pytest.raises(ConfigError, match=f"data.dataset is '{name}': .* is a module of Python"):
            config.resolve(document)
    with pytest.raises(ConfigError, match="antigravity is a module of Python"):
        plugins.load("data.dataset", "antigravity:load")
    assert "antigravity" not in sys.modules
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_an_own_module_may_have_a_name_that_hides_one_of_pythons(module):
    module("this", "def load(root): return 3")
    assert plugins.call("data.dataset", "this:load", Path()) == 3


def test_an_imported_module_is_not_searched_again(module, monkeypatch):
    module("mine_once", "def load(root): return 1")
    searches = []
    monkeypatch.setattr("importlib.invalidate_caches", lambda: searches.append(1))
    assert plugins.load("data.dataset", "mine_once:load") is plugins.load("data.dataset", "mine_once:load")
    assert len(searches) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("given = [1, 2]", ["must return a dict", "got list"]),
        ("del given['std']", ["must return a dict", "train_client and test_client; it lacks 'std'"]),
        ("given['extra'] = 1", ["train_client and test_client; it has unknown keys 'extra'"]),
        ("given['clases'] = given.pop('classes')", ["; it lacks 'classes'; it has unknown keys 'clases'"]),
        ("given['train_client'] = np.arange(120)", ["; it lacks 'test_client'"]),
        (
            "given.update(train_client=np.array(['a', None] * 60), test_client=np.array(['a'] * 30, object))",
            ["train_client must be whole numbers or text", "got object (120,) with None"],
        ),
        ("given['train_x'] = given['train_x'].tolist()", ["train_x must be a numpy array, got list"]),
        (
            "given['train_x'] = given['train_x'] / 255",
            ["train_x must be images", "float64 (120, 1, 6, 6): images with values from 0 to 1"],
        ),
        ("given['train_x'] = given['train_x'][:, 0]", ["uint8 (120, 6, 6)"]),
        ("given['test_x'] = np.zeros((30, 6, 6, 1), np.uint8)", ["test_x looks like (N, H, W, C)", "transpose(0, 3, 1, 2)"]),
        ("given['test_x'] = given['test_x'][..., :5]", ["test_x is uint8 (1, 6, 5)"]),
        ("given['test_x'] = np.zeros((30, 36), np.float32)", ["test_x is float32 (36,)"]),
        ("given['test_x'], given['test_y'] = given['test_x'][:0], given['test_y'][:0]", ["test_x is empty"]),
        ("given['train_x'] = np.full((120, 4), np.nan, np.float32)", ["train_x holds a value that is not finite"]),
        ("given['train_y'] = given['train_y'][:-1]", ["train_x has 120 records and train_y 119"]),
        ("given['train_y'] = given['train_y'][:, None]", ["train_y must be whole numbers (N,)", "(120, 1)"]),
        ("given['train_y'] = given['train_y'] * 1.0", ["train_y must be whole numbers", "float64"]),
        ("given['train_y'] = given['train_y'] + 1", ["train_y holds labels 1..3", "allow 0..2"]),
        ("given['test_y'] = given['test_y'] - 1", ["test_y holds labels -1..1"]),
        ("given['classes'] = 257", ["classes must be a whole number from 2 to 256, got 257"]),
        ("given['classes'] = 3.0", ["classes must be", "got 3.0"]),
        ("given['mean'] = float('inf')", ["mean must be one finite float32 number, got inf"]),
        ("given['mean'] = np.zeros(3)", ["mean must be one finite float32 number"]),
        ("given['mean'] = 1e39", ["mean must be one finite float32 number, got 1e+39"]),
        ("given['std'] = 10**400", ["std must be one finite float32 number above 0"]),
        ("given['std'] = 1e-60", ["std must be one finite float32 number above 0, got 1e-60"]),
        ("given['std'] = 0.0", ["std must be one finite float32 number above 0, got 0.0"]),
    ],
)
def test_what_is_no_data_set_is_refused(module, change, words):
    module("mine", data(change))
    with pytest.raises(ConfigError) as caught:
        datasets.load("mine:load")
    (problem,) = caught.value.problems
    assert [word for word in ["data.dataset is 'mine:load'", *words] if word not in problem] == []


def test_every_mistake_of_a_data_set_comes_at_once(module):
    module(
        "mine", data("given.update(std=-1, mean='a', classes=1, train_y=given['train_y'][:5], test_x=given['test_x'] + 0.5)")
    )
    with pytest.raises(ConfigError) as caught:
        datasets.load("mine:load")
    assert len(caught.value.problems) == 6


def test_own_images_are_what_the_function_gave_and_are_pinned(module, tmp_path):
    module("mine", data())
    images = datasets.load("mine:load")
    given = plugins.load("data.dataset", "mine:load")(tmp_path)
    for key in cache.KEYS:
        assert np.array_equal(getattr(images, key), given[key])
        assert not getattr(images, key).flags.writeable
    assert (images.input_shape, images.classes, images.mean, images.std) == ((1, 6, 6), 3, 0.5, 0.25)
    assert (images.train_y.dtype, len(images.sha256)) == (np.uint8, 64)


def test_float_features_reach_the_model_normalised(module):
    module("mine", data("given.update({k: given[k].reshape(-1, 36) / np.float32(7) for k in ('train_x', 'test_x')})"))
    images = datasets.load("mine:load")
    assert images.input_shape == (36,)
    x, y = ClientData(images, "train", np.array([5, 9]), label_shift=1).batch(np.array([1]), 3)
    assert np.allclose(x[0].numpy(), (images.train_x[9] - 0.5) / 0.25, atol=1e-5)
    assert not x[1:].any()
    assert y.tolist() == [(int(images.train_y[9]) + 1) % 3, 0, 0]


def test_the_function_is_called_once_and_its_root_is_the_data_folder(module, tmp_path):
    module("mine", data("open('calls', 'a').write(f'{root}\\n')"))
    first = datasets.load("mine:load", tmp_path / "there")
    second = datasets.load("mine:load", tmp_path / "there")
    third = datasets.load("mine:load", tmp_path / "there", first.sha256)
    assert first.sha256 == second.sha256 == third.sha256
    assert (tmp_path / "calls").read_text() == f"{tmp_path / 'there'}\n"


def test_changed_data_are_noticed_and_pinned_data_stay(module, tmp_path, monkeypatch):
    np.save("pixel.npy", np.uint8(1))
    module("mine", data("given['train_x'][0, 0, 0, 0] = np.load('pixel.npy')"))
    first = datasets.load("mine:load")
    np.save("pixel.npy", np.uint8(2))
    own._content.cache_clear()  # as in a new process
    second = datasets.load("mine:load")
    assert (first.train_x[0, 0, 0, 0], second.train_x[0, 0, 0, 0]) == (1, 2)
    assert datasets.load("mine:load", sha256=first.sha256).train_x[0, 0, 0, 0] == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other host"))
    with pytest.raises(ConfigError, match="differ from those that made the job"):
        datasets.load("mine:load", sha256=first.sha256)
    assert datasets.load("mine:load", sha256=second.sha256).train_x[0, 0, 0, 0] == 2


def document(**changes) -> dict:
    settings = {
        "data": {"dataset": "mine:load", "clients": [1, 1], "shift": "rotation"},
        "model": {"name": "linear"},
        "algorithm": {"name": "global"},
    }
    return {**copy.deepcopy(SMALL), **settings, **changes}


def problems(**changes) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config.resolve(document(**changes))
    return caught.value.problems


def test_a_resolved_configuration_pins_the_content_and_the_job_too(module, tmp_path):
    module("mine", data())
    resolved = config.resolve(document())
    assert resolved.data.sha256 == datasets.load("mine:load").sha256
    assert config.resolve(yaml.safe_load(yaml.safe_dump(resolved.model_dump(mode="json", exclude={"algorithms"})))) == resolved
    make_keys(tmp_path / "keys", 2)
    job = make_job(resolved, tmp_path / "keys")
    assert job.experiment.data["sha256"] == resolved.data.sha256
    assert resolved.data.sha256 not in job.protocol.model_dump_json()
    assert config.resolve(SMALL).data.sha256 is None


def test_settings_that_do_not_go_with_the_records_are_named(module):
    module("mine", data("given.update({k: given[k][..., :4] for k in ('train_x', 'test_x')})"))
    assert "data.shift is 'rotation'" in problems()[0]
    flips = {"dataset": "mine:load", "clients": [1] * 4, "shift": "label-flip"}
    assert "4 clusters of 3 classes" in problems(data=flips)[0]
    found = problems(data={"dataset": "mine:load", "clients": [1], "shift": "none"}, model={"name": "net"})
    assert found == [
        "model.name is 'net': must be one of cnn, small-cnn, digits-cnn, cifar-cnn, resnet18, resnet18-cifar, linear, char-lstm, char-transformer or package.module:function"
    ]
    unpinned = {"dataset": "digits", "clients": [1], "sha256": "0" * 64}
    assert "sha256 belongs to a data set of your own" in problems(data=unpinned)[0]
    module("flat", data("given.update({k: np.zeros((len(given[k]), 4), np.float32) for k in ('train_x', 'test_x')})"))
    found = problems(data={"dataset": "flat:load", "clients": [1, 1]}, model={"name": "cnn"}, local={"batch_size": 500})
    for word, problem in zip(("data.shift", "takes images", "local.batch_size"), found, strict=True):
        assert word in problem


def test_the_schema_says_that_own_functions_are_taken():
    schema = config_schema.schema()
    described = [
        schema["$defs"]["DataSection"]["properties"]["dataset"],
        schema["$defs"]["ModelSettings"]["properties"]["name"],
    ]
    assert ["package.module:function" in part["description"] for part in described] == [True, True]


class Forward(nn.Module):
    """A network whose forward is the given function of its layers and the batch."""

    def __init__(self, forward, *layers):
        super().__init__()
        self.layers, self.own = nn.ModuleList(layers), forward

    def forward(self, x):
        return self.own(self.layers, x)


def with_frozen_bias():
    module = nn.Linear(4, 3)
    module.bias.requires_grad_(False)
    return module


class Counting(nn.Linear):
    """Has a state beside its parameters, as layers that count their calls or calibrate themselves."""

    def get_extra_state(self):
        return {"calls": 1}

    def set_extra_state(self, state):
        pass


def built_for_inference():
    with torch.inference_mode():
        return nn.Linear(4, 3)


def with_transposed_weight():
    module = nn.Linear(4, 3)
    module.weight = nn.Parameter(torch.zeros(4, 3).T)
    return module


def folding(layers, x):
    return layers[1](torch.tanh(layers[0](x.reshape(-1, 2))).reshape(len(x), -1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Flatten(), "no parameters to train"),
        (with_frozen_bias, "parameter 'bias' is frozen"),
        (lambda: nn.Linear(4, 3).double(), "parameter 'weight' is torch.float64"),
        (lambda: nn.Linear(4, 3, device="meta"), "on meta: must be torch.float32 on the CPU"),
        (lambda: nn.LazyLinear(3), "parameter 'weight' has no shape yet"),
        (lambda: nn.Sequential(Counting(4, 3)), "layer '0' has a state of its own (get_extra_state)"),
        (built_for_inference, "parameter 'weight' was built in torch.inference_mode"),
        (with_transposed_weight, "parameter 'weight' is not contiguous"),
        (lambda: torch.jit.script(nn.Linear(4, 3)), "TorchScript"),
        (
            lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)),
            "'1' (BatchNorm1d) mixes the records of a batch, so no record's gradient can be clipped: use nn.GroupNorm(1, 5);",
        ),
        (lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)), "'0' (Dropout) draws from torch's generator"),
        (lambda: nn.Linear(4, 5), "must be float32 (3, 3), got torch.float32 (3, 5)"),
        (lambda: Forward(lambda own, x: (own[0](x),), nn.Linear(4, 3)), "got tuple"),
        (lambda: nn.Linear(5, 3), "batch of shape (3, 4) raised RuntimeError"),
        (lambda: Forward(lambda own, x: own[0](x) / 0, nn.Linear(4, 3)), "not finite"),
        (lambda: Forward(lambda own, x: own[0](nn.functional.dropout(x)), nn.Linear(4, 3)), "a second time"),
        (lambda: Forward(lambda own, x: own[0](x.sub_(1.0)), nn.Linear(4, 3)), "or changes its input in place"),
        (lambda: Forward(lambda own, x: own[0](x) * (2 if own.training else 1), nn.Linear(4, 3)), "those in evaluation"),
        (lambda: Forward(lambda own, x: own[0](x - x.mean(0)), nn.Linear(4, 3)), "the other records of its batch"),
        (lambda: Forward(lambda own, x: own[0](x), nn.Linear(4, 3), nn.Linear(2, 2)), "layers.1.weight, layers.1.bias: remove"),
    ],
)
def test_a_model_that_cannot_be_trained_record_by_record_is_refused(make, words):
    with pytest.raises(ConfigError) as caught:
        model_check.check(make(), (4,), 3)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), "fast"),
        (lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Dropout(0.0), nn.Linear(5, 3)), "opacus"),
        (lambda: Forward(lambda own, x: own[1](torch.tanh(own[0](torch.tanh(own[0](x))))), nn.Linear(4, 4), nn.Linear(4, 3)), "opacus"),
    ],
)  # fmt: skip
def test_a_model_that_can_be_trained_passes_and_takes_its_path(make, path):
    state = torch.random.get_rng_state()
    module = make()
    torch.random.set_rng_state(state)
    model_check.check(module, (4,), 3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert Trainer(module, clip=1, learning_rate=1, batch_size=4).path == path


def test_a_model_whose_gradients_one_engine_gets_wrong_is_refused_with_it_and_taken_by_another():
    module = Forward(folding, nn.Linear(2, 2), nn.Linear(4, 3))
    with pytest.raises(ConfigError, match="the opacus engine's per-record gradients of it are not autograd's"):
        model_check.check(module, (4,), 3, path="opacus")
    assert model_check.check(module, (4,), 3).path == "vmap"
    assert Trainer(module, clip=1, learning_rate=1, batch_size=4, input_shape=(4,)).path == "vmap"


def one_by_one(layers, x):
    return torch.stack([layers[0](row if float(row.sum()) > 0 else -row) for row in x])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Forward(lambda own, x: own[0](x) if len(x) < 20 else own[0](x[:20]), nn.Linear(4, 3)), "the other records"),
        (
            lambda: Forward(lambda own, x: own[0](x.reshape(3, -1)), nn.Linear(4, 3)),
            "batch of shape (1, 4) raised RuntimeError",
        ),
        (
            lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(7, 3)),
            "in layer '1' (Linear(in_features=7, out_features=3, bias=True)), whose input has the shape (3, 8)",
        ),
        (lambda: Forward(one_by_one, nn.Linear(4, 3)), "no engine gives the model's per-record gradients (opacus raised"),
    ],
)
def test_what_fails_is_named(make, words):
    with pytest.raises(ConfigError) as caught:
        model_check.check(make(), (4,), 3)
    assert words in str(caught.value)


MODEL = "from torch import nn\nimport numpy, torch\n"
STRICT = """
class Strict(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.output = nn.Linear(36, classes)

    def forward(self, x):
        logits = self.output(x.flatten(1)) ** 2
        if not logits.isfinite().all():
            raise FloatingPointError("these logits are not finite")
        return logits

def build(input_shape, classes): return Strict(classes)
"""
TABLE = """
class Table(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.table, self.output = nn.Embedding(3, 4), nn.Linear(4, classes)

    def forward(self, x):
        return self.output(self.table(CODES).mean(1))

def build(input_shape, classes): return Table(classes)
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def build(input_shape, classes): return 3", "must return a torch.nn.Module, got int"),
        ("def build(input_shape, classes): return nn.Sequential(nn.Linear(36, 5), nn.BatchNorm1d(5))", "BatchNorm1d"),
        ("def build(input_shape, classes): return nn.Linear(36, classes)", "model.name is 'net:build'"),
        (
            "def build(input_shape, classes):\n    net = nn.Sequential(nn.Flatten(), nn.Linear(36, classes))\n"
            "    net[1].weight.data[0, 0] = float(numpy.random.rand())\n    return net",
            "different parameters",
        ),
        (
            "def build(input_shape, classes, wide=[4]):\n    wide[0] += 1\n"
            "    return nn.Sequential(nn.Flatten(), nn.Linear(36, wide[0]), nn.ReLU(), nn.Linear(wide[0], classes))",
            "different parameters",
        ),
        (TABLE.replace("CODES", "x.flatten(1).round().long()"), "raises IndexError"),
        (STRICT, "raises with weights of 1e30 FloatingPointError"),
    ],
)
def test_a_model_is_tried_before_anything_starts(module, text, words):
    module("mine", data())
    module("net", MODEL + text)
    (problem,) = problems(model={"name": "net:build"})
    assert words in problem
    assert "model.name is 'net:build'" in problem


def test_a_model_that_clamps_its_codes_takes_every_record(module):
    """Without the clamp a client with a rare code stopped, at the target epsilon."""
    module("mine", data())
    module("net", MODEL + TABLE.replace("CODES", "x.flatten(1).round().long().clamp(0, 2)"))
    config.resolve(document(model={"name": "net:build"}))


GUARDED = """
class Guarded(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.hidden, self.output = nn.Linear(36, 8), nn.Linear(8, classes)

    def forward(self, x):
        h = self.hidden(x.flatten(1))
        GUARD
        return self.output(torch.tanh(h))

def build(input_shape, classes): return Guarded(classes)
"""
BATCH_GUARDS = (
    "h = h if h.isfinite().all() else h * 0",
    "h = h if h.isfinite().all() else torch.zeros_like(h)",
    "h = h / h.detach().abs().max().clamp(min=1e4)",
)


@pytest.mark.parametrize("guard", BATCH_GUARDS)
def test_a_guard_against_overflow_that_changes_other_records_is_refused(module, guard):
    """With weights of a server under which one record overflows, the gradients of all others changed, at the target epsilon."""
    module("mine", data())
    module("net", MODEL + GUARDED.replace("GUARD", guard))
    (problem,) = problems(model={"name": "net:build"})
    assert "model.name is 'net:build'" in problem
    assert "which a server may send, beside a record of the numbers" in problem


def test_a_guard_against_overflow_of_each_record_is_taken(module):
    module("mine", data())
    guard = "h = torch.where(h.isfinite().all(1, keepdim=True), h, torch.zeros_like(h))"
    module("net", MODEL + GUARDED.replace("GUARD", guard))
    config.resolve(document(model={"name": "net:build"}))


GOOD = (
    MODEL
    + "def build(input_shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(36, WIDE), nn.ReLU(), nn.Linear(WIDE, classes))"
)


def test_first_values_come_from_the_seed_alone(module):
    module("net", GOOD.replace("WIDE", "5"))
    first = models.initial("net:build", (1, 6, 6), 3, 4)
    torch.manual_seed(1)
    assert np.array_equal(first, models.initial("net:build", (1, 6, 6), 3, 4))
    assert not np.array_equal(first, models.initial("net:build", (1, 6, 6), 3, 5))
    records = np.zeros((2, 1, 6, 6), np.uint8)
    images = SimpleNamespace(input_shape=(1, 6, 6), classes=3, task="classification", train_x=records, mean=0.0, std=1.0)
    assert model_template("net:build", images, 0).parameters == len(first) == 36 * 5 + 5 + 5 * 3 + 3


def test_a_worker_refuses_another_model_than_the_jobs(module, tmp_path):
    module("mine", data())
    module("net", GOOD.replace("WIDE", "5"))
    make_keys(tmp_path / "keys", 2)
    job = make_job(config.resolve(document(model={"name": "net:build"})), tmp_path / "keys")
    assert Engine.of(job.protocol).trainer.path == "fast"
    module("net", GOOD.replace("WIDE", "15"))  # another length, so that no compiled copy passes for it
    del sys.modules["net"]
    with pytest.raises(Refused, match="net:build"):
        Engine(job.protocol)


ALGORITHM = """
from dpcfl_net.algorithms import base
from dpcfl_net.algorithms.global_model import Global
from dpcfl_net.core.types import State

class Damped(Global):
    class Options(base.Options):
        share: float = 0.5

    def round(self, state, t, fed):
        models = super().round(state, t, fed).models
        moved = state.models + self.options.share * (models - state.models)
        return State(moved, state.assignment, diagnostics={"share": self.options.share})

def build(): pass
"""


def test_an_algorithm_of_ones_own_is_found_planned_and_named_in_the_statement(module, tmp_path):
    module("mine", data())
    module("own_rounds", ALGORITHM)
    resolved = config.resolve(document(algorithm={"name": "own_rounds:Damped", "share": 0.25}))
    assert resolved.algorithm == {"name": "own_rounds:Damped", "share": 0.25}
    make_keys(tmp_path / "keys", 2)
    job = make_job(resolved, tmp_path / "keys")
    assert job.algorithm.options.share == 0.25
    assert len(job.algorithm.plan(job.protocol.roster[0])) == resolved.rounds
    said = privacy_statement(job.protocol, None)["not_covered"]
    assert "any other use of the records by the code of own_rounds:Damped in the client's process" in said
    assert any(part.startswith("copies of a record in one client or several") for part in said)
    del sys.modules["own_rounds"]
    (tmp_path / "own_rounds.py").unlink()
    with pytest.raises(Refused, match="no module 'own_rounds'"):
        algorithm_of(job.protocol)


SHAPED = """
from pathlib import Path

class Shaped(Global):
    class Options(base.Options):
        sides: tuple[int, int] = (1, 2)
        names: frozenset[str] = frozenset({"a"})
        table: Path = Path("table.csv")
        key: bytes = b"k"
"""


def test_options_may_be_tuples_sets_paths_and_bytes_which_a_job_holds_as_lists_and_text(module, tmp_path):
    module("mine", data())
    module("own_shapes", ALGORITHM + SHAPED)
    make_keys(tmp_path / "keys", 2)
    for given, sides in ({}, (1, 2)), ({"sides": [3, 4], "table": "b.csv"}, (3, 4)):
        job = make_job(config.resolve(document(algorithm={"name": "own_shapes:Shaped", **given})), tmp_path / "keys")
        found = algorithm_of(job.protocol).options
        assert (found.sides, found.names, found.key) == (sides, {"a"}, b"k")
        assert found.table == Path(given.get("table", "table.csv"))
    (problem,) = problems(algorithm={"name": "own_shapes:Shaped", "sides": [3]})
    assert "algorithm.sides" in problem


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("share = 0.5", "option share of Damped.Options has no annotation: must have one, as share: TYPE = 0.5"),
        (
            "share: list[memoryview] = []",
            "option share of Damped.Options has the type memoryview: must be of numbers, text, .*",
        ),
    ],
)
def test_an_option_that_no_configuration_can_hold_is_one_sentence_with_class_and_place(module, option, words):
    """It was pydantic's text of three lines, without the class."""
    module("mine", data())
    module("own_slips", ALGORITHM.replace("share: float = 0.5", option))
    (problem,) = problems(algorithm={"name": "own_slips:Damped"})
    assert re.fullmatch(rf"algorithm.name is 'own_slips:Damped': {words} \(own_slips.py, line 7\)", problem)


UNNAMED = """
from dataclasses import replace
import numpy as np
from dpcfl_net.algorithms.global_model import Global
from dpcfl_net.core.types import State

class Unnamed(Global):
    @classmethod
    def capabilities_for(cls, options, setting):
        return replace(super().capabilities_for(options, setting), published_models=2)

    def start(self, fed):
        return State(np.stack([fed.initial_model(0), fed.initial_model(1)]), [None] * len(fed.clients))

    def round(self, state, t, fed):
        return state
"""


def test_the_statement_names_clusters_that_the_observer_takes_from_training_records(module, tmp_path):
    """If the server names no cluster, the observer takes the one with the least training loss."""
    module("mine", data())
    module("unnamed", UNNAMED)
    make_keys(tmp_path / "keys", 2)
    job = make_job(config.resolve(document(algorithm={"name": "unnamed:Unnamed"})), tmp_path / "keys")
    m = job.protocol.model
    named = np.stack([models.initial(m.name, tuple(m.input_shape), m.classes, seed) for seed in (0, 1)])
    assert None not in evaluation.TestSetEvaluator(job, None).clusters_of(Models(1, [None] * len(job.protocol.roster), named))
    said = privacy_statement(job.protocol, None)["not_covered"]
    assert [line for line in said if line.startswith("clusters of clients in figures")]


def quick(algorithm):
    data = {**SMALL["data"], "train_per_client": 60}
    return {**SMALL, "data": data, "model": {"name": "linear"}, "rounds": 2, "algorithm": {"name": algorithm}}


def test_a_run_whose_algorithm_renamed_an_option_needs_its_earlier_name(module, tmp_path):
    """The error was about an unknown key with a like name elsewhere, and a run with the earlier name was refused as another job."""
    module("own_rounds", ALGORITHM)
    started = {**quick("own_rounds:Damped"), "algorithm": {"name": "own_rounds:Damped", "share": 0.25}}
    stopped = dpcfl.run(started, tmp_path / "runs", "in-process", progress=False, callbacks=[lambda metrics: False])
    renamed = ALGORITHM.replace("share: float", "portion: float").replace("options.share", "options.portion")
    module("own_rounds", renamed)
    importlib.reload(sys.modules["own_rounds"])
    with pytest.raises(ConfigError) as caught:
        dpcfl.resume(stopped.path, progress=False)
    assert caught.value.problems == [
        f"{stopped.path / 'config.yaml'}: own_rounds:Damped has no option 'share' now, with which this run started: restore it, or state "
        "its present name in the algorithm's Options, as earlier_names = {'share': 'PRESENT_NAME'}"
    ]
    module("own_rounds", renamed.replace("        portion", "        earlier_names = {'share': 'portion'}\n        portion"))
    importlib.reload(sys.modules["own_rounds"])
    resumed = dpcfl.resume(stopped.path, progress=False)
    assert (resumed.state, resumed.config.options.portion) == ("finished", 0.25)
    assert not [check for check in resumed.verify() if check.holds is False]
    config_file = stopped.path / "config.yaml"
    config_file.write_text(config_file.read_text().replace("share: 0.25", "share: 0.5"))
    (failed,) = [check for check in resumed.verify() if check.holds is False]
    assert "options.portion: 0.5 here, 0.25 there" in failed.detail


@pytest.mark.parametrize("federation", ["in-process", "network"])
def test_code_that_was_edited_after_its_import_does_not_run_as_it_was(module, tmp_path, federation):
    """In a notebook a run in one process silently had the old code, and one over the network the old plan and the new code."""
    module("own_rounds", ALGORITHM)
    document = quick("own_rounds:Damped")
    done = dpcfl.run(document, tmp_path / "runs", "in-process", progress=False, callbacks=[lambda metrics: False])
    module("own_rounds", ALGORITHM.replace("self.options.share *", "0.0 *"))
    with pytest.raises(ConfigError, match=r"'own_rounds:Damped': its code has changed since .* or the notebook's kernel"):
        dpcfl.run(document, tmp_path / "runs", federation, progress=False)
    with pytest.raises(ConfigError, match="its code has changed"):
        dpcfl.resume(done.path, progress=False)
    importlib.reload(sys.modules["own_rounds"])
    assert dpcfl.resume(done.path, progress=False).state == "finished"


LARGE = """
from dpcfl_net.algorithms.base import MODEL, UPDATE, on_client
from dpcfl_net.algorithms.global_model import Global
from dpcfl_net.core.types import Release

class Large(Global):
    @on_client(charges=["train"], takes={"model": MODEL}, gives={"update": UPDATE})
    def train(self, me, model):
        return Release(update=1000 * (me.dpsgd("train", model) - model))
"""


@pytest.mark.parametrize("changes", [{}, {"network": {"clock": "virtual"}}, {"federation": "network"}])
def test_an_update_above_its_bound_is_refused_in_one_process_as_over_the_network(module, tmp_path, changes):
    """In one process such an algorithm ran to its end, with models that no run over the network has."""
    module("large", LARGE)
    federation = changes.get("federation", "in-process")
    document = quick("large:Large") | {key: value for key, value in changes.items() if key == "network"}
    with pytest.raises(dpcfl.RunFailed, match=r"norm: update norm .* is over the bound"):
        dpcfl.run(document, tmp_path / "runs", federation, progress=False)


STEPS = """
from dpcfl_net.algorithms.base import MODEL, UPDATE, full_epochs, on_client
from dpcfl_net.algorithms.global_model import Global
from dpcfl_net.core.types import Release, TensorSpec
from dpcfl_net.privacy.slots import DPSGDSlot, GaussianSlot

class Steps(Global):
    def plan(self, client):
        return [DPSGDSlot("train", *full_epochs(self.protocol.local, client)), GaussianSlot("sums")] * self.protocol.rounds

    @on_client(charges=["train", "sums"], takes={"model": MODEL}, gives={"update": UPDATE, "sums": TensorSpec("f4", (64,))})
    def train(self, me, model):
        sums = me.noisy_sum("sums", lambda row: row, 1.0)
        return Release(update=me.dpsgd("train", model) - model, sums=sums)
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            'TensorSpec("f4", (64,))',
            'TensorSpec("f4", ("sides",))',
            "'train' of steps:Steps gives 'sums' with the side 'sides': must be",
        ),
        ('GaussianSlot("sums")', 'GaussianSlot("sum")', r"has slot 'sum' \(GaussianSlot\), .* 'train' charges train and sums"),
        ('DPSGDSlot("train"', 'DPSGDSlot("trained"', r"has slot 'trained' \(DPSGDSlot\), which no client step fills"),
        (
            "self.protocol.rounds",
            "(self.protocol.rounds + 1)",
            r"has slot 'train' 3 times: must be at most 2 times, since .* \('train' in 2 rounds\), and the noise pays for every slot\n.*'sums' 3",
        ),
        (', GaussianSlot("sums")]', "]", r"has slot 'train' \(DPSGDSlot\), which no client step fills with slots of this plan"),
        (
            '@on_client(charges=["train", "sums"], takes={"model": MODEL}, gives={"update": UPDATE, "sums": TensorSpec("f4", (64,))})',
            "",
            "fills with slots of this plan: the class has no client step, a method with @on_client",
        ),
    ],
)
def test_steps_that_plan_and_sides_do_not_fit_are_refused_before_anything_starts(module, tmp_path, old, new, words):
    """A side without a size was a traceback of --dry-run; a slot with another name was found when round 1 asked for the step."""
    make_keys(tmp_path / "keys", 2)
    module("steps", STEPS)
    resolved = config.resolve(quick("steps:Steps") | {"data": {**SMALL["data"], "clients": [2], "train_per_client": 60}})
    make_job(resolved, tmp_path / "keys")
    assert old in STEPS
    module("steps", STEPS.replace(old, new))
    importlib.reload(sys.modules["steps"])
    with pytest.raises(ConfigError, match=words):
        make_job(resolved, tmp_path / "keys")


def test_a_statistic_evaluates_the_jobs_model_on_one_record(module, tmp_path):
    """The linear model's outputs are W x + b; no documented function built the model in a client step."""
    statistic = """
        network, shape, found = me.module(model), self.protocol.model.input_shape, []
        def outputs(x):
            found.append((x @ model[:-10].reshape(10, -1).T + model[-10:], network(torch.from_numpy(x).float().reshape(-1, *shape)).detach().numpy()))
            return found[-1][1]
        sums = me.noisy_sum("sums", outputs, 1.0)
        assert len(found) == 61  # an empty record before the others
        assert all(np.allclose(plain, built, atol=1e-4) for plain, built in found)
        assert not np.allclose(found[1][1], found[2][1])
"""
    text = STEPS.replace('        sums = me.noisy_sum("sums", lambda row: row, 1.0)\n', statistic.lstrip("\n"))
    module("evaluating", "import numpy as np\nimport torch\n" + text.replace('"f4", (64,)', '"f4", (10,)'))
    document = quick("evaluating:Steps") | {"data": {**SMALL["data"], "clients": [2], "train_per_client": 60}}
    extra = "\n    def round(self, state, t, fed):\n        fed.call(self.train, common={'model': state.models[0]})\n        return state\n"
    with open(tmp_path / "evaluating.py", "a") as file:
        file.write(extra)
    assert dpcfl.run(document, tmp_path / "runs", "in-process", progress=False).state == "finished"


MISTAKEN = """
from dpcfl_net.algorithms.global_model import Global
from dpcfl_net.federation.aggregation import ModelMeans

class Mistaken(Global):
    @classmethod
    def capabilities_for(cls, options, setting):
        return CAPABILITIES

    @classmethod
    def problems(cls, options, setting):
        return PROBLEMS

    def round(self, state, t, fed):
        model = state.models[0]
        CALL
        return state

    def train_more(self, me, model):
        pass
"""


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        ("fed.call(self.train_more, common={})", dpcfl.RunFailed, "Mistaken.train_more is no client step: .* with @on_client"),
        ("fed.call(type(self).train, common={})", dpcfl.RunFailed, "train is no client step: .* such as self.train"),
        ("fed.call(self.train, each={99: {}})", dpcfl.RunFailed, "^round 1: each has client 99: must be one of 0 to 7"),
        (
            "fed.call(self.train, each={0: model})",
            dpcfl.RunFailed,
            r"^round 1: each\[0\] is of type ndarray: must be a mapping",
        ),
        ("fed.call(self.train, each=[0])", dpcfl.RunFailed, "^round 1: each is of type list: must be a mapping"),
        ("fed.call(self.train, common=model)", dpcfl.RunFailed, "^round 1: common is of type ndarray: must be a mapping"),
        (
            "fed.call(self.train, common={'model': model.tolist()})",
            dpcfl.RunFailed,
            "^round 1: common has 'model' of type list: must be a NumPy array",
        ),
        (
            "fed.call(self.train, common={'model': model.astype('f8')})",
            dpcfl.RunFailed,
            "tensor 'model' has dtype float64, allowed: float16, float32, int32, .*, uint8",
        ),
        (
            "fed.add_up(self.train, ModelMeans(state.models), {0: 0}, common={'model': model})",
            dpcfl.RunFailed,
            "^round 1: rows has no row of client 1, which is asked",
        ),
        (
            "fed.add_up(self.train, ModelMeans(state.models), common={'model': model})",
            dpcfl.RunFailed,
            "^round 1: client step 'train' gives no 'choice': add_up needs update and choice",
        ),
        (
            "fed.call(self.train, common={'model': model}).column('updates')",
            KeyError,
            "no tensor 'updates' .* tensors are update",
        ),
    ],
)
def test_a_wrong_call_of_an_own_algorithm_is_a_sentence(module, tmp_path, call, error, words):
    given = {"CALL": call, "CAPABILITIES": "super().capabilities_for(options, setting)", "PROBLEMS": "[]"}
    text = MISTAKEN
    for word, value in given.items():
        text = text.replace(word, value)
    module("mistaken", text)
    with pytest.raises(error, match=words):
        dpcfl.run(quick("mistaken:Mistaken"), tmp_path / "runs", "in-process", progress=False)


@pytest.mark.parametrize(
    ("capabilities", "problems", "words"),
    [
        ("None", "[]", "mistaken:Mistaken: `capabilities_for` returned NoneType: must be Capabilities"),
        (
            "super().capabilities_for(options, setting)",
            "'too few'",
            "mistaken:Mistaken: `problems` returned 'too few': must be a list",
        ),
        ("super().capabilities_for(options, setting)", "None", "mistaken:Mistaken: `problems` returned None: must be a list"),
        ("super().capabilities_for(options, setting)", "('too few',)", "^too few$"),
    ],
)
def test_a_wrong_result_of_a_check_of_an_own_algorithm_is_a_sentence(module, capabilities, problems, words):
    text = MISTAKEN.replace("CAPABILITIES", capabilities).replace("PROBLEMS", problems).replace("CALL", "pass")
    module("mistaken", text)
    with pytest.raises(ConfigError, match=words):
        config.resolve(quick("mistaken:Mistaken"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("cls, options, setting", "cls, options", r"`capabilities_for` is called as capabilities_for\(options, setting\), and is defined with"),
        ("    @classmethod\n", "", r"`capabilities_for` .* \(cls, options, setting\): missing a required argument: 'setting'"),
        ("me, model", "me, weights", r"step 'train' is called as train\(me, model=...\), .* `takes`, and is defined with \(me, weights\): miss"),
        ("me, model", "me, model, lam", r"defined with \(me, model, lam\): missing a required argument: 'lam'"),
        ("    KEPT", "    pass\n\n    def start(self):\n        pass", r"`start` is called as start\(fed\), and is defined with \(\): too many"),
        ("    KEPT", "    pass\n\n    def round(self, state, t):\n        pass", r"`round` .* \(state, t\): too many positional arguments"),
        ("    KEPT", "    pass\n\n    round = 3\n    def more(self):", "`round` .* and is of type int, not a method"),
    ],
)  # fmt: skip
def test_a_method_that_cannot_be_called_is_refused_before_anything_starts(module, old, new, words):
    """It was a TypeError in the middle of the run; that of a client step came after its charge."""
    assert old in PERSONAL
    module("own_rounds", PERSONAL.replace(old, new).replace("KEPT", ""))
    with pytest.raises(ConfigError, match=f"^algorithm.name is 'own_rounds:Personal': .*{words}"):
        config.resolve(quick("own_rounds:Personal"))


def test_numbers_and_arrays_of_numpy_are_diagnostics_as_well(module, tmp_path):
    """A round of two clusters had the phase "single", too, unless the algorithm gave another."""
    numpys = '{"share": np.float32(0.5), "moved": np.arange(2), "pairs": [np.int64(3)]}'
    text = UNNAMED.replace(
        "        return state\n",
        f"        return State(np.repeat(state.models[:1], t, 0), [0] * 7 + [t - 1], diagnostics={numpys})\n",
    )
    module("unnamed", text)
    done = dpcfl.run(quick("unnamed:Unnamed"), tmp_path / "runs", "in-process", progress=False)
    lines = [line["diagnostics"] for line in runlog.read(done.path / "clusters.jsonl") if "diagnostics" in line]
    given = {"share": 0.5, "moved": [0, 1], "pairs": [3]}
    assert lines == [{"phase": "single", "sizes": [8], **given}, {"sizes": [7, 1], **given}]
    assert done.final["diagnostics"] == {"share": 0.5}


def test_a_default_that_is_no_value_of_its_option_is_a_sentence(module):
    """It ended in a traceback of pydantic, which checks no defaults; an infinite default was called null."""
    module("mine", data())
    module("own_rounds", f"{ALGORITHM}\n{UNFINISHED}")
    default = "and this is its default in the Options of own_rounds"
    for name, given in {
        "Default": "'three': must be a valid integer",
        "Numpy": "np.int64(3): must be a valid integer",
        "Infinite": "inf: must be a finite number",
    }.items():
        assert problems(algorithm={"name": f"own_rounds:{name}"}) == [f"algorithm.share is {given}, {default}:{name}"]
        config.resolve(document(algorithm={"name": f"own_rounds:{name}", "share": 3}))


@pytest.mark.parametrize("name", ["a/b", "../a", "..", ".a"])
def test_arrays_of_diagnostics_have_the_name_of_a_file(module, tmp_path, name):
    """A name with a slash ended in a FileNotFoundError, or was written beside the run folder."""
    module(
        "own_rounds",
        "import numpy as np\n" + ALGORITHM.replace('{"share": self.options.share}', f"{{{name!r}: {{'x': np.ones(2)}}}}"),
    )
    with pytest.raises(dpcfl.RunFailed, match=r"Damped has a mapping under the name .* in State\.diagnostics: .* without '/'"):
        dpcfl.run(quick("own_rounds:Damped"), tmp_path / "runs", "in-process", progress=False)


PERSONAL = """
from dataclasses import replace
from dpcfl_net.algorithms.base import MODEL, UPDATE, on_client
from dpcfl_net.algorithms.global_model import Global
from dpcfl_net.core.types import Release

class Personal(Global):
    @classmethod
    def capabilities_for(cls, options, setting):
        return replace(super().capabilities_for(options, setting), personal=True)

    @on_client(charges=["train"], takes={"model": MODEL}, gives={"update": UPDATE})
    def train(self, me, model):
        trained = me.dpsgd("train", model)
        KEPT
        return Release(update=trained - model)
"""


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ("me.state['model'] = trained.repeat(2)", r'me\.state\["model"\] is float32 \(1300,\): must be float32 \(650,\)'),
        ("me.state['model'] = trained[None]", r"is float32 \(1, 650\): must be"),
        ("me.state['model'] = trained.astype('f8')", r"is float64 \(650,\): must be"),
    ],
)
def test_a_personal_model_of_another_shape_is_refused(module, tmp_path, kept, words):
    module("own_rounds", PERSONAL.replace("KEPT", kept))
    with pytest.raises(Refused, match=words):
        dpcfl.run(quick("own_rounds:Personal"), tmp_path / "runs", "in-process", progress=False)


def test_a_step_whose_slot_the_plan_lacks_is_refused_with_that_reason(module, tmp_path):
    """The message was that the job has no such task, though the class defines it."""
    own = PERSONAL.replace('["train"]', '["train", "select"]').replace("def train", "def choose").replace("KEPT", "")
    called = "    def round(self, state, t, fed):\n        fed.call(self.choose, common={'model': state.models[0]})\n"
    module("own_rounds", own.replace("personal=True", "personal=False") + called)
    with pytest.raises(
        dpcfl.RunFailed, match=r"the plan holds no task of kind 'choose': .* the plan lacks a slot that it charges"
    ):
        dpcfl.run(quick("own_rounds:Personal"), tmp_path / "runs", "in-process", progress=False)


def test_a_validation_loss_without_validation_records_says_what_to_set(module, tmp_path):
    loss = "from dpcfl_net.privacy.slots import GaussianSlot\n" + PERSONAL.replace('["train"]', '["train", "loss"]')
    planned = "def plan(self, client):\n        return [*super().plan(client), *[GaussianSlot('loss')] * 2]\n\n    @on_client"
    loss = loss.replace("@on_client", planned).replace("personal=True", "personal=False")
    module("own_rounds", loss.replace("KEPT", "me.noisy_loss('loss', model, 1.0)"))
    with pytest.raises(ValueError, match=r"no validation records .*: set data\.validation, for example to 0\.1"):
        dpcfl.run(quick("own_rounds:Personal"), tmp_path / "runs", "in-process", progress=False)
    held = quick("own_rounds:Personal")
    held |= {"data": {**held["data"], "validation": 0.2}, "privacy": {"epsilon": 5, "delta": 1e-4}}
    done = dpcfl.run(held, tmp_path / "runs", "in-process", progress=False)
    assert done.state == "finished"
    assert done.privacy.statement.covered == ("model updates", "other noisy values that clients send: loss")


@pytest.mark.parametrize(
    ("released", "words"),
    [
        ("trained[:-1]", r"tensor update: f4 \[649\], expected f4 \[650\]"),
        ("trained, loss=trained[0]", "tensors unexpected: loss"),
    ],
)
def test_a_release_of_another_form_names_its_client_step(module, tmp_path, released, words):
    module("own_rounds", PERSONAL.replace("KEPT", "").replace("update=trained - model", f"update={released}"))
    with pytest.raises(Refused, match=f"^template: release of client step 'train': {words}"):
        dpcfl.run(quick("own_rounds:Personal"), tmp_path / "runs", "in-process", progress=False)


@pytest.mark.parametrize(
    ("kept", "reason", "logged"),
    [
        (
            "me.state['count'] = 3",
            "me.state of step 'train' must hold NumPy arrays of float16, .* log names",
            "me.state has count of type int",
        ),
        ("me.state['head'] = trained.astype('f8')", "must hold NumPy arrays of", "me.state has head of type float64"),
        ("return trained - model", "step 'train' must return a Release", ""),
        ("me.dpsgd('train', model)", "step 'train' must run exactly those of the slots that it charges", ""),
    ],
)
def test_a_release_that_the_gate_withholds_names_its_step(module, tmp_path, kept, reason, logged):
    """The message named neither the step nor the array; the log names it, since the server reads the message."""
    module("own_rounds", PERSONAL.replace("KEPT", kept).replace("personal=True", "personal=False"))
    with pytest.raises(dpcfl.RunFailed, match=reason):
        dpcfl.run(quick("own_rounds:Personal"), tmp_path / "runs", "in-process", progress=False)
    assert logged in RunFolder(only_run(tmp_path / "runs")).log("in-process").read_text()


@pytest.mark.parametrize(("federation", "ledgers"), [("in-process", 8), ("network", 1)])
def test_a_client_that_is_never_asked_has_spent_nothing(module, tmp_path, federation, ledgers):
    """It had no ledger: in one process epsilon was unknown for all clients, and verify failed; over the network it still did."""
    called = (
        "    def round(self, state, t, fed):\n        fed.call(self.train, common={'model': state.models[0]}, each={1: {}})\n"
    )
    own = PERSONAL.replace("KEPT", "").replace("personal=True", "personal=False") + called + "        return state\n"
    module("own_rounds", own)
    document = quick("own_rounds:Personal") | {"privacy": {"epsilon": 5, "delta": 1e-4}, "runtime": {"max_live_workers": 1}}
    run = dpcfl.run(document, tmp_path / "runs", federation, progress=False)
    assert len([*(run.path / "ledgers").iterdir()]) == ledgers
    spent = [client.epsilon_spent for client in run.clients()]
    assert spent[1] > 0
    assert {*spent[:1], *spent[2:]} == {0.0}
    assert [check.detail for check in run.verify() if check.holds is False] == []


def test_an_error_of_a_client_step_names_its_line(module, tmp_path):
    """The message was the exception alone; file and line were in a log below the run folder."""
    text = PERSONAL.replace("KEPT", "{}['mine']")
    module("own_rounds", text)
    line = next(number for number, row in enumerate(text.splitlines(), 1) if "'mine'" in row)
    with pytest.raises(dpcfl.RunFailed, match=rf"ended with code 70: KeyError: 'mine' \(own_rounds\.py, line {line}\) \(log: "):
        dpcfl.run(quick("own_rounds:Personal"), tmp_path / "runs", "network", progress=False)


CLAIMS = """
from dataclasses import replace
import numpy as np
from dpcfl_net.algorithms.base import INDEX, MODEL, RAW_UPDATE, on_central_server, on_client
from dpcfl_net.algorithms.dp_fedavg import DPFedAvg
from dpcfl_net.algorithms.em_fdro import EMFDRO
from dpcfl_net.algorithms.global_model import Global
from dpcfl_net.core.types import Release, State, TensorSpec
from dpcfl_net.federation.asynchronous import Participation
from dpcfl_net.federation.secure.stages import MASKED, MASKING
from dpcfl_net.privacy.slots import CentralSlot, GaussianSlot, SelectionSlot

class Outside(DPFedAvg):
    def round(self, state, t, fed):
        updates = fed.call(self.train, common={"model": state.models[0]}).column("update")
        return State(state.models + np.mean([*updates.values()], axis=0), state.assignment)

class ClientInPlace(DPFedAvg):
    @on_client(charges=["raw"], takes={"model": MODEL}, gives={"update": RAW_UPDATE})
    def train(self, me, model):
        before = model.copy()
        model[:] = me.sgd("raw", model)
        return Release(update=model - before)

class Renamed(DPFedAvg):
    def round(self, state, t, fed):
        return fed.release(self.noisy_sum, models=state.models[0])

class ServerInPlace(DPFedAvg):
    @on_central_server(charges=["round"])
    def noisy_sum(self, me, model):
        clipped, answers = self.new_sums(), me.call(self.train, {client: {"model": model} for client in me.sample("round")})
        for client, answer in answers.items():
            model += answer["update"]
            clipped.add(client, [(0, answer["update"])])
        return Release(sum=me.noisy_total("round", "sums", clipped)[0][0])

class Submitted(DPFedAvg):
    def round(self, state, t, fed):
        for client in fed.clients:
            fed.submit(Participation(client, t, "train", {"model": state.models[0]}))
        updates = [fed.next_outcome().release["update"] for _ in fed.clients]
        return State(state.models + np.mean(updates, axis=0), state.assignment)

class Beside(DPFedAvg):
    @on_client(charges=["masked"], takes={**MASKING, "model": MODEL}, gives={"masked": MASKED, "last": INDEX})
    def masked_update(self, me, model):
        return Release(masked=super().masked_update(me, model).tensors["masked"], last=me.state["label"])

class BesideAsWords(DPFedAvg):
    @on_client(charges=["masked"], takes={**MASKING, "model": MODEL}, gives={"masked": MASKED, "last": TensorSpec("u4")})
    def masked_update(self, me, model):
        return Release(masked=super().masked_update(me, model).tensors["masked"], last=me.state["label"])

class Unmasked(DPFedAvg):
    @on_client(charges=["masked"], takes={**MASKING, "model": MODEL}, gives={"masked": MASKED})
    def masked_update(self, me, model):
        update = self.vector([(0, me.initial_model())])
        me.masked_update("masked", lambda: update)
        return Release(masked=update.astype(np.float32).view(np.uint32))

class Changed(DPFedAvg):
    @on_client(charges=["masked"], takes={**MASKING, "model": MODEL}, gives={"masked": MASKED})
    def masked_update(self, me, model):
        words = super().masked_update(me, model).tensors["masked"]
        words += np.uint32(1)
        return Release(masked=words)

class Reporting(DPFedAvg):
    def plan(self, client):
        return [*super().plan(client), *[GaussianSlot("loss", 10.0, doubles=False)] * self.protocol.rounds]

    def update(self, me, slot, model):
        me.state["drawn"] = 1 + me.state.get("drawn", np.zeros(1, np.int64))
        return super().update(me, slot, model)

    def round(self, state, t, fed):
        found, drawn = super().round(state, t, fed), []
        if t == self.protocol.rounds:
            drawn = fed.call(self.report, common={"model": found.models[0]}).column("drawn").values()
        return replace(found, diagnostics={"drawn": [int(count[0]) for count in drawn]})

    @on_client(charges=["loss"], takes={"model": MODEL}, gives={"loss": TensorSpec("f4"), "drawn": TensorSpec("i8", (1,))})
    def report(self, me, model):
        drawn = me.state.get("drawn", np.zeros(1, np.int64))
        return Release(loss=np.float32(me.noisy_loss("loss", model, 1.0)), drawn=drawn)

class Everyone(DPFedAvg):
    @on_central_server(charges=["round"])
    def noisy_sum(self, me, model):
        me.sample("round")
        clipped, tasks = self.new_sums(), {client: {"model": model} for client in self.clients}
        me.stream(self.train, lambda client, release: clipped.add(client, [(0, release["update"])]), tasks)
        return Release(sum=me.noisy_total("round", "sums", clipped)[0][0])

class Stateful(DPFedAvg):
    def update(self, me, slot, model):
        update = super().update(me, slot, model)
        me.state["last"] = update + me.state.get("last", np.float32(0))
        return me.state["last"]

class Population(DPFedAvg):
    def central_plan(self):
        return [CentralSlot("round", "fixed", 4, 100)] * self.protocol.rounds

class Hinted(DPFedAvg):
    def central_plan(self):
        n = len(self.clients)
        return [CentralSlot("round", "poisson", n / 2, n, (("hints", 0.5), ("sums", 0.5)))] * self.protocol.rounds

    @on_client(charges=["raw"], takes={"model": MODEL}, gives={"update": RAW_UPDATE, "hint": INDEX})
    def train(self, me, model):
        return Release(update=self.update(me, "raw", model), hint=np.int64(0))

def protecting(algorithm, unit, trust):
    @classmethod
    def capabilities_for(cls, options, setting):
        return replace(algorithm.capabilities_for.__func__(cls, options, setting), protects=((unit, trust),))
    return type(algorithm.__name__, (algorithm,), {"capabilities_for": capabilities_for})

Records = protecting(Global, "client", "untrusted-server")
Central = protecting(DPFedAvg, "sample", "trusted-server")

class Choices(Records):
    def plan(self, client):
        return [SelectionSlot("pick", 0.1)] * self.protocol.rounds

class Whole(Records):
    def plan(self, client):
        return [GaussianSlot("update")] * self.protocol.rounds

class Losses(EMFDRO):
    def update(self, me, model):
        return me.noisy_update("update", model)

    def slots(self, client):
        return GaussianSlot("loss", 10.0, doubles=False), GaussianSlot("update")
"""


def claims(name, unit="client", trust="trusted-server", **privacy):
    target = {"unit": unit, "trust": trust, "epsilon": 5, "delta": 1e-2, **privacy}
    sampled = {"name": f"own_claims:{name}", **({"sampling_rate": 0.5} if trust == "trusted-server" else {})}
    return {**quick(None), "algorithm": sampled, "privacy": target}


def test_the_statement_names_other_tensors_that_a_trusted_server_gets_and_publishes(module, tmp_path):
    module("own_claims", CLAIMS)
    make_keys(tmp_path, 8)
    statement = privacy_statement(make_job(config.resolve(claims("Hinted")), tmp_path).protocol, None)
    assert statement["covered"] == [
        "the server's publications of each round: noisy sums of clipped updates; other noisy values of its central steps: hints"
    ]
    received = "the raw update of every sampled client; other raw values that clients send: hint"
    assert statement["not_covered"][0] == f"the server: it is trusted and receives {received}"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (claims("Records", trust="untrusted-server", adjacency="replace-one"), r"slot 'train' \(DPSGDSlot\), which protects a sample: .* must be 'sample', got 'client'"),
        (claims("Choices", trust="untrusted-server", adjacency="replace-one"), r"slot 'pick' \(SelectionSlot\), which protects a sample"),
        (claims("Central", unit="sample"), r"slot 'round' \(CentralSlot\), which protects a client: .* must be 'client', got 'sample'"),
        (claims("Whole", trust="untrusted-server"), r"adjacency is 'zero-out': must be replace-one with privacy.unit client: every client"),
        (claims("Population", adjacency="replace-one"), r"slot 'round' \(CentralSlot\) over a population of 100: must be .* clients, 8"),
    ],
)  # fmt: skip
def test_a_plan_whose_events_are_not_the_cost_of_the_unit_is_refused(module, tmp_path, document, words):
    """They ran with the target epsilon in their statement."""
    module("own_claims", CLAIMS)
    make_keys(tmp_path / "keys", 8)
    with pytest.raises(ConfigError, match=words):
        make_job(config.resolve(document), tmp_path / "keys")


@pytest.mark.parametrize(
    ("name", "federation", "words"),
    [
        ("Outside", "in-process", "client step 'train' was called outside a central step"),
        ("Outside", "network", "client step 'train' was called outside a central step"),
        ("Submitted", "in-process", "the raw release of client 0 was read outside a central step"),
    ],
)
def test_raw_releases_reach_a_trusted_server_in_central_steps_only(module, tmp_path, name, federation, words):
    """A round that averaged them published raw updates, and the statement claimed the target epsilon."""
    module("own_claims", CLAIMS)
    with pytest.raises(dpcfl.RunFailed, match=words):
        dpcfl.run(claims(name), tmp_path / "runs", federation, progress=False)


def test_a_central_step_with_other_tensors_is_refused_before_its_charge(module, tmp_path):
    module("own_claims", CLAIMS)
    with pytest.raises(
        dpcfl.RunFailed, match=r"^round 1: central step 'noisy_sum' is called as noisy_sum\(me, models=...\), and is .* 'model'"
    ):
        dpcfl.run(claims("Renamed"), tmp_path / "runs", "in-process", progress=False)
    assert dpcfl.open_run(only_run(tmp_path / "runs")).privacy.epsilon_spent == 0


def test_a_run_works_in_the_folder_that_its_caller_is_in_by_then(module, tmp_path):
    """A notebook's later runs share the parent process of its first, which may have been started elsewhere."""
    parents.close()
    with contextlib.chdir(ROOT):
        parents.warm()
    module("own_rounds", ALGORITHM + "\nopen('own_rounds.py').close()  # a relative path is one of that folder, too\n")
    done = dpcfl.run(quick("own_rounds:Damped"), tmp_path / "runs", "network", progress=False)
    assert done.state == "finished"
    assert_nothing_left(done.path)


def test_a_module_path_with_what_python_ignores_is_passed_on_without_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])
    parents.close()
    done = dpcfl.run(quick("global"), tmp_path / "runs", "network", progress=False)
    assert done.state == "finished"
    assert_nothing_left(done.path)


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root may enter every folder without setpriv")
def test_a_run_works_in_a_folder_that_its_user_may_not_enter(tmp_path):
    """As after `sudo -u` in a home folder: its processes are in it from their start."""
    (tmp_path / "locked").mkdir()
    (tmp_path / "quick.yaml").write_text(yaml.safe_dump(quick("global")))
    dropped = "-dac_override,-dac_read_search"
    user = ["setpriv", f"--bounding-set={dropped}", f"--inh-caps={dropped}"] if os.geteuid() == 0 else []
    command = [*user, *COMMAND, "run", tmp_path / "quick.yaml", "--out", tmp_path / "runs"]
    enter = ["sh", "-c", 'cd "$1" && chmod 0 . && shift && exec "$@"', "sh", tmp_path / "locked"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*enter, *command], capture_output=True, text=True, env=environment, timeout=120, check=False)
    (tmp_path / "locked").chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert_nothing_left(tmp_path / "runs")


def test_a_step_that_charges_nothing_is_no_step(module):
    """Its raw mean of all updates was published, with an empty ledger and the target epsilon in the statement."""
    free = """
class Free(DPFedAvg):
    @on_central_server(charges=[])
    def mean(self, me, model):
        found = me.call(self.train, {client: {"model": model} for client in self.clients})
        return Release(sum=np.mean([*found.column("update").values()], axis=0))
"""
    module("own_claims", CLAIMS + free)
    with pytest.raises(ConfigError, match=r"charges of central step 'mean' is \[\]: must name at least one slot of the plan"):
        config.resolve(claims("Free"))


@pytest.mark.parametrize("name", ["Beside", "BesideAsWords"])
def test_nothing_stands_beside_the_masked_words_of_a_whole_client(module, tmp_path, name):
    """What its step computed inside the sum could leave beside it, at the target epsilon."""
    module("own_claims", CLAIMS)
    make_keys(tmp_path / "keys", 8)
    make_identities(tmp_path / "keys", range(8))
    document = claims(name, trust="secure-aggregation", delta=0.1)
    document["algorithm"]["sampling_rate"] = 0.5
    document |= {"local": {**document.get("local", {}), "deadline_s": 0.5}}
    with pytest.raises(ConfigError, match=f"client step 'masked_update' of own_claims:{name} gives 'last' beside masked words"):
        make_job(config.resolve(document), tmp_path / "keys")


def secure_job(folder, name):
    """A job with secure sums of whole clients, each of which takes part in each."""
    make_keys(folder / "keys", 8)
    make_identities(folder / "keys", range(8))
    document = claims(name, trust="secure-aggregation", delta=0.1)
    document["algorithm"]["sampling_rate"] = 1.0
    document |= {"local": {**document.get("local", {}), "deadline_s": 0.5}, "data": {**document["data"], "validation": 0.2}}
    return make_job(config.resolve(document), folder / "keys")


@pytest.mark.parametrize("name", ["ClientInPlace", "ServerInPlace"])
def test_a_step_cannot_write_into_the_models_of_the_server(module, tmp_path, name):
    """In one process the tensors of a task are the server's own arrays, so that raw updates became its model at the target epsilon."""
    module("own_claims", CLAIMS)
    make_keys(tmp_path / "keys", 8)
    job = make_job(config.resolve(claims(name)), tmp_path / "keys")
    with pytest.raises(ValueError, match="read-only"):
        simulate(job, tmp_path)


@pytest.mark.parametrize("name", ["Unmasked", "Changed"])
def test_words_that_are_not_those_of_the_mask_do_not_leave(module, tmp_path, name):
    """Words that a step changed in place were compared with themselves."""
    module("own_claims", CLAIMS)
    job = secure_job(tmp_path, name)
    with pytest.raises(
        Refused, match=r"mask: client step 'masked_update' must release the words that me\.masked_update returned"
    ):
        simulate(job, tmp_path, key_folder=tmp_path / "keys")


def test_what_a_client_keeps_of_its_part_in_a_secure_sum_is_not_there_in_a_step_without_a_mask(module, tmp_path):
    """The step released it as it was, here how often the secret coin had drawn the client, at the target epsilon."""
    module("own_claims", CLAIMS)
    job = secure_job(tmp_path, "Reporting")
    state = simulate(job, tmp_path, key_folder=tmp_path / "keys")
    assert state.diagnostics["drawn"] == [0] * 8
    with federation(job, tmp_path / "ledgers", key_folder=tmp_path / "keys") as fed:
        assert [int(fed.hosts[client].gate.state()["drawn"][0]) for client in fed.clients] == [job.protocol.rounds] * 8


def test_a_state_that_is_not_declared_is_refused_with_samples_of_fixed_size(module, tmp_path):
    """What a client sent depended on the samples in which it was before, and the statement claimed the target epsilon."""
    module("own_claims", CLAIMS)
    with pytest.raises(Refused, match="capabilities_for must set holds_state=True, which needs Poisson samples"):
        dpcfl.run(claims("Stateful", adjacency="replace-one"), tmp_path / "runs", "in-process", progress=False)
    poisson = dpcfl.run(claims("Stateful"), tmp_path / "runs", "in-process", progress=False)
    assert (poisson.state, poisson.privacy.epsilon) == ("finished", 5)


def test_a_sum_with_a_client_outside_the_sample_is_refused(module, tmp_path):
    module("own_claims", CLAIMS)
    with pytest.raises(ValueError, match="is not in the sample of slot 'round'"):
        dpcfl.run(claims("Everyone"), tmp_path / "runs", "in-process", progress=False)


def test_the_statement_names_what_own_code_may_do_with_raw_releases(module, tmp_path):
    module("own_claims", CLAIMS)
    make_keys(tmp_path / "keys", 8)
    job = make_job(config.resolve(claims("Outside")), tmp_path / "keys")
    said = privacy_statement(job.protocol, None)["not_covered"]
    assert any("raw releases by the code of own_claims:Outside in the server's process" in part for part in said)


def test_noise_for_a_whole_update_does_not_protect_a_record(module, tmp_path):
    """Without one record an update of norm C may be another one of norm C: a distance of 2 C, where the noise is for C."""
    module("own_claims", CLAIMS)
    held = quick("own_claims:Losses")
    held |= {"data": {**held["data"], "validation": 0.2}, "algorithm": {"name": "own_claims:Losses", "clients_per_round": 2}}
    with pytest.raises(ValueError, match=r"me\.noisy_update protects a client, and privacy\.unit is 'sample': use me\.dpsgd"):
        dpcfl.run(held, tmp_path / "runs", "in-process", progress=False)


def test_a_plan_that_changes_between_calls_names_the_client(module, tmp_path):
    """It ended with a KeyError, which held the whole plan."""
    changing = "calls = 0\n\n    def plan(self, client):\n        type(self).calls += 1\n"
    changing += "        planned = super().plan(client)\n"
    changing += (
        "        return [type(slot)(slot.name, slot.rate, slot.steps + self.calls) for slot in planned]\n\n    @on_client"
    )
    module("own_rounds", PERSONAL.replace("KEPT", "").replace("@on_client", changing))
    with pytest.raises(
        ConfigError, match="own_rounds:Personal: `plan` returned different slots for client 0 when it was called again"
    ):
        dpcfl.run(quick("own_rounds:Personal"), tmp_path / "runs", "in-process", progress=False)


@pytest.mark.parametrize(("plan", "got"), [("None", "NoneType"), ("['train']", "list with str")])
def test_a_plan_that_is_no_list_of_slots_is_a_sentence(module, tmp_path, plan, got):
    planned = f"def plan(self, client):\n        return {plan}\n\n    @on_client"
    module("own_rounds", PERSONAL.replace("KEPT", "").replace("@on_client", planned))
    with pytest.raises(ConfigError, match=f"own_rounds:Personal: `plan` returned {got}: must be a list of slots"):
        dpcfl.run(quick("own_rounds:Personal"), tmp_path / "runs", "in-process", progress=False)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ("np.float32(0.5), 3", r"rate .*0\.5.*: write float\(\.\.\.\) around it"),
        ("0.5, np.int64(3)", r"steps .*3.*: write int\(\.\.\.\) around it"),
        ("float('nan'), 3", "rate nan: must be finite"),
    ],
)
def test_a_slot_with_numbers_that_a_job_cannot_hold_is_a_sentence(module, tmp_path, numbers, words):
    """NumPy's float32 and int64 ended in a traceback of the command."""
    planned = f"def plan(self, client):\n        return [DPSGDSlot('train', {numbers})] * 20\n\n    @on_client"
    imports = "import numpy as np\nfrom dpcfl_net.privacy.slots import DPSGDSlot\n"
    module("own_rounds", imports + PERSONAL.replace("KEPT", "").replace("@on_client", planned))
    with pytest.raises(ConfigError, match=f"own_rounds:Personal: `plan` has slot 'train' with {words}"):
        dpcfl.run(quick("own_rounds:Personal"), tmp_path / "runs", "in-process", progress=False)


@pytest.mark.parametrize(
    ("slot", "words"),
    [
        ("DPSGDSlot('train', 2.0, 3)", r"DPSGDSlot\(name='train', rate=2\.0, .*: sampling_rate must lie in"),
        ("DPSGDSlot('train', 0.5, 3.0)", "steps=3.0, .*: steps must be a whole number"),
        ("GaussianSlot('train', ratio=0.0)", r"GaussianSlot\(name='train', ratio=0\.0, .*: noise_multiplier must be positive"),
        ("GaussianSlot('train', ratio='5')", "ratio='5', doubles=True"),
    ],
)
def test_a_slot_that_has_no_event_is_a_sentence(module, tmp_path, slot, words):
    """The sentence was about privacy.epsilon, and a text in place of a number ended in a traceback."""
    planned = f"def plan(self, client):\n        return [{slot}] * 2\n\n    @on_client"
    imports = "from dpcfl_net.privacy.slots import DPSGDSlot, GaussianSlot\n"
    module("own_rounds", imports + PERSONAL.replace("KEPT", "").replace("@on_client", planned))
    with pytest.raises(ConfigError, match=f"^own_rounds:Personal: `plan` has .*{words}"):
        dpcfl.run(quick("own_rounds:Personal"), tmp_path / "runs", "in-process", progress=False)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            'charges=["train"]',
            'charges="train"',
            r"charges of client step 'train' is 'train': must be a list of names, \['train'\]",
        ),
        ('charges=["train"]', "charges=None", r"charges of client step 'train' is None: must be a list of names, \['train'\]"),
        ('charges=["train"]', "charges=[5]", r"charges of client step 'train' is \[5\]: must be a list of names, \['train'\]"),
        ('charges=["train"]', "charges={'train'}", "charges of client step 'train' is {'train'}: must be a list of names"),
        (
            '"update": UPDATE',
            '"update": TensorSpec("f4", ("p",), max_norm=10.0)',
            "max_norm of a TensorSpec is 10.0: must be a function",
        ),
        (
            '"update": UPDATE',
            '"update": TensorSpec("float32", ("p",))',
            "dtype of a TensorSpec is 'float32': must be one of f4, i8",
        ),
        (
            'takes={"model": MODEL}',
            "takes=None",
            "takes of client step 'train' is None: must map names to TensorSpecs, as {'model': MODEL}",
        ),
        ('takes={"model": MODEL}', "takes=[MODEL]", r"takes of client step 'train' is \[.*: must map names to TensorSpecs"),
        (
            '"update": UPDATE',
            '"update": "f4"',
            "gives of client step 'train' is {'update': 'f4'}: must map names to TensorSpecs",
        ),
        ('"update": UPDATE', "0: UPDATE", "gives of client step 'train' is {0: .*: must map names to TensorSpecs"),
    ],
)
def test_a_slip_in_the_declaration_of_a_step_is_a_sentence(module, old, new, words):
    """Each letter of the text was a slot; the others were found when the first release arrived."""
    module("own_rounds", "from dpcfl_net.core.types import TensorSpec\n" + PERSONAL.replace("KEPT", "").replace(old, new))
    with pytest.raises(ConfigError, match=f"importing own_rounds raised ValueError: {words}"):
        config.resolve(quick("own_rounds:Personal"))


PLACES = """
import math
import torch
from torch import nn

class Places(nn.Module):
    def __init__(self, numbers, classes):
        super().__init__()
        self.layer = nn.Linear(numbers, classes)

    def forward(self, x):
        logits = self.layer(x.flatten(1))
        return logits + 1e-6 * torch.arange(len(x))[:, None] * logits

def build(shape, classes):
    return Places(math.prod(shape), classes)
"""


@pytest.mark.parametrize("pace", ["free", "constant"])
def test_a_model_whose_gradients_show_the_place_of_a_record_is_refused_before_a_client_pays(module, tmp_path, pace):
    """It was refused in the first step, whose whole task had been charged."""
    module("places", PLACES)
    document = quick("global") | {"model": "places:build", "local": {"batch_size": 16, "pace": pace}}
    with pytest.raises(ConfigError, match=r"has other bits in other slots of a batch.*does forward use a record's place"):
        dpcfl.run(document, tmp_path / "runs", "in-process", progress=False)
    (ledger,) = tmp_path.glob("runs/*/ledgers/client_0000/ledger.jsonl")
    assert [json.loads(line)["type"] for line in ledger.read_text().splitlines()] == ["header"]


def test_a_proximal_term_needs_a_whole_model_as_its_centre(module, tmp_path):
    """A part of a model was taken for that number in every parameter."""
    module(
        "own_rounds",
        PERSONAL.replace("KEPT", "").replace('me.dpsgd("train", model)', 'me.dpsgd("train", model, (0.1, model[:1]))'),
    )
    with pytest.raises(ValueError, match=r"the centre of proximal has shape \(1,\): must be \(650,\)"):
        dpcfl.run(quick("own_rounds:Personal"), tmp_path / "runs", "in-process", progress=False)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ("def plan(self, client):\n        return [client.slots]\n\n    ", "plan raised AttributeError"),
        ("def __init__(self):\n        pass\n\n    ", "the class raised TypeError"),
    ],
)
def test_a_slip_in_an_algorithms_class_is_a_sentence(module, tmp_path, own, words):
    module("own_rounds", PERSONAL.replace("KEPT", "").replace("@on_client", f"{own}@on_client"))
    with pytest.raises(ConfigError, match=f"algorithm.name is 'own_rounds:Personal': {words}"):
        dpcfl.run(quick("own_rounds:Personal"), tmp_path / "runs", "in-process", progress=False)


@pytest.mark.parametrize("method", ["plan", "central_plan"])
@pytest.mark.parametrize(("plan", "got"), [("None", "NoneType"), ("['train']", "list with str")])
def test_neither_plan_of_a_job_with_a_trusted_server_may_be_no_list_of_slots(module, tmp_path, method, plan, got):
    own = f"class Odd(DPFedAvg):\n    def {method}(self, *client):\n        return {plan}\n"
    module("own_claims", f"{CLAIMS}\n{own}")
    with pytest.raises(ConfigError, match=f"own_claims:Odd: `{method}` returned {got}: must be a list of slots"):
        dpcfl.run(claims("Odd"), tmp_path / "runs", "in-process", progress=False)


def test_personal_models_that_no_client_keeps_are_a_warning(module, tmp_path):
    module("own_rounds", PERSONAL.replace("KEPT", ""))
    without = dpcfl.run(quick("own_rounds:Personal"), tmp_path / "runs", "in-process", progress=False)
    assert without.final["accuracy_mean"] is None
    assert without.warnings == [
        'no client reported figures of a personal model: its client steps must keep it in me.state["model"]'
    ]
    module("kept_rounds", PERSONAL.replace("KEPT", "me.state['model'] = trained"))
    kept = dpcfl.run(quick("kept_rounds:Personal"), tmp_path / "runs", "in-process", progress=False)
    assert kept.final["accuracy_mean"] is not None
    assert kept.warnings == []


UNFINISHED = """
import numpy as np
import pydantic
from dpcfl_net import Algorithm
from dpcfl_net.algorithms.client_level import ClientLevel
class Bare(Algorithm): pass
class Sums(ClientLevel): pass
class Foreign(Global):
    class Options(pydantic.BaseModel):
        share: float = 0.5
class Named(Damped):
    class Options(base.Options):
        name: str = "mine"
class Default(Damped):
    class Options(base.Options):
        share: int = "three"
class Infinite(Damped):
    class Options(base.Options):
        share: float = float("inf")
class Numpy(Damped):
    class Options(base.Options):
        share: int = np.int64(3)
class Unwritten(Damped):
    class Options(base.Options):
        share: object = object()
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_rounds:build", "must be a class derived from dpcfl_net.algorithms.base.Algorithm"),
        ("own_rounds:Whole", "own_rounds has no 'Whole'"),
        ("own_rounds:Bare", "the class must define plan, round, start"),
        ("own_rounds:Sums", "the class must define new_sums, round"),
        ("own_rounds:Named", "its Options have an option 'name'"),
        ("own_rounds:Unwritten", "a default of its Options is no value that a job can hold: "),
        ("own_rounds:Foreign", "its Options must be a class derived from dpcfl_net.algorithms.base.Options"),
        ("absent:Damped", "no module 'absent'"),
        ("globall", "must be one of"),
    ],
)
def test_what_is_no_algorithm_is_a_sentence(module, name, words):
    module("mine", data())
    module("own_rounds", f"{ALGORITHM}\n{UNFINISHED}")
    (problem,) = problems(algorithm={"name": name})
    assert problem.startswith(f"algorithm.name is {name!r}")
    assert words in problem


def command(*arguments, cwd) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_example_runs_from_its_folder(tmp_path):
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("runs", "__pycache__"))
    with open(tmp_path / "examples" / "own_data.py", "a") as file:
        file.write(f"\nopen({str(tmp_path / 'imports')!r}, 'a').write('x')\n")
    # In six rounds two clients learn with some draws of the noise and not with others: this is one of the former.
    seeded = ("privacy.noise=seeded", f"privacy.noise_seed={'77aa' * 16}")
    done = command("run", "own.yaml", "rounds=6", "data.clients=[1, 1]", *seeded, cwd=tmp_path / "examples")
    assert done.returncode == 0, done.stderr + done.stdout
    assert (tmp_path / "imports").read_text() == "x", "a process other than the launcher imported the data's module"
    folder = only_run(tmp_path / "examples" / "runs")
    assert_nothing_left(folder)
    document = json.loads((folder / "run.json").read_text())
    assert document["state"] == "finished"
    assert document["final"]["accuracy_mean"] > 0.8
    assert any("own_model:build" in text for text in document["privacy"]["not_covered"])
    resolved = yaml.safe_load((folder / "config.yaml").read_text())
    assert len(resolved["data"]["sha256"]) == 64
    assert "own_data" not in (folder / "protocol.json").read_text()
    elsewhere = command("run", "--resume", folder, cwd=tmp_path)
    assert elsewhere.returncode == 2
    assert "no module 'own_model'" in elsewhere.stderr
    assert "own_data" not in elsewhere.stderr, "pinned data must need no call"


def test_a_mistake_is_a_sentence_and_exit_code_2(tmp_path):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(document(model={"name": "nowhere:build"})))
    (tmp_path / "mine.py").write_text(data("given['std'] = 0"))
    done = command("run", "c.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "error: model.name is 'nowhere:build': no module 'nowhere'" in done.stderr
    assert "error: data.dataset is 'mine:load': std must be" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


TORCHVISION = """
import sys
from dpcfl_net.core import plugins
assert "torchvision" not in sys.modules
module = plugins.call("model.name", "net:build", (3, 8, 8), 10)
print(type(module).__module__)
"""


@pytest.mark.parametrize(
    "text",
    [
        "from torchvision.models import squeezenet1_1\ndef build(input_shape, classes): return squeezenet1_1(num_classes=classes)",
        pytest.param(
            "def build(input_shape, classes):\n    import torchvision\n    return torchvision.models.squeezenet1_1(num_classes=classes)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_model_may_import_torchvision_as_any_other_module(tmp_path, text):
    (tmp_path / "net.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", TORCHVISION], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert done.stdout == "torchvision.models.squeezenet\n", done.stderr


def test_another_error_of_a_users_function_is_not_tried_again(module):
    module("net", "calls = []\ndef build(shape):\n    calls.append(shape)\n    raise RuntimeError('no memory')")
    with pytest.raises(ConfigError, match="no memory"):
        plugins.call("model.name", "net:build", 7)
    assert sys.modules["net"].calls == [7]


IN_PLACE = (
    MODEL
    + """
class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(144, classes)

    def forward(self, x):
        out = self.norm(self.conv(x))
        out += x
        return self.head(torch.relu_(out).flatten(1))

def build(input_shape, classes): return Net(classes)
"""
)
ROWS = GOOD.replace("nn.Flatten(), nn.Linear(36, WIDE), nn.ReLU()", "nn.Linear(6, WIDE), nn.ReLU(), nn.Flatten()").replace(
    "nn.Linear(WIDE, classes)", "nn.Linear(30, classes)"
)


@pytest.mark.parametrize(("text", "path"), [(IN_PLACE, "deep"), (ROWS.replace("WIDE", "5"), "opacus")])
def test_an_own_model_of_any_engine_runs_and_is_checked_once(module, tmp_path, monkeypatch, text, path):
    module("mine", data())
    module("net", text)
    checked = []
    monkeypatch.setattr(
        model_check,
        "check",
        lambda *given, check=model_check.check, **more: checked.append((*given[1:], more)) or check(*given, **more),
    )
    changes = {"model": {"name": "net:build"}, "rounds": 3, "algorithm": {"name": "dp-ifca", "clusters": 2}}
    resolved = config.resolve(document(**changes, local={"batch_size": 20, "lr": 0.1}))
    make_keys(tmp_path / "keys", 2)
    job = make_job(resolved, tmp_path / "keys")
    assert checked == [((1, 6, 6), 3, True, 20, {"span": (-2.0, 2.0)})]
    assert Engine.of(job.protocol).trainer.path == path
    state = simulate(job, tmp_path / "run")
    assert np.isfinite(np.asarray(state.models)).all()
