"""The fast path's planner: what fits a record's shape, what goes elsewhere, and what no engine could run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from records import Images
from torch import nn

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.training.dpsgd import Trainer
from dpcfl_net.training.fast_path import FastPath
from dpcfl_net.training.layers import Pool, fast_layers, max_pool, pooled_first
from dpcfl_net.training.models import flatten


@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        ((8,), (nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))),
        ((8,), (nn.Linear(8, 4), nn.Flatten(), nn.Linear(4, 3))),
        ((2, 4), (nn.Flatten(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))),
        ((1, 9, 7), (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2, padding=1), nn.Flatten(), nn.Linear(48, 3))),
        ((1, 9, 7), (nn.Conv2d(1, 4, (3, 2), stride=2, dilation=2, padding=1), nn.Flatten(), nn.Linear(64, 3))),
        ((1, 9, 7), (nn.MaxPool2d(3, 2), nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(8, 3))),
    ],
)
def test_what_fits_is_planned_and_runs(shape: tuple[int, ...], layers: tuple[nn.Module, ...]) -> None:
    module = nn.Sequential(*layers)
    assert fast_layers(module, shape) is not None
    assert module(torch.zeros(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        ((10, 8), (nn.Linear(8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(40, 3))),
        ((3, 8, 8), (nn.Linear(8, 4), nn.Flatten(), nn.Linear(96, 3))),
        ((8, 8), (nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3))),
    ],
)
def test_what_torch_takes_and_the_fast_path_does_not_goes_elsewhere(
    shape: tuple[int, ...], layers: tuple[nn.Module, ...]
) -> None:
    module = nn.Sequential(*layers)
    assert fast_layers(module, shape) is None
    assert module(torch.zeros(2, *shape)).shape == (2, 3)
    with pytest.raises(ConfigError, match="fast path"):
        Trainer(module, clip=1.0, learning_rate=0.1, batch_size=8, path="fast", input_shape=shape)


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(128, 3)),
        (nn.Conv2d(1, 2, 3, padding="same"), nn.Flatten(), nn.Linear(128, 3)),
        (nn.Conv2d(1, 2, 3, padding=1), nn.Linear(8, 3)),
        (nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Linear(8, 3), nn.Flatten(), nn.Linear(48, 3)),
        (nn.Flatten(), nn.Linear(64, 3), nn.ReLU()),
        (nn.Flatten(2), nn.Flatten(), nn.Linear(64, 3)),
        (nn.MaxPool2d(3, 2, ceil_mode=True), nn.Flatten(), nn.Linear(16, 3)),
        (nn.MaxPool2d(3, 2, return_indices=True), nn.Flatten(), nn.Linear(9, 3)),
        (nn.MaxPool2d(3, 2, dilation=2), nn.Flatten(), nn.Linear(4, 3)),
    ],
)
def test_layers_that_compute_something_else_are_not_run_as_the_usual_ones(layers: tuple[nn.Module, ...]) -> None:
    assert fast_layers(nn.Sequential(*layers)) is None


def test_a_layer_that_stands_there_twice_is_run_twice() -> None:
    relu = nn.ReLU()
    module = nn.Sequential(nn.Linear(8, 6), relu, nn.Linear(6, 5), relu, nn.Linear(5, 3))
    layers = fast_layers(module, (8,))
    assert layers is not None
    theta, x = torch.from_numpy(flatten(module)), torch.randn(4, 8)
    assert torch.equal(FastPath(layers).logits(theta, x), module(x))
    again = nn.Linear(8, 8)
    assert fast_layers(nn.Sequential(again, relu, again), (8,)) is None


HOOKS: dict[str, Callable] = {
    "forward": lambda layer: layer.register_forward_hook(lambda _, given, out: 2 * out),
    "before forward": lambda layer: layer.register_forward_pre_hook(lambda _, given: 2 * given[0]),
    "backward": lambda layer: layer.register_full_backward_hook(lambda _, given, out: (2 * given[0],)),
    "before backward": lambda layer: layer.register_full_backward_pre_hook(lambda _, out: (2 * out[0],)),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_layer_with_hooks_is_not_replaced_by_its_type(name: str) -> None:
    """The engines that read types and graphs see no hook: the fast path left it out, also of the gradients."""
    module = nn.Sequential(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 3))
    nn.init.constant_(module[0].bias, 9.0)  # no unit is dead, or a hook behind the rectifier would change nothing
    data, theta = Images(4, (8,), 3), flatten(module)
    how = {"clip": 1e9, "learning_rate": 0.1, "batch_size": 4, "input_shape": (8,)}
    plain = Trainer(module, **how)
    HOOKS[name](module[1])
    hooked = Trainer(module, **how)
    assert (plain.path, hooked.path) == ("fast", "opacus")
    one, other = (trainer.clipped_sum(theta, data, np.arange(4)) for trainer in (plain, hooked))
    assert not np.allclose(one, other)
    whole = nn.Sequential(nn.Linear(8, 3))
    HOOKS[name](whole)
    assert fast_layers(whole, (8,)) is None


@pytest.mark.parametrize(
    ("shape", "layers", "words"),
    [
        ((8,), (nn.Linear(7, 4),), r"layer '0' \(Linear\) takes 7 features, but its input has the shape \(8,\)"),
        ((1, 8, 8), (nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(100, 3)), r"layer '2' \(Linear\) takes 100 .* \(144,\)"),
        ((8, 8), (nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3)), r"'0' \(Conv2d\) takes \(1, height, width\)"),
        ((3, 8, 8), (nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3)), r"'0' \(Conv2d\) .* shape \(3, 8, 8\)"),
        ((1, 8, 8), (nn.Flatten(), nn.Conv2d(1, 4, 3), nn.Linear(4, 3)), r"'1' \(Conv2d\) .* shape \(64,\)"),
        ((8,), (nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)), r"'0' \(MaxPool2d\) takes \(channels, height, width\)"),
        (
            (1, 4, 4),
            (nn.Conv2d(1, 4, 3, dilation=3), nn.Flatten(), nn.Linear(4, 3)),
            r"'0' \(Conv2d\) has a window over \[7, 7\]",
        ),
        ((1, 4, 4), (nn.MaxPool2d((1, 5)), nn.Flatten(), nn.Linear(4, 3)), r"'0' \(MaxPool2d\) has a window over \[1, 5\]"),
        ((1, 4, 4), (nn.MaxPool2d(3, padding=(0, 2)), nn.Flatten(), nn.Linear(4, 3)), r"'0' \(MaxPool2d\) pads by \[0, 2\]"),
        (
            (1, 4, 4),
            (nn.MaxPool2d(2, stride=(1, 0)), nn.Flatten(), nn.Linear(4, 3)),
            r"'0' \(MaxPool2d\) moves its window by \[1, 0\]",
        ),
    ],
)
def test_what_cannot_run_is_an_error_that_names_the_layer(
    shape: tuple[int, ...], layers: tuple[nn.Module, ...], words: str
) -> None:
    module = nn.Sequential(*layers)
    with pytest.raises(ConfigError, match=words):
        fast_layers(module, shape)
    with pytest.raises(RuntimeError):
        module(torch.zeros(5, *shape))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 4, 3, padding=7), nn.Conv2d(2, 4, 3, padding=4, stride=2), nn.Conv2d(2, 16, 3, padding=5),
        nn.Conv2d(2, 4, (3, 8), padding=(4, 8), stride=2),
    ],
)  # fmt: skip
def test_a_padding_wider_than_the_window_changes_no_gradient(layer: nn.Module) -> None:
    torch.manual_seed(0)
    width = layer(torch.zeros(1, 2, 6, 5)).numel()
    module = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(width, 10))
    data, theta = Images(4, (2, 6, 5)), flatten(module).astype(np.float64)
    how = {"clip": 1e9, "learning_rate": 0.1, "batch_size": 4}
    fast, vmap = (Trainer(module, **how, path=path).clipped_sum(theta, data, np.arange(4)) for path in ("fast", "vmap"))
    np.testing.assert_allclose(fast, vmap, rtol=0, atol=1e-12 * np.abs(vmap).max())


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, padding=1)])
def test_rectifying_after_pooling_changes_no_bit(pool: nn.MaxPool2d) -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), pool, nn.Conv2d(4, 4, 3), nn.ReLU(), pool, nn.Flatten())
    module.append(nn.Linear(module(torch.zeros(1, 1, 12, 12)).shape[1], 3))
    x = torch.randn(
        9, 1, 12, 12, generator=torch.Generator().manual_seed(0)
    ).round()  # windows with equal and with no positive numbers
    x[7], x[8, 0, 5, 5] = 0.0, torch.nan
    found = []
    for network in (module, pooled_first(module)):
        network.zero_grad()
        logits = network(x)
        logits[:8].square().sum().backward()
        found.append([logits.detach(), *(parameter.grad for parameter in network.parameters())])
    for one, other in zip(*found, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()
    assert [type(layer) for layer in pooled_first(module)][1:3] == [nn.MaxPool2d, nn.ReLU]


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(2), nn.MaxPool2d(3, 2), nn.MaxPool2d((2, 3), (3, 1)), nn.MaxPool2d(1, 2), nn.MaxPool2d(3, 2, padding=1)],
)
def test_pooling_without_places_finds_the_same_maxima(
    pool: nn.MaxPool2d, dtype: torch.dtype, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = fast_layers(nn.Sequential(pool, nn.Flatten(), nn.Linear(1, 3)))
    assert layers is not None
    (layer,) = (layer for layer in layers if isinstance(layer, Pool))
    x = torch.randn(5, 3, 11, 8, generator=torch.Generator().manual_seed(0)).to(dtype).to(memory_format=layout)
    x[1, 0, 4, 4], x[2, 1, 0, 0], x[3, 2] = torch.nan, torch.inf, -torch.inf
    for most in (2**24, 0):  # 0: as if the images left the caches
        monkeypatch.setattr("dpcfl_net.training.layers._MOST_BYTES", most)
        assert torch.equal(max_pool(layer, x).nan_to_num(-1e9), pool(x).nan_to_num(-1e9))
