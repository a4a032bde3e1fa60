"""Local steps in bfloat16: forward and backward passes in bfloat16, clipping and sums in float32.

Why the sensitivity stays at most the clip norm: bfloat16 decides which vector stands for a record's gradient, and nothing else.
Each number that an engine computes in bfloat16 (a row, or a factor of an outer product) is converted to float32, which changes no
value. From there on these float32 numbers are the gradient: `privacy/clipping.py` and `privacy/gram_clipping.py` take the norm of
the very numbers that they sum, and their proofs (working precision float32, u = 2^-24) hold for any such numbers. So:

- Rows: squared in float32 in blocks, with the inflation of clipping.py. Nothing is rounded between the norm and the sum.
- Outer products of linear layers: ||g a^T||^2 = ||g||^2 ||a||^2 in float64 for the float32 factors that are multiplied.
- Sums of outer products (ghost norms): Gram matrices in float64, where products of bfloat16 numbers are exact. The rounding of
  the norm is added to it. The rounding of the clipped sum in float32 is charged: 2^15 eps = 0.4 % of the clip norm.
- Rounding of activations and signals to bfloat16 (relative error 2^-9) moves a record's gradient before its norm is taken. It
  costs accuracy, no privacy.

As in float32, two adjacent batches are computed with the same shapes, and a record's numbers do not depend on its neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from dpcfl_net.privacy.clipping import GradientBlock, Rows

if TYPE_CHECKING:
    from dpcfl_net.training.engine import GradientEngine
    from dpcfl_net.training.layers import Conv

_TOGETHER = 16


class Bfloat16Engine:
    """An engine whose gradients are computed in bfloat16 and returned in float32; evaluation stays in float32.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: GradientEngine) -> None:
        self._engine = engine

    def logits(self, theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return logits, (n, classes), in evaluation mode, in the precision of theta."""
        return self._engine.logits(theta, x)

    def gradients(self, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[GradientBlock]]:
        """Return logits and gradient blocks as `GradientEngine.gradients`, in the precision of theta but with bfloat16 values."""
        logits, parts = self._engine.gradients(theta.bfloat16(), x, y)
        for part in parts:
            part.widen(theta.dtype)
        return logits.to(theta.dtype), parts


def conv_rows(layer: Conv, signal: torch.Tensor, inputs: torch.Tensor) -> Rows:
    """Compute per-record gradients of a convolution's weight: one product of signals and patches per record.

    A product for each line of the kernel, as in float32, would copy both factors: bfloat16 products take whole matrices only.

    Args:
        layer: The convolution.
        signal: Gradients of the outputs, (n, height, width, out).
        inputs: Inputs, (n, channels, height, width).
    """
    n, down, across, out = signal.shape
    _, deep, high, wide = layer.shape
    (bottom, side), stride, gap = layer.padding, layer.stride, layer.dilation
    padded = F.pad(inputs.permute(0, 2, 3, 1), (0, 0, side, side, bottom, bottom)).contiguous()
    image, line, pixel, _ = padded.stride()
    patches = padded.as_strided(
        (n, down, across, high, wide, deep),
        (image, stride[0] * line, stride[1] * pixel, gap[0] * line, gap[1] * pixel, 1),
    )
    columns = signal.reshape(n, -1, out).transpose(1, 2)
    values = signal.new_empty(n, out, high * wide * deep)
    # A few records at a time, so that the copied patches stay in the processor's cache.
    for some, seen, rows in zip(columns.split(_TOGETHER), patches.split(_TOGETHER), values.split(_TOGETHER), strict=True):
        torch.bmm(some, seen.reshape(len(seen), down * across, -1), out=rows)
    return Rows(values.view(n, -1), layer.at, sides=(out, high, wide, deep), order=(0, 3, 1, 2))
