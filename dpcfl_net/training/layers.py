"""Sequential convolutional networks as lists of layers over one flat parameter vector, and a joint forward pass of several."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dpcfl_net.core.errors import ConfigError


@dataclass(frozen=True)
class Conv:
    """A convolution with one group; its weight starts at offset `at`, followed by its bias."""

    shape: tuple[int, int, int, int]
    bias: bool
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    at: int


@dataclass(frozen=True)
class Pool:
    """Max pooling."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]


@dataclass(frozen=True)
class Dense:
    """A linear layer; its weight (o, d) starts at offset `at`, followed by its bias."""

    shape: tuple[int, int]
    bias: bool
    at: int


@dataclass(frozen=True)
class Relu:
    """Rectifier."""


@dataclass(frozen=True)
class Flat:
    """Flattening from (n, ...) to (n, d)."""


Layer = Conv | Pool | Dense | Relu | Flat
_MOST_BYTES = 2**24  # of images that are pooled in two passes; larger ones leave the processor's caches between them
Weights = tuple[torch.Tensor, torch.Tensor | None]


def fast_layers(module: nn.Module, input_shape: tuple[int, ...] | None = None) -> list[Layer] | None:
    """Convert a Sequential to layers that the fast path can run.

    Args:
        module: The model.
        input_shape: Shape of one record; None: shapes are not checked, and a first layer that is Linear must read vectors.

    Returns:
        The layers; None for a module that the fast path does not support.

    Raises:
        ConfigError: For the first layer that does not fit its input.
    """
    if type(module) is not nn.Sequential or is_hooked(module):
        return None
    layers: list[Layer] = []
    at, flat, shape = 0, True, input_shape
    # named_children omits the second use of a layer.
    for name, child in zip(module._modules, module, strict=True):
        layer = _layer(child, at)
        if layer is None or (isinstance(layer, Dense) and not flat):
            return None
        if shape is not None:
            shape = _shape_after(layer, shape, f"layer {name!r} ({type(child).__name__})")
            if shape is None:
                return None
        flat = isinstance(layer, Flat) or (flat and not isinstance(layer, (Conv, Pool)))
        layers.append(layer)
        at += sum(p.numel() for p in child.parameters())
    shared = len(set(module.parameters())) != sum(len(list(child.parameters())) for child in module)
    if not layers or not isinstance(layers[-1], Dense) or shared:
        return None
    for i in range(len(layers) - 1):
        # The rectifier commutes with a maximum, gradients included, and costs a quarter after it. Flat vectors have one layout.
        if isinstance(layers[i], Relu) and isinstance(layers[i + 1], (Pool, Flat)):
            layers[i], layers[i + 1] = layers[i + 1], layers[i]
    return layers


def _shape_after(layer: Layer, shape: tuple[int, ...], name: str) -> tuple[int, ...] | None:
    """Shape of a record after `layer`; None where torch accepts the input and the fast path does not."""
    if isinstance(layer, Relu):
        return shape
    if isinstance(layer, Flat):
        return (math.prod(shape),)
    if isinstance(layer, Dense):
        wide, deep = layer.shape
        if not shape or shape[-1] != deep:
            raise ConfigError(f"{name} takes {deep} features, but its input has the shape {shape}")
        # On sequences or images torch applies the layer to each row, whose gradients would have to be summed.
        return (wide,) if len(shape) == 1 else None
    return _places(layer, shape, name)


def _places(layer: Conv | Pool, shape: tuple[int, ...], name: str) -> tuple[int, ...] | None:
    if isinstance(layer, Pool) and len(shape) == 2:
        return None
    if len(shape) != 3 or (isinstance(layer, Conv) and shape[0] != layer.shape[1]):
        # torch would read a batch of (height, width) as one image with a channel per record.
        channels = layer.shape[1] if isinstance(layer, Conv) else "channels"
        raise ConfigError(f"{name} takes ({channels}, height, width), but its input has the shape {shape}")
    window = list(layer.shape[2:]) if isinstance(layer, Conv) else layer.kernel
    spread = layer.dilation if isinstance(layer, Conv) else [1, 1]
    if isinstance(layer, Pool) and any(2 * pad > side for pad, side in zip(layer.padding, window, strict=True)):
        raise ConfigError(f"{name} pads by {layer.padding}: must be at most half of its window {window}")
    if min(layer.stride) < 1:
        raise ConfigError(f"{name} moves its window by {layer.stride}: must be at least 1")
    reach = [gap * (side - 1) + 1 for side, gap in zip(window, spread, strict=True)]
    room = [side + 2 * pad - far for side, pad, far in zip(shape[1:], layer.padding, reach, strict=True)]
    if min(room) < 0:
        raise ConfigError(f"{name} has a window over {reach}, larger than its padded input of the shape {shape}")
    places = (free // step + 1 for free, step in zip(room, layer.stride, strict=True))
    return (layer.shape[0] if isinstance(layer, Conv) else shape[0], *places)


def _layer(child: nn.Module, at: int) -> Layer | None:
    # Subclasses may compute something else: isinstance narrows for the type checker, the exact type decides.
    if type(child) not in (nn.Conv2d, nn.MaxPool2d, nn.Linear, nn.ReLU, nn.Flatten):
        return None
    if is_hooked(child):
        return None
    if (
        isinstance(child, nn.Conv2d)
        and child.groups == 1
        and child.padding_mode == "zeros"
        and not isinstance(child.padding, str)
    ):
        out, deep, high, wide = child.weight.shape
        stride, padding, dilation = list(child.stride), list(child.padding), list(child.dilation)
        return Conv((out, deep, high, wide), child.bias is not None, stride, padding, dilation, at)
    if isinstance(child, nn.MaxPool2d) and not (child.ceil_mode or child.return_indices) and _pair(child.dilation) == [1, 1]:
        return Pool(_pair(child.kernel_size), _pair(child.stride), _pair(child.padding))
    if isinstance(child, nn.Linear):
        return Dense((child.out_features, child.in_features), child.bias is not None, at)
    if isinstance(child, nn.ReLU):
        return Relu()
    return Flat() if isinstance(child, nn.Flatten) and (child.start_dim, child.end_dim) == (1, -1) else None


def is_hooked(module: nn.Module) -> bool:
    """Return True if a module has a hook, which may change its outputs or its gradients."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks)


def _pair(value: Any) -> list[int]:
    return list(value) if isinstance(value, tuple) else [value, value]


def weights_of(layer: Conv | Dense, theta: torch.Tensor) -> Weights:
    """Return views of the weight and bias of a layer in theta, (p,)."""
    end = layer.at + math.prod(layer.shape)
    return theta[layer.at : end].view(layer.shape), theta[end : end + layer.shape[0]] if layer.bias else None


def channels_last(h: torch.Tensor) -> torch.Tensor:
    """Return images in channels_last memory format, and other tensors unchanged."""
    # `contiguous` leaves one-channel images unchanged, which makes later pooling ten times slower.
    return h.to(memory_format=torch.channels_last) if h.dim() == 4 else h


def max_pool(layer: Pool, h: torch.Tensor) -> torch.Tensor:
    """Pool without noting where the maxima are, in a half to a fifth of the time of `F.max_pool2d`; the sign of a zero may differ.

    Args:
        layer: The layer.
        h: Images, (n, channels, height, width).

    Returns:
        Maxima of the windows, (n, channels, height, width).
    """
    if any(layer.padding) or h.device.type != "cpu" or h.nbytes > _MOST_BYTES:
        return F.max_pool2d(h, layer.kernel, layer.stride, layer.padding)
    for dim, kernel, stride in ((3, layer.kernel[1], layer.stride[1]), (2, layer.kernel[0], layer.stride[0])):
        reach = (h.shape[dim] - kernel) // stride * stride + 1
        starts = (h.narrow(dim, place, reach) for place in range(kernel))
        h = reduce(torch.maximum, (part[..., ::stride] if dim == 3 else part[..., ::stride, :] for part in starts))
    return h


def pooled_first(network: nn.Sequential) -> nn.Sequential:
    """Move each rectifier behind the max pooling that follows it, as `fast_layers`: it then reads a quarter of the numbers.

    Args:
        network: A network that `fast_layers` accepts.

    Returns:
        A network of the same layers. Its outputs and gradients have the same bits: the maximum of a window is at the same place,
        or is not positive and has no gradient.
    """
    layers = list(network)
    for i in range(len(layers) - 1):
        if isinstance(layers[i], nn.ReLU) and isinstance(layers[i + 1], nn.MaxPool2d):
            layers[i], layers[i + 1] = layers[i + 1], layers[i]
    return nn.Sequential(*layers)


@torch.no_grad()
def side_by_side(layers: list[Layer], thetas: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute the outputs of M networks with the same layers for the same inputs, in one grouped convolution per layer.

    For small networks, separate passes cost more in memory traffic than in arithmetic.

    Args:
        layers: Layers of the networks.
        thetas: Parameters, (M, p).
        x: Inputs, (n, ...).

    Returns:
        Outputs, (M, n, classes).
    """
    count, h = len(thetas), channels_last(x)
    first = True
    for layer in layers:
        if isinstance(layer, (Conv, Dense)):
            each = [weights_of(layer, theta) for theta in thetas]
            bias = [own for _, own in each if own is not None]
        if isinstance(layer, Conv):
            weight = torch.cat([own for own, _ in each])
            groups = 1 if first else count
            h = F.conv2d(h, weight, torch.cat(bias) if bias else None, layer.stride, layer.padding, layer.dilation, groups)
        elif isinstance(layer, Dense):
            batched = h.expand(count, *h.shape) if first else h
            h = torch.bmm(batched, torch.stack([own for own, _ in each]).transpose(1, 2))
            h = h + torch.stack(bias)[:, None] if bias else h
        elif isinstance(layer, Pool):
            h = max_pool(layer, h)
        elif isinstance(layer, Relu):
            h = torch.relu(h)
        elif first:
            h = h.reshape(len(h), -1)
        elif h.dim() == 4:
            h = h.reshape(len(h), count, -1).transpose(0, 1)
        first = first and not isinstance(layer, (Conv, Dense))
    return h
