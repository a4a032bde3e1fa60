"""Per-record gradients of networks that are no plain sequence, such as ResNets, layer by layer during one backward pass.

Autograd computes only the gradients of the layers' outputs: no weight requires one. When a layer's output gradient arrives, its
per-record gradients become a block in the form that costs least: rows, factors of an outer product, factors of a sum of outer
products (`PlaceSums`), or the rows of the codes that a record holds (`Lookups`). So no per-record gradient of the whole model ever exists.
"""

from __future__ import annotations

import copy
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.privacy.clipping import GradientBlock, Outer, Rows
from dpcfl_net.privacy.gram_clipping import PlaceSums
from dpcfl_net.privacy.lookup_clipping import Lookups, merged
from dpcfl_net.training.fast_path import conv_rows
from dpcfl_net.training.layers import Conv
from dpcfl_net.training.losses import at_least_single
from dpcfl_net.training.plain_path import PlainPath

# The rounding of `PlaceSums` grows with the places: beyond these, its share of the clip norm would be felt.
_MOST_PLACES = 32
_DIMENSIONS = {nn.Conv2d: (4,), nn.GroupNorm: (4,), nn.Linear: (2, 3), nn.LayerNorm: (2, 3), nn.Embedding: (2,)}


class DeepPath:
    """Engine for networks that `deep_layers.supported` accepts.

    Args:
        module: The model.

    Raises:
        ConfigError: As `PlainPath`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._plain = PlainPath(module, by_record=True)
        self._module = copy.deepcopy(self._plain.module).train()
        self._parts: list[GradientBlock] = []
        self._parameters = list(self._module.parameters())
        self._shapes = {parameter: parameter.shape for parameter in self._parameters}
        self._sizes = [parameter.numel() for parameter in self._parameters]
        offsets, at = {}, 0
        for parameter, size in zip(self._parameters, self._sizes, strict=True):
            offsets[parameter] = at
            at += size
        for child in self._module.modules():
            own = [offsets[parameter] for parameter in child.parameters(recurse=False)]
            if own:
                child.register_forward_hook(partial(self._watch, own))
        self._module.requires_grad_(False)

    def logits(self, theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return logits, (n, classes), in evaluation mode."""
        return self._plain.logits(theta, x)

    def gradients(self, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[GradientBlock]]:
        """Return logits and gradient blocks, as `GradientEngine.gradients`."""
        self._parts = []
        for parameter, values in zip(self._parameters, theta.split(self._sizes), strict=True):
            parameter.data = values.view(self._shapes[parameter])
        with torch.enable_grad():
            logits = self._module(x.to(theta.dtype))
            F.cross_entropy(at_least_single(logits), y, reduction="sum").backward()
        for parameter in self._parameters:
            parameter.data = theta.new_empty(0)
        parts, self._parts = self._parts, []
        return logits.detach(), parts

    def _watch(self, at: list[int], layer: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Forward hook: let the output gradient, once it arrives, become a block."""
        inputs = given[0].detach()
        if inputs.dim() not in _DIMENSIONS[type(layer)]:
            raise ConfigError(f"{layer!r} takes a batch of records, but its input has the shape {tuple(inputs.shape)}")
        if not output.requires_grad:
            # The first layer: a copy, since the next layer may work in place.
            output = output.requires_grad_().clone()
        output.register_hook(partial(self._keep, at, layer, inputs, inputs._version))
        return output

    def _keep(self, at: list[int], layer: nn.Module, inputs: torch.Tensor, version: int, signal: torch.Tensor) -> None:
        if inputs._version != version:
            raise ConfigError(f"the input of {layer!r} is changed in place after the layer has read it: use a new tensor")
        self._parts += _blocks(layer, at, inputs, signal)


def _blocks(layer: nn.Module, at: list[int], inputs: torch.Tensor, signal: torch.Tensor) -> list[GradientBlock]:
    if isinstance(layer, nn.Linear):
        if inputs.dim() == 3:
            return _sequence_blocks(layer, at, inputs, signal)
        return [Outer(signal, inputs, at[0], layer.bias is not None)]
    if isinstance(layer, nn.Embedding):
        return [Lookups(merged(signal, inputs), inputs, at[0], layer.num_embeddings)]
    if isinstance(layer, nn.LayerNorm):
        scaled = signal * F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
        sums = (scaled.sum(1), signal.sum(1)) if inputs.dim() == 3 else (scaled, signal.clone())
        return [Rows(values, first) for values, first in zip(sums, at, strict=True)]
    if isinstance(layer, nn.GroupNorm):
        normal = F.group_norm(inputs, layer.num_groups, eps=layer.eps)
        return [Rows((signal * normal).sum((2, 3)), at[0]), Rows(signal.sum((2, 3)), at[1])]
    assert isinstance(layer, nn.Conv2d)
    return _conv_blocks(layer, at, inputs, signal)


def _sequence_blocks(layer: nn.Linear, at: list[int], inputs: torch.Tensor, signal: torch.Tensor) -> list[GradientBlock]:
    places, (out, deep) = inputs.shape[1], layer.weight.shape
    if _few(places, out, deep):
        # Copies: the sum overwrites them, and other layers may read the same input.
        rows: list[GradientBlock] = [PlaceSums(signal.clone(), inputs.clone(), at[0], (out, deep), (slice(None),))]
    else:
        rows = [Rows(torch.bmm(signal.transpose(1, 2), inputs).view(len(inputs), -1), at[0])]
    return rows if layer.bias is None else [*rows, Rows(signal.sum(1), at[1])]


def _few(places: int, out: int, weights: int) -> bool:
    """True if products over places cost less than rows, and their rounding is small."""
    return places <= _MOST_PLACES and 2 * places * (out + weights) < out * weights


def _conv_blocks(layer: nn.Conv2d, at: list[int], inputs: torch.Tensor, signal: torch.Tensor) -> list[GradientBlock]:
    out, deep, high, wide = layer.weight.shape
    places, weights = signal[0, 0].numel(), deep * high * wide
    if layer.groups > 1:
        rows: list[GradientBlock] = [_grouped(layer, at[0], inputs, signal)]
    elif _few(places, out, weights):
        rows = [_place_sums(layer, at[0], inputs, signal)]
    else:
        assert not isinstance(layer.padding, str)
        geometry = list(layer.stride), list(layer.padding), list(layer.dilation)
        return conv_rows(Conv((out, deep, high, wide), layer.bias is not None, *geometry, at[0]), signal, inputs)
    if layer.bias is not None:
        rows.append(Rows(signal.sum((2, 3)), at[1]))
    return rows


def _place_sums(layer: nn.Conv2d, at: int, inputs: torch.Tensor, signal: torch.Tensor) -> PlaceSums:
    n, out, *places = signal.shape
    window = tuple(_seen(layer, axis, inputs.shape[2 + axis], places[axis]) for axis in (0, 1))
    # (n, *places, height, width, channels): runs of a whole pixel are copied, ten times as fast as single numbers.
    patches = _patches(layer, inputs, signal.shape[2:])[:, :, window[0], window[1]].permute(0, 4, 5, 2, 3, 1)
    columns = torch.empty_like(signal, memory_format=torch.channels_last).copy_(signal).permute(0, 2, 3, 1)
    shape = n, math.prod(places), -1
    return PlaceSums(
        columns.view(n, -1, out), patches.reshape(shape).contiguous(), at, tuple(layer.weight.shape), window, (0, 2, 3, 1)
    )


def _seen(layer: nn.Conv2d, axis: int, side: int, places: int) -> slice:
    """Lines of the kernel that see more than padding: on images of one pixel, the middle of three."""
    assert not isinstance(layer.padding, str)
    step, gap, pad = layer.stride[axis], layer.dilation[axis], layer.padding[axis]
    seen = [i for i in range(layer.kernel_size[axis]) if any(0 <= i * gap + t * step - pad < side for t in range(places))]
    return slice(seen[0], seen[-1] + 1)


def _grouped(layer: nn.Conv2d, at: int, inputs: torch.Tensor, signal: torch.Tensor) -> Rows:
    patches = _patches(layer, inputs, signal.shape[2:])
    own = patches.reshape(len(signal) * layer.groups, math.prod(layer.weight.shape[1:]), -1)
    columns = signal.reshape(len(own), layer.out_channels // layer.groups, -1)
    return Rows(torch.bmm(columns, own.transpose(1, 2)).view(len(signal), -1), at)


def _patches(layer: nn.Conv2d, inputs: torch.Tensor, places: torch.Size) -> torch.Tensor:
    """View of each place's patch: (n, channels, height, width of the kernel, *places)."""
    assert not isinstance(layer.padding, str)
    (down, right), (row, column), (bottom, side) = layer.stride, layer.dilation, layer.padding
    # Channels lie together.
    padded = F.pad(inputs.permute(0, 2, 3, 1).contiguous(), (0, 0, side, side, bottom, bottom))
    image, line, pixel, _ = padded.stride()
    shape = (len(inputs), layer.in_channels, *layer.weight.shape[2:], *places)
    return padded.as_strided(shape, (image, 1, row * line, column * pixel, down * line, right * pixel))
