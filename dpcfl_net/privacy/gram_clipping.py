"""Gradients of a layer that adds up outer products over places, clipped by norms from Gram matrices (ghost clipping).

The weight gradient of a convolution is B^T A for a record's output gradients B, (places, o), and patches A, (places, d). It is
never formed: ||B^T A||^2 = <A A^T, B B^T> (Lee and Kifer 2021), and one product over all slots and places gives the clipped sum.

Proof of the sensitivity, in the notation of clipping.py, for at most P slots and T places; m = ||A|| ||B|| in Frobenius norm:

- The Gram matrices are computed in float64. By the inequality of Cauchy and Schwarz the rounding of <A A^T, B B^T> is at most
  gamma_{d + o + T^2} m^2, which is added: the result bounds the norm in exact arithmetic.
- The terms of one record may cancel in B^T A, but they are added in working precision together with those of other records:
  products over c slots each add up c T terms in any order, and their results are added one by one. With depth
  k = c T + P / c + 4, the sum of factor * gradient is off by at most gamma_k sum(factor * m), relative to m and not to the norm.
  Two adjacent sums differ by the gradient of one record, at most max(factor * norm), and by at most
  max(factor * 2 P gamma_k m), the `squared_rounding` of a slot; over layers both add up in squares.
- `clipping.clipped_sum` keeps the first below (1 - share) clip' and the second below share * clip'. So crafted weights under
  which gradients cancel are scaled down, and cannot pass rounding off as a small norm.
- The product of a factor and a signal is lost below the smallest normal number. A slot with ||A|| or ||B|| above 2^40 is
  removed, so that this moves the sum by less than 1e-19, which the last 2^-19 of the share cover for all clip norms from 1e-9.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from dpcfl_net.privacy.clipping import LARGEST

_TERMS = 64  # of one product: few, so that their rounding takes little of the clip norm


@dataclass
class PlaceSums:
    """Gradients of a weight as sums of outer products over places.

    Attributes:
        signals: Gradients of the outputs, (slots, places, o); overwritten by `add_clipped`.
        inputs: Inputs or patches, (slots, places, d); overwritten by `add_clipped`.
        at: Index of the first parameter of the weight.
        sides: Shape of the weight, (o, ...).
        window: Part of the last dimensions of `sides` that `inputs` covers; the rest of the gradient is zero.
        order: Permutation of `sides` in which `inputs` lie; empty if they lie in this order.
    """

    signals: torch.Tensor
    inputs: torch.Tensor
    at: int
    sides: tuple[int, ...]
    window: tuple[slice, ...]
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        signals, inputs = (values.double() for values in (self.signals, self.inputs))
        grams = torch.bmm(signals, signals.transpose(1, 2)), torch.bmm(inputs, inputs.transpose(1, 2))
        # ||B||^2 and ||A||^2 are the traces.
        lengths = [gram.diagonal(dim1=1, dim2=2).sum(1) for gram in grams]
        self._norms = (grams[0] * grams[1]).sum((1, 2))
        self._sides = lengths[0] * lengths[1]
        self._huge = ~((lengths[0] <= LARGEST**2) & (lengths[1] <= LARGEST**2))

    def squared_norms(self) -> torch.Tensor:
        """See `GradientBlock`."""
        places, out, deep = self.signals.shape[1], self.signals.shape[2], self.inputs.shape[2]
        limits = torch.finfo(torch.float64)
        terms = deep + out + places**2 + 8
        bound = self._norms.clamp(min=0) + self._sides * (terms * limits.eps) + terms * limits.tiny
        return bound.masked_fill(self._huge, math.inf)

    def squared_rounding(self, most: int) -> torch.Tensor:
        """See `GradientBlock`."""
        unit = torch.finfo(self.signals.dtype).eps / 2
        step = self._step()
        terms = (min(step, most) * self.signals.shape[1] + math.ceil(most / step) + 4) * unit
        worst = 2 * most * terms / (1 - terms)
        return self._sides * (worst**2 * (1 + 2.0**-18))

    def add_clipped(self, factors: torch.Tensor, keep: torch.Tensor, out: torch.Tensor) -> None:
        """See `GradientBlock`."""
        for values in (self.signals, self.inputs):
            bits = values.view(keep.dtype)
            bits &= keep[:, None, None]
        self.signals *= factors[:, None, None]
        self._write(out[self.at : self.at + math.prod(self.sides)], self.signals, self.inputs)

    def gradient(self, slot: int) -> tuple[int, torch.Tensor]:
        """See `GradientBlock`."""
        place = self.signals.new_empty(math.prod(self.sides))
        self._write(place, self.signals[slot][None], self.inputs[slot][None])
        return self.at, place

    def widen(self, dtype: torch.dtype) -> None:
        """See `GradientBlock`; the Gram matrices are in float64 already."""
        self.signals, self.inputs = self.signals.to(dtype), self.inputs.to(dtype)

    def _step(self) -> int:
        """Slots of one product."""
        return max(1, _TERMS // self.signals.shape[1])

    def _write(self, place: torch.Tensor, signals: torch.Tensor, inputs: torch.Tensor) -> None:
        total: torch.Tensor | None = None
        left, right = (values.split(self._step()) for values in (signals, inputs))
        for some, more in zip(left, right, strict=True):
            # A separate product: in a joint one, all terms could pass through one chain of additions.
            product = _product(some.flatten(0, 1), more.flatten(0, 1))
            total = product if total is None else total.add_(product)
        assert total is not None
        window: Any = (..., *self.window)
        covered = place.view(self.sides)[window]
        if covered.numel() < place.numel():
            place.zero_()
        covered = covered.permute(self.order) if self.order else covered
        covered.copy_(total.view(covered.shape))


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left^T right; by oneDNN where it takes half the time of torch's product: float32 with AVX-512."""
    if left.dtype == torch.float32 and left.device.type == "cpu" and _has_fast_product():
        # oneDNN takes rows that lie apart, but a thousand times slower.
        left, right = left.contiguous().t(), right.contiguous().t()
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
        return found
    return left.t() @ right


@cache
def _has_fast_product() -> bool:
    fast = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return fast and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # a private operation of torch
