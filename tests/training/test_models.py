"""The models by name: sizes, layout, seeded values, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.vision import torchvision
from dpcfl_net.training import models

SHAPES = {
    "cnn": (1, 28, 28), "small-cnn": (1, 28, 28), "digits-cnn": (1, 8, 8), "cifar-cnn": (3, 32, 32), "resnet18": (3, 32, 32),
    "resnet18-cifar": (3, 32, 32), "linear": (1, 8, 8), "char-lstm": (80,), "char-transformer": (80,),
}  # fmt: skip
SIZES = {
    "cnn": 28_938, "small-cnn": 9_098, "digits-cnn": 6_090, "cifar-cnn": 66_570, "resnet18": 11_181_642,
    "resnet18-cifar": 11_173_962, "linear": 650, "char-lstm": 26_025, "char-transformer": 112_609,
}  # fmt: skip
CLASSES = {"char-lstm": 97, "char-transformer": 97}


@pytest.mark.parametrize("name", models.NAMES)
def test_size_layout_and_output(name: str) -> None:
    classes = CLASSES.get(name, 10)
    module = models.build(name, SHAPES[name], classes)
    rows = models.layout(module)
    assert sum(int(np.prod(shape)) for _, shape in rows) == SIZES[name]
    assert [row[0] for row in rows] == [n for n, _ in module.named_parameters()]
    assert module(torch.zeros(2, *SHAPES[name])).shape == (2, classes)


@pytest.mark.parametrize("name", models.CONVOLUTIONS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (2, 29, 13)])
def test_the_layout_without_torch_is_that_of_the_model(name: str, shape: tuple[int, ...]) -> None:
    assert models.convolutional_layout(name, shape, 7) == models.layout(models.build(name, shape, 7))


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [("resnet18", (3, 8, 8), 10), ("cnn", (1, 3, 8), 10), ("cnn", (64,), 10), ("cnn", (1, 8, 8), 1)],
)
def test_other_models_have_no_layout_without_torch(name: str, shape: tuple[int, ...], classes: int) -> None:
    assert models.convolutional_layout(name, shape, classes) is None


@pytest.mark.parametrize("name", ["cnn", "linear", "resnet18", "char-lstm"])
def test_first_values_come_from_the_seed_alone(name: str) -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first = models.initial(name, SHAPES[name], 10, 3)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(6)
    assert np.array_equal(first, models.initial(name, SHAPES[name], 10, 3))
    assert not np.array_equal(first, models.initial(name, SHAPES[name], 10, 4))
    assert first.dtype == np.float32
    assert np.isfinite(first).all()


def test_a_vector_input_fits_the_linear_model() -> None:
    assert models.build("linear", (7,), 3)(torch.zeros(4, 7)).shape == (4, 3)


def test_one_class_is_regression_with_one_output() -> None:
    module = models.build("linear", (1,), 1)
    assert sum(parameter.numel() for parameter in module.parameters()) == 2
    assert module(torch.zeros(4, 1)).shape == (4, 1)


@pytest.mark.parametrize("name", ["char-lstm", "char-transformer"])
def test_what_is_no_character_code_is_taken_for_the_nearest(name: str) -> None:
    module = models.build(name, (3,), 5)
    wild = module(torch.tensor([[-7.0, 1e9, 2.0], [torch.inf, -torch.inf, 2.0]]))
    assert torch.allclose(wild[0], module(torch.tensor([[0.0, 4.0, 2.0]]))[0], atol=1e-6)
    assert wild.isfinite().all()


@pytest.mark.parametrize("channels", [1, 3])
def test_resnet_is_that_of_torchvision_bit_for_bit(channels: int) -> None:
    pytest.importorskip("PIL", reason="torchvision needs Pillow")
    resnet = torchvision().models.resnet
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        theirs = resnet.ResNet(resnet.BasicBlock, [2, 2, 2, 2], 10, norm_layer=lambda wide: torch.nn.GroupNorm(32, wide))
        if channels != 3:
            theirs.conv1 = torch.nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
            torch.nn.init.kaiming_normal_(theirs.conv1.weight, mode="fan_out", nonlinearity="relu")
        x = torch.randn(2, channels, 32, 32)
    ours = models.build("resnet18", (channels, 32, 32), 10)
    assert models.layout(ours) == models.layout(theirs)
    assert np.array_equal(models.initial("resnet18", (channels, 32, 32), 10, 5), models.flatten(theirs))
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("name", ["cnn", "linear", "resnet18", "char-lstm"])
def test_a_skeleton_has_the_layout_and_draws_no_random_number(name: str) -> None:
    shape = SHAPES[name]
    before = torch.get_rng_state()
    skeleton = models.skeleton(name, shape, 10)
    assert torch.equal(torch.get_rng_state(), before)
    assert models.layout(skeleton) == models.layout(models.build(name, shape, 10))


def test_resnet_takes_one_channel() -> None:
    assert models.build("resnet18", (1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "word"),
    [
        ("cnnn", (1, 8, 8), 10, "cnnn"),
        ("cnn", (64,), 10, "images"),
        ("cnn", (1, 3, 3), 10, "4x4"),
        ("linear", (), 10, "shape"),
        ("linear", (4,), 0, "classes"),
        ("cnn", (1, 28, 28), 1, "regression"),
        ("nowhere:build", (1,), 1, "regression"),
        ("char-lstm", (1, 8, 8), 97, "codes"),
    ],
)
def test_what_does_not_fit_is_a_configuration_error(name: str, shape: tuple[int, ...], classes: int, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        models.build(name, shape, classes)
