"""Built-in models, their layout for the job's template, and their seeded initial values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dpcfl_net.core import plugins
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.signed_settings import ModelTemplate

if TYPE_CHECKING:
    import torch
    from torch import nn

NAMES = ("cnn", "small-cnn", "digits-cnn", "cifar-cnn", "resnet18", "resnet18-cifar", "linear", "char-lstm", "char-transformer")

FILES = ("models.py", "resnet.py", "sequences.py")  # that define the layouts
# Channels of each convolution, side of its kernel, smallest side of an image. Each convolution is followed by a pooling of 2x2.
CONVOLUTIONS = {
    "cnn": ((16, 32), 5, 4), "small-cnn": ((8, 16), 3, 4), "digits-cnn": ((16, 32), 3, 4), "cifar-cnn": ((32, 64, 64), 3, 8),
}  # fmt: skip

CHARACTER_WIDTH, HIDDEN_WIDTH = 8, 64  # of char-lstm: embedding of a character, state of the one LSTM layer


def build(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a model with torch's default initialisation (`initial` gives seeded values).

    "cnn" is the network of R's Table 2 (28,938 parameters at 1x28x28); "small-cnn" has 9,098 at 1x28x28, "digits-cnn" 6,090 at
    1x8x8, "resnet18" torchvision's layout with GroupNorm of 32 groups (11,181,642 at 3 channels and 10 classes),
    "resnet18-cifar" the same with a 3x3 first convolution and no pooling after it (11,173,962; 15 times the work at 32x32). "char-lstm"
    and "char-transformer" read d character codes and return the next one's logits (26,025 and 112,609 for 97 codes). "linear" is
    the only model for regression.

    Args:
        name: One of `NAMES`, or a plugin `package.module:function`, called as function(input_shape, classes).
        input_shape: Shape of one record, (C, H, W) or (d,).
        classes: Number of logits; 1: regression.

    Raises:
        ConfigError: If the name is unknown or the model does not fit the shape.
    """
    shape = tuple(int(side) for side in input_shape)
    if classes == 1 and name != "linear":
        raise ConfigError(f"model.name is {name!r}: cannot do regression; only 'linear' can")
    if plugins.is_plugin(name):
        return _own(name, shape, classes)
    if name not in NAMES:
        raise ConfigError(f"unknown model {name!r}, known: {', '.join(NAMES)}")
    if classes < 1 or not shape or min(shape) < 1:
        raise ConfigError(
            f"model.name is {name!r}: needs positive input sides and classes, got shape {shape}, {classes} classes"
        )
    if name == "linear":
        return _linear(shape, classes)
    if name == "char-lstm":
        return _char_lstm(shape, classes)
    if name == "char-transformer":
        from dpcfl_net.training.sequences import char_transformer

        return char_transformer(shape, classes)
    widths, kernel, smallest = CONVOLUTIONS.get(name, ((), 0, 1))
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise ConfigError(
            f"model.name is {name!r}: takes images (channels, height, width) from {smallest}x{smallest} up, got {shape}"
        )
    if name in ("resnet18", "resnet18-cifar"):
        from dpcfl_net.training.resnet import ResNet18

        return ResNet18(shape[0], classes, small_images=name == "resnet18-cifar")
    return _convolutional(shape, classes, widths, kernel)


def skeleton(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build a model whose parameters are not initialised, for those who write them before they read them.

    It draws no random number and touches no memory of the parameters. A plugin model is built in full, since it may hold values
    besides its parameters.

    Args:
        name: As for `build`.
        input_shape: As for `build`.
        classes: As for `build`.

    Raises:
        ConfigError: As `build`.
    """
    if plugins.is_plugin(name):
        return build(name, input_shape, classes)
    from dpcfl_net.training.uninitialised import Uninitialised

    with Uninitialised():
        return build(name, input_shape, classes)


def module_of(template: ModelTemplate, parameters: np.ndarray | None = None) -> nn.Module:
    """Build the module of a signed template, with a copy of parameters (p,) or as `skeleton` leaves it; errors as `build`."""
    import torch

    module = skeleton(template.name, tuple(template.input_shape), template.classes)
    if parameters is not None:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(np.array(parameters, np.float32)), module.parameters())
    return module


def layout(module: nn.Module) -> list[list[Any]]:
    """Return [[name, [sides...]], ...] of all parameters, in the order of the flat vector."""
    return [[name, list(parameter.shape)] for name, parameter in module.named_parameters()]


def convolutional_layout(name: str, input_shape: tuple[int, ...], classes: int) -> list[list[Any]] | None:
    """Compute `layout` of a convolutional model without torch, whose import takes longer than the rest of a job.

    Args:
        name: As for `build`.
        input_shape: As for `build`.
        classes: As for `build`.

    Returns:
        The layout; None if the model is not one of `CONVOLUTIONS` or does not fit the shape.
    """
    widths, kernel, smallest = CONVOLUTIONS.get(name, ((), 0, 1))
    if not widths or classes < 2 or len(input_shape) != 3 or min(input_shape) < 1 or min(input_shape[1:]) < smallest:
        return None
    found: list[list[Any]] = []
    channels, height, width = input_shape
    for index, wide in enumerate(widths):
        found += [[f"{3 * index}.weight", [wide, channels, kernel, kernel]], [f"{3 * index}.bias", [wide]]]
        channels, height, width = wide, height // 2, width // 2
    last = 3 * len(widths) + 1
    return [*found, [f"{last}.weight", [classes, channels * height * width]], [f"{last}.bias", [classes]]]


def initial(name: str, input_shape: tuple[int, ...], classes: int, seed: int) -> np.ndarray:
    """Compute the initial values of a model; one seed gives the same values on all machines with one torch version.

    Args:
        name: As for `build`.
        input_shape: As for `build`.
        classes: As for `build`.
        seed: Seed of torch's default initialisation; the caller's torch generator is not changed.

    Returns:
        Parameters, (p,) float32.

    Raises:
        ConfigError: As `build`.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = build(name, input_shape, classes)
    return flatten(module)


def initial_of(template: ModelTemplate) -> np.ndarray:
    """Compute the initial values of a signed template, theta_init, (p,) float32; errors as `build`."""
    return initial(template.name, tuple(template.input_shape), template.classes, template.initial_seed)


def flatten(module: nn.Module) -> np.ndarray:
    """Concatenate all parameters in `named_parameters` order, each row-major, (p,) float32."""
    return np.concatenate([p.detach().numpy().reshape(-1) for p in module.parameters()]).astype(np.float32)


def _own(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    from torch import nn

    module = plugins.call("model.name", name, shape, classes)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model.name is {name!r}: it must return a torch.nn.Module, got {type(module).__name__}")
    return module


def _linear(shape: tuple[int, ...], classes: int) -> nn.Module:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def _char_lstm(shape: tuple[int, ...], classes: int) -> nn.Module:
    from torch import nn

    if len(shape) != 1:
        raise ConfigError(f"model.name is 'char-lstm': takes a row of character codes (d,), got {shape}")

    class CharLSTM(nn.Module):
        """Codes as whole float32 numbers (n, d) to the next character's logits (n, classes)."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(classes, CHARACTER_WIDTH)
            self.lstm = nn.LSTM(CHARACTER_WIDTH, HIDDEN_WIDTH, batch_first=True)
            self.output = nn.Linear(HIDDEN_WIDTH, classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # No record may raise an error: invalid codes are clamped.
            codes = x.long().clamp(0, classes - 1)
            return self.output(self.lstm(self.embedding(codes))[0][:, -1])

    return CharLSTM()


def _convolutional(shape: tuple[int, ...], classes: int, widths: tuple[int, ...], kernel: int) -> nn.Module:
    from torch import nn

    layers: list[nn.Module] = []
    channels, height, width = shape
    for wide in widths:
        layers += [nn.Conv2d(channels, wide, kernel, padding=kernel // 2), nn.ReLU(), nn.MaxPool2d(2)]
        channels, height, width = wide, height // 2, width // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, classes))
