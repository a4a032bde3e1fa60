"""Per-record gradients of sequential convolutional networks, by explicit forward and backward passes in few oneDNN calls.

Batched products of signals with shifted copies of the input give all records' convolution weight gradients at once; those of
linear layers are never formed. Tensors are channels_last, where pooling is fast; what grouped convolutions read is contiguous.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from dpcfl_net.privacy.clipping import GradientBlock, Outer, Rows
from dpcfl_net.training import bfloat16
from dpcfl_net.training.layers import Conv, Dense, Flat, Layer, Pool, Relu, Weights, channels_last, max_pool, weights_of
from dpcfl_net.training.losses import at_least_single

_convolution_backward = torch.ops.aten.convolution_backward
_pool_backward = torch.ops.aten.max_pool2d_with_indices_backward
_relu_backward = torch.ops.aten.threshold_backward
_CACHED = 2**19  # bytes of patches that are copied together


class FastPath:
    """Forward and per-record backward pass of a network that `layers.fast_layers` accepts.

    Args:
        layers: Layers of the network (`layers.fast_layers`).
    """

    def __init__(self, layers: list[Layer]) -> None:
        self._layers = layers
        self._first = next(i for i, layer in enumerate(layers) if isinstance(layer, (Conv, Dense)))

    def logits(self, theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return logits, (n, classes), in evaluation mode; theta: (p,), its dtype is the precision."""
        h = channels_last(x.to(theta.dtype))
        for layer, own in zip(self._layers, self._weights(theta), strict=True):
            h = _outputs(layer, own, h)
        return h

    def gradients(self, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[GradientBlock]]:
        """Return logits and gradient blocks, as `GradientEngine.gradients`."""
        weights = self._weights(theta)
        logits, kept = self._forward(weights, x)
        signal = torch.softmax(at_least_single(logits), 1)
        signal.scatter_add_(1, y[:, None], signal.new_full((1, 1), -1.0).expand(y.shape[0], 1))
        signal = signal.to(logits.dtype)
        parts: list[GradientBlock] = []
        for i in range(len(self._layers) - 1, self._first - 1, -1):
            signal = self._backward(i, weights[i], signal, kept[i], parts)
        return logits, parts

    def _weights(self, theta: torch.Tensor) -> list[Weights]:
        return [weights_of(layer, theta) if isinstance(layer, (Conv, Dense)) else (theta, None) for layer in self._layers]

    def _forward(self, weights: list[Weights], h: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        kept: list[Any] = []
        h = channels_last(h.to(weights[0][0].dtype))
        for layer, own in zip(self._layers, weights, strict=True):
            if isinstance(layer, Pool):
                shape = h.shape
                h, where = F.max_pool2d(h, layer.kernel, layer.stride, layer.padding, return_indices=True)
                kept.append((shape, where))
                continue
            inputs, h = h, _outputs(layer, own, h)
            kept.append(h if isinstance(layer, Relu) else inputs.shape if isinstance(layer, Flat) else inputs)
        return h, kept

    def _backward(self, i: int, weights: Weights, signal: torch.Tensor, kept: Any, parts: list[GradientBlock]) -> torch.Tensor:
        layer = self._layers[i]
        if isinstance(layer, Conv):
            if _in_groups(layer, signal):
                # One copy for both products.
                signal, kept = signal.contiguous(), kept.contiguous()
            parts += conv_rows(layer, signal, kept)
            return signal if i == self._first else _conv_signal(layer, weights[0], signal, kept)
        if isinstance(layer, Dense):
            parts.append(Outer(signal, kept, layer.at, layer.bias))
            return signal if i == self._first else signal @ weights[0]
        if isinstance(layer, Relu):
            return _relu_backward(signal, kept, 0)
        if isinstance(layer, Pool):
            shape, where = kept
            return _pool_signal(layer, signal, shape, where, self._layers[i - 1])
        return signal.reshape(kept)


def _outputs(layer: Layer, weights: Weights, h: torch.Tensor) -> torch.Tensor:
    if isinstance(layer, Conv):
        return F.conv2d(h, *weights, stride=layer.stride, padding=layer.padding, dilation=layer.dilation)
    if isinstance(layer, Pool):
        return max_pool(layer, h)
    if isinstance(layer, Dense):
        return F.linear(h, *weights)
    return torch.relu(h) if isinstance(layer, Relu) else h.reshape(h.shape[0], -1)


def _conv_signal(layer: Conv, weight: torch.Tensor, signal: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    geometry = (layer.stride, layer.padding, layer.dilation, False, [0, 0], 1, [True, False, False])
    return channels_last(_convolution_backward(signal, inputs, weight, None, *geometry)[0])


def _pool_signal(layer: Pool, signal: torch.Tensor, shape: torch.Size, where: torch.Tensor, below: Layer) -> torch.Tensor:
    # Only shape and layout of the inputs are read: their values were freed in the forward pass.
    inputs = signal.new_empty(shape)
    if isinstance(below, Conv) and _in_groups(below, inputs):
        signal = signal.contiguous()
    else:
        signal, inputs = channels_last(signal), torch.empty_like(inputs, memory_format=torch.channels_last)
    return _pool_backward(signal, inputs, layer.kernel, layer.stride, layer.padding, [1, 1], False, where)


def conv_rows(layer: Conv, signal: torch.Tensor, inputs: torch.Tensor) -> list[GradientBlock]:
    """Compute per-record gradients of a convolution.

    Args:
        layer: The convolution.
        signal: Gradients of the outputs, (n, out, height, width).
        inputs: Inputs, (n, channels, height, width).

    Returns:
        Rows of the weight and of any bias.
    """
    out, deep, _, wide = layer.shape
    if _in_groups(layer, signal):
        rows: list[GradientBlock] = [_by_groups(layer, signal, inputs)]
        return rows + ([Rows(signal.sum((2, 3)), layer.at + math.prod(layer.shape))] if layer.bias else [])
    # (n, places, out): channels_last makes it a view.
    signal = channels_last(signal).permute(0, 2, 3, 1)
    columns = signal.reshape(signal.shape[0], -1, out)
    by_lines = layer.stride[0] == 1 and deep * wide >= 16
    if by_lines and signal.dtype == torch.bfloat16:
        rows = [bfloat16.conv_rows(layer, signal, inputs)]
    else:
        rows = [(_by_lines if by_lines else _by_patches)(layer, signal.shape[1:3], columns, inputs)]
    if layer.bias:
        rows.append(Rows(columns.sum(1), layer.at + math.prod(layer.shape)))
    return rows


def _in_groups(layer: Conv, signal: torch.Tensor) -> bool:
    # Measured with AVX-512: 0.6 to 0.8 of the time of the other ways, but 2 to 3 times as slow for few channels or places.
    fused = signal.dtype == torch.float32 and signal.device.type == "cpu" and torch.backends.mkldnn.is_available()
    large = layer.shape[1] >= 16 and layer.stride == [1, 1] and signal[0, 0].numel() >= 64
    return fused and large and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _by_groups(layer: Conv, signal: torch.Tensor, inputs: torch.Tensor) -> Rows:
    # One convolution with a group per record, whose weight gradient is the rows.
    n, (out, deep, high, wide) = signal.shape[0], layer.shape
    wholes = [values.reshape(1, -1, *values.shape[2:]) for values in (signal, inputs)]
    weight = signal.new_empty(1).expand(n * out, deep, high, wide)
    geometry = (layer.stride, layer.padding, layer.dilation, False, [0, 0], n, [False, True, False])
    return Rows(_convolution_backward(*wholes, weight, None, *geometry)[1].view(n, -1), layer.at)


def _by_patches(layer: Conv, places: torch.Size, columns: torch.Tensor, inputs: torch.Tensor) -> Rows:
    # Patches are copies of the input, one for each weight of a kernel: for strides, and for images of one channel.
    n, (out, deep, high, wide) = columns.shape[0], layer.shape
    (down, right), (row, column) = layer.stride, layer.dilation
    bottom, side = layer.padding
    if deep == 1:
        padded = F.pad(inputs.contiguous(), (side, side, bottom, bottom))
        image, plane, line, _ = padded.stride()
        shape = (n, deep, high, wide, *places)
        patches = padded.as_strided(shape, (image, plane, row * line, column, down * line, right))
        values = columns.new_empty(n, deep * high * wide, out)
        few = _few(patches)
        for some, signals, rows in zip(patches.split(few), columns.split(few), values.split(few), strict=True):
            torch.bmm(some.reshape(*rows.shape[:2], -1), signals, out=rows)
        return Rows(values.view(n, -1), layer.at, sides=(deep * high * wide, out), order=(1, 0))
    padded = F.pad(inputs.permute(0, 2, 3, 1), (0, 0, side, side, bottom, bottom)).contiguous()
    image, line, pixel, _ = padded.stride()
    patches = padded.as_strided(
        (n, *places, high, wide, deep), (image, down * line, right * pixel, row * line, column * pixel, 1)
    )
    values = torch.bmm(columns.transpose(1, 2), patches.reshape(n, columns.shape[1], -1))
    return Rows(values.view(n, -1), layer.at, sides=(out, high, wide, deep), order=(0, 3, 1, 2))


def _few(patches: torch.Tensor) -> int:
    """Records whose patches are copied together: on a CPU as many as stay in the cache, in fours as physical batches."""
    if patches.device.type != "cpu":
        return max(1, patches.shape[0])
    return 4 * max(1, _CACHED // (4 * math.prod(patches.shape[1:]) * patches.element_size()))


def _by_lines(layer: Conv, places: torch.Size, columns: torch.Tensor, inputs: torch.Tensor) -> Rows:
    # Copies along one line only: the kernel's next line reads the same copies one line further down.
    n, (out, deep, high, wide) = columns.shape[0], layer.shape
    bottom, side = layer.padding
    padded = F.pad(inputs.permute(0, 2, 3, 1), (0, 0, side, side, bottom, bottom)).contiguous()
    image, line, pixel, _ = padded.stride()
    shape = (n, padded.shape[1], places[1], wide, deep)
    copies = padded.as_strided(shape, (image, line, layer.stride[1] * pixel, layer.dilation[1] * pixel, 1))
    copies = copies.reshape(n, -1, wide * deep)
    values = columns.new_empty(high, n, wide * deep, out)
    for i in range(high):
        first = i * layer.dilation[0] * places[1]
        torch.bmm(copies[:, first : first + columns.shape[1]].transpose(1, 2), columns, out=values[i])
    return Rows(values.view(high, n, -1).transpose(0, 1), layer.at, sides=(high, wide, deep, out), order=(3, 2, 0, 1))
