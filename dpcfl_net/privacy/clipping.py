"""Clip and sum per-record gradients with a sensitivity of at most `clip`, rounding included.

Proof, for adjacent batches (one record emptied, the others in the same slots) computed in a precision with unit roundoff u
and at most P slots per piece; gamma_k = k u / (1 - k u) (Higham 2002, section 3.1), for any order of summation:

- The norm that determines the clip is that of the numbers that are summed. Materialised rows are squared in working
  precision in blocks of 512 terms, inflated by 2 (512 + 4) u, and raised by the smallest normal number for each square
  lost to underflow. Outer products are never formed: ||g a^T||^2 = ||g||^2 ||a||^2, in float64, where squares of float32
  numbers are exact.
- factor = min(1, clip' / bound), so a factor times its record has a norm of at most clip' (1 + 4 u). Below the smallest normal
  number a factor has no such precision: it could round up to twice its value, and crafted weights reach it. A record whose factor
  would be so small is removed. The product of a factor and a signal of an outer product may be as small, and is lost below 2^-126
  in float32; a record with a side above 2^40 is removed, so that this moves the sum by less than 2^-86 sqrt(outputs). That is
  2^-56 sqrt(outputs) clip for the smallest clip norm, 1e-9; the factor takes one u of the 4 u, which leaves room for it.
- A sum of P such records in working precision is off by at most gamma_{P+2} P clip' (1 + 4 u), so two adjacent sums differ
  by at most clip' (1 + 4 u)(1 + u)(1 + 2 P gamma_{P+2}). clip' is `clip` divided by that: 0.9998 of it at 40 slots, 0.9992 at 80.

Pieces are added up in float64; its rounding and that of the noise are far below the grid of mechanisms.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

BLOCK = 512
LARGEST = 2.0**40  # norm of a side of an outer product above which its record is removed
_SHARE_UNITS = 2**15  # 0.4 % of the clip norm in float32
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


class GradientBlock(Protocol):
    """Gradients of some parameters for each slot of a piece."""

    def squared_norms(self) -> torch.Tensor:
        """Bound each squared norm from above: (slots,) float64, inf or NaN where it overflows or is not a number."""

    def squared_rounding(self, most: int) -> torch.Tensor | None:
        """Bound the square of what rounding in the sum may change per unit of factor, (slots,) float64 (gram_clipping.py).

        None if `reserved_clip` covers it: the sum adds up numbers whose own norms were bounded.

        Args:
            most: Slots of the largest piece.
        """

    def add_clipped(self, factors: torch.Tensor, keep: torch.Tensor, out: torch.Tensor) -> None:
        """Write the sum over slots of factor * gradient into `out`.

        Args:
            factors: Factor of each slot, (slots,).
            keep: Bit masks, (slots,) integers as wide as the gradients' floats, with all bits set or none; a slot whose mask is
                0 is removed by selection.
            out: Gradient of all parameters, (p,).
        """

    def gradient(self, slot: int) -> tuple[int, torch.Tensor]:
        """Return the index of the first parameter, and the flat gradient of one slot."""

    def widen(self, dtype: torch.dtype) -> None:
        """Convert the numbers to a wider format, which changes no value; clipping then works in that format."""


@dataclass
class Rows:
    """Materialised gradients.

    Attributes:
        values: Gradients, (slots, ..., m); overwritten where slots are removed.
        at: Index of the first parameter.
        sides: Shape of a row that is not in the parameters' order; empty otherwise.
        order: Permutation of such a row into the parameters' order.
    """

    values: torch.Tensor
    at: int
    sides: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    def squared_norms(self) -> torch.Tensor:
        """See `GradientBlock`."""
        last = self.values.shape[-1]
        terms = self.values[0].numel()
        limits = torch.finfo(self.values.dtype)
        whole = last - last % BLOCK
        # Blocks are added up in float64, so that the inflation does not grow with the layer.
        inflation = 1 + (BLOCK + 4) * limits.eps + terms * torch.finfo(torch.float64).eps
        squares = self.values.new_full((self.values.shape[0],), terms * limits.tiny, dtype=torch.float64)
        if whole:
            squares += _squares(self.values[..., :whole].unflatten(-1, (-1, BLOCK)))
        if whole < last:
            squares += _squares(self.values[..., whole:])
        return squares.mul_(inflation)

    def squared_rounding(self, most: int) -> None:
        """See `GradientBlock`."""

    def add_clipped(self, factors: torch.Tensor, keep: torch.Tensor, out: torch.Tensor) -> None:
        """See `GradientBlock`."""
        bits = self.values.view(keep.dtype)
        bits &= keep.view(-1, *[1] * (bits.dim() - 1))
        place = out[self.at : self.at + self.values[0].numel()]
        if self.sides:
            # One product for each entry of the middle dimension, if there is one.
            total = factors @ (self.values if self.values.dim() == 2 else self.values.transpose(0, 1))
            total = total.view(self.sides).permute(self.order)
            place.view(total.shape).copy_(total)
        else:
            torch.mv(self.values.t(), factors, out=place)

    def gradient(self, slot: int) -> tuple[int, torch.Tensor]:
        """See `GradientBlock`."""
        row = self.values[slot]
        return self.at, (row.reshape(self.sides).permute(self.order) if self.sides else row).reshape(-1)

    def widen(self, dtype: torch.dtype) -> None:
        """See `GradientBlock`."""
        self.values = self.values.to(dtype)


@dataclass
class Outer:
    """Gradients of a linear layer as factors of outer products.

    Attributes:
        signals: Gradients of the outputs, (slots, o).
        inputs: Inputs, (slots, d).
        at: Index of the first parameter: weight (o, d), then any bias (o,).
        bias: True if the layer has a bias.
    """

    signals: torch.Tensor
    inputs: torch.Tensor
    at: int
    bias: bool

    def squared_norms(self) -> torch.Tensor:
        """See `GradientBlock`."""
        signals = torch.linalg.vector_norm(self.signals, dim=1, dtype=torch.float64).square_()
        inputs = torch.linalg.vector_norm(self.inputs, dim=1, dtype=torch.float64).square_()
        # NaN is not above the bound; the product keeps it.
        huge = torch.maximum(signals, inputs) > LARGEST**2
        if self.bias:
            inputs += 1
        terms = self.signals.shape[1] + self.inputs.shape[1]
        limits = torch.finfo(torch.float64)
        return signals.mul_(inputs).mul_(1 + (terms + 8) * limits.eps).add_(terms * limits.tiny).masked_fill_(huge, math.inf)

    def squared_rounding(self, most: int) -> None:
        """See `GradientBlock`."""

    def add_clipped(self, factors: torch.Tensor, keep: torch.Tensor, out: torch.Tensor) -> None:
        """See `GradientBlock`."""
        signals = _selected(self.signals, keep).mul_(factors[:, None])
        inputs = _selected(self.inputs, keep)
        wide, deep = signals.shape[1], inputs.shape[1]
        end = self.at + wide * deep
        torch.mm(signals.t(), inputs, out=out[self.at : end].view(wide, deep))
        if self.bias:
            torch.sum(signals, 0, out=out[end : end + wide])

    def gradient(self, slot: int) -> tuple[int, torch.Tensor]:
        """See `GradientBlock`."""
        signal = self.signals[slot]
        weight = torch.outer(signal, self.inputs[slot]).reshape(-1)
        return self.at, torch.cat([weight, signal]) if self.bias else weight

    def widen(self, dtype: torch.dtype) -> None:
        """See `GradientBlock`."""
        self.signals, self.inputs = self.signals.to(dtype), self.inputs.to(dtype)


def clipped_sum(
    parts: list[GradientBlock], usable: torch.Tensor, clip: float, out: torch.Tensor, most: int | None = None
) -> torch.Tensor:
    """Clip each slot's gradient and sum.

    Slots that are not usable, or have no finite norm or one so large that the factor would not be a normal number, are removed by
    selection, which is always executed: multiplying by zero would turn inf into NaN.

    Args:
        parts: Gradients, block by block.
        usable: Slots that hold a record, (slots,) bool.
        clip: Clip norm C.
        out: Memory for the sum, (p,); its dtype is the working precision.
        most: Slots of the largest piece, for which rounding is reserved: factors must not show the size of this one. None: this
            piece is the largest.

    Returns:
        `out`: the sum, (p,), with an L2 sensitivity of at most `clip` under zero-out.
    """
    squares = torch.zeros(usable.shape[0], dtype=torch.float64, device=usable.device)
    for part in parts:
        squares += part.squared_norms()
    dtype, most = out.dtype, usable.shape[0] if most is None else most
    target = reserved_clip(clip, most, dtype)
    longest = target / (2 * torch.finfo(dtype).tiny)
    # NaN is not below the bound, so it is removed too.
    removed = ~(usable & (squares < longest * longest))
    rounding = [each for part in parts if (each := part.squared_rounding(most)) is not None]
    if rounding:
        share = rounding_share(dtype)
        # The larger of the two bounds decides.
        squares = torch.maximum(squares.div_((1 - share) ** 2), torch.stack(rounding).sum(0).div_(share**2))
        removed |= ~(squares < longest * longest)
    factors = (target / squares.sqrt_()).clamp_(max=1.0).masked_fill_(removed, 0.0).to(dtype)
    # A mask of bits selects six times as fast as masked_fill.
    keep = removed.to(_BITS[dtype]).sub_(1)
    for part in parts:
        part.add_clipped(factors, keep, out)
    return out


def _squares(blocks: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(blocks, dim=-1).double().square_().reshape(blocks.shape[0], -1).sum(1)


def _selected(values: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return (values.view(keep.dtype) & keep[:, None]).view(values.dtype)


def reserved_clip(clip: float, slots: int, dtype: torch.dtype) -> float:
    """Compute clip', the norm to which records are clipped so that the computed sum's sensitivity is at most `clip`.

    Args:
        clip: Clip norm C.
        slots: Slots of the largest piece, P.
        dtype: Working precision.

    Returns:
        clip', by the proof above.
    """
    unit = torch.finfo(dtype).eps / 2
    gamma = (slots + 2) * unit / (1 - (slots + 2) * unit)
    return clip / ((1 + 4 * unit) * (1 + unit) * (1 + 2 * slots * gamma))


def rounding_share(dtype: torch.dtype) -> float:
    """Return the share of clip' that covers `GradientBlock.squared_rounding`.

    Args:
        dtype: Working precision.
    """
    return _SHARE_UNITS * torch.finfo(dtype).eps
