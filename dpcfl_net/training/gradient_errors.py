"""How far an engine's per-record gradients are from those of autograd on one record at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from dpcfl_net.privacy.clipping import GradientBlock
from dpcfl_net.training import devices
from dpcfl_net.training.plain_path import fill

if TYPE_CHECKING:
    from dpcfl_net.training.gradient_engines import Engine

# Of a gradient's norm. On the models of tests/real_models.py, up to 121 layers deep, rounding in float32 stays below 3e-5, and
# what an engine gets wrong (a missing term, another record's row) is off by 0.25 and more at `synthetic.parameters`. A sound model
# whose rectifiers flip by rounding is not refused (`in_doubt`); a mistake below the bound passes, as small as it is.
GRADIENT_BOUND = 1e-3
# A gradient that cancels (of a bias before a normalisation) is rounding alone, some 1e-7 of the whole gradient's norm: a
# tensor's error is measured against its own norm plus this share of the whole.
_SHARE = 1e-2


@dataclass(frozen=True)
class Truth:
    """A model and its values `theta`, some records, the labels they are given, and their gradients, (p,) each, one record at a time.

    The label is the class of the smallest logit, so that no gradient vanishes. unused: parameters without a gradient.
    """

    module: nn.Module
    theta: torch.Tensor
    x: torch.Tensor
    labels: torch.Tensor
    gradients: list[torch.Tensor]
    unused: list[str]


def truth(module: nn.Module, theta: torch.Tensor, x: torch.Tensor) -> Truth:
    """Autograd on a copy of `module` in training mode, on this process' device in theta's precision."""
    theta, x = (tensor.to(devices.torch_device(), theta.dtype) for tensor in (theta, x))
    placed = _placed(module, theta)
    each = [_gradient(placed, row[None], None) for row in x]
    unused = [name for name, _ in module.named_parameters() if any(name in without for _, _, without in each)]
    return Truth(module, theta, x, torch.cat([labels for _, labels, _ in each]), [one for one, _, _ in each], unused)


def together(true: Truth) -> float:
    """The error of the gradient of the records' losses in one batch, which is the sum of their own gradients."""
    found, _, _ = _gradient(_placed(true.module, true.theta), true.x, true.labels)
    return _error(found, torch.stack(true.gradients).sum(0), true.module)


def by_record(engine: Engine, others: torch.Tensor, true: Truth) -> float:
    """The largest error of the engine's gradients of the records, in one batch with others."""
    x = torch.cat([true.x, others.to(true.x)])
    labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    labels[: len(true.labels)] = true.labels
    with torch.no_grad():
        _, parts = engine.gradients(true.theta, x, labels)
        found = [_of_slot(parts, slot, true.theta) for slot in range(len(true.labels))]
    return max(_error(one, own, true.module) for one, own in zip(found, true.gradients, strict=True))


def in_doubt(error: Callable[[Truth], float], true: Truth) -> float:
    """`error` of the truth in float32; where it is above the bound, in float64 if the model can be computed so.

    A rectifier whose input is within rounding of zero may be open in one batch and shut in another, which moves a gradient by
    1e-3 and more. With float64 that is a billion times less likely, and what is wrong stays wrong.
    """
    found = error(true)
    if found <= GRADIENT_BOUND:
        return found
    try:
        return error(truth(true.module, true.theta.double(), true.x))
    except Exception:
        return found


def _placed(module: nn.Module, theta: torch.Tensor) -> nn.Module:
    module = copy.deepcopy(module).requires_grad_(True).train().to(theta.device, theta.dtype)
    fill(list(module.parameters()), theta)
    return module


@torch.enable_grad()
def _gradient(module: nn.Module, x: torch.Tensor, labels: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, set[str]]:
    """(p,): the gradient of the records' summed cross-entropy, their labels, and the parameters without a gradient."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    logits = module(x)
    labels = logits.detach().argmin(1) if labels is None else labels
    each = torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), parameters, allow_unused=True)
    dense = [torch.zeros_like(p) if g is None else g for g, p in zip(each, parameters, strict=True)]
    whole = torch.cat([(g.to_dense() if g.is_sparse else g).reshape(-1) for g in dense])
    return whole, labels, {name for name, gradient in zip(names, each, strict=True) if gradient is None}


def _of_slot(parts: list[GradientBlock], slot: int, theta: torch.Tensor) -> torch.Tensor:
    """(p,): the gradient of the record in one slot, unclipped."""
    found = torch.full_like(theta, math.nan)
    for at, gradient in (part.gradient(slot) for part in parts):
        found[at : at + len(gradient)] = gradient
    return found


def _error(found: torch.Tensor, true: torch.Tensor, module: nn.Module) -> float:
    """The largest error of a parameter tensor's gradient: its L2 norm, relative to that of the true one."""
    sizes = [parameter.numel() for parameter in module.parameters()]
    whole = _norm(true)
    errors = [
        _norm(part) / (_norm(own) + _SHARE * whole + torch.finfo(torch.float32).tiny)
        for part, own in zip((found - true).split(sizes), true.split(sizes), strict=True)
    ]
    return math.inf if any(math.isnan(error) for error in errors) else max(errors)


def _norm(vector: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))
