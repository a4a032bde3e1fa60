"""Errors of an engine's per-record gradients relative to autograd on one record at a time."""

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
    from dpcfl_net.training.engine import GradientEngine

# Relative to the gradient's norm. On real models of up to 121 layers rounding in float32 stays below 3e-5, while an engine's
# mistake (a missing term, another record's row) exceeds 0.25 at `synthetic.parameters`. A sound model whose rectifiers flip by
# rounding passes (`in_doubt`); so does a mistake below the bound.
GRADIENT_BOUND = 1e-3
# A gradient that cancels (a bias before a normalisation) is pure rounding, some 1e-7 of the whole gradient's norm: a tensor's
# error is relative to its own norm plus this share of the whole.
_SHARE = 1e-2


@dataclass(frozen=True)
class Truth:
    """Reference gradients of a model by autograd, one record at a time.

    Labels are the classes of the smallest logit, so that no gradient vanishes.

    Attributes:
        module: The model.
        theta: Parameter values, (p,).
        x: Records, (n, ...).
        labels: Labels, (n,) int64.
        gradients: Gradient of each record, (p,).
        unused: Names of parameters without a gradient.
    """

    module: nn.Module
    theta: torch.Tensor
    x: torch.Tensor
    labels: torch.Tensor
    gradients: list[torch.Tensor]
    unused: list[str]


def truth(module: nn.Module, theta: torch.Tensor, x: torch.Tensor) -> Truth:
    """Compute reference gradients on a copy of the model in training mode, on this process's device.

    Args:
        module: The model.
        theta: Parameter values, (p,); its dtype is the precision.
        x: Records, (n, ...).
    """
    theta, x = (tensor.to(devices.torch_device(), theta.dtype) for tensor in (theta, x))
    placed = _placed(module, theta)
    each = [_gradient(placed, row[None], None) for row in x]
    unused = [name for name, _ in module.named_parameters() if any(name in without for _, _, without in each)]
    return Truth(module, theta, x, torch.cat([labels for _, labels, _ in each]), [one for one, _, _ in each], unused)


def together(true: Truth) -> float:
    """Compute the error of the gradient of one batch with all records against the sum of the gradients of single records.

    Args:
        true: Reference gradients.
    """
    found, _, _ = _gradient(_placed(true.module, true.theta), true.x, true.labels)
    return _error(found, torch.stack(true.gradients).sum(0), true.module)


def by_record(engine: GradientEngine, others: torch.Tensor, true: Truth) -> float:
    """Compute the largest error of an engine's gradients of the records, in one batch with others.

    Args:
        engine: The engine.
        others: Further records of the batch, (m, ...).
        true: Reference gradients.
    """
    x = torch.cat([true.x, others.to(true.x)])
    labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    labels[: len(true.labels)] = true.labels
    with torch.no_grad():
        _, parts = engine.gradients(true.theta, x, labels)
        found = [_of_slot(parts, slot, true.theta) for slot in range(len(true.labels))]
    return max(_error(one, own, true.module) for one, own in zip(found, true.gradients, strict=True))


def in_doubt(error: Callable[[Truth], float], true: Truth) -> float:
    """Compute an error in float32, and again in float64 if it exceeds the bound and the model allows it.

    A rectifier whose input is within rounding of zero may be open in one batch and closed in another, which moves a gradient by
    1e-3 and more. In float64 this is a billion times less likely, while real errors remain.

    Args:
        error: Computes the error from reference gradients.
        true: Reference gradients in float32.
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
    """Gradient (p,) of the records' summed cross-entropy, their labels, and the parameters without a gradient."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    logits = module(x)
    labels = logits.detach().argmin(1) if labels is None else labels
    each = torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), parameters, allow_unused=True)
    dense = [torch.zeros_like(p) if g is None else g for g, p in zip(each, parameters, strict=True)]
    whole = torch.cat([(g.to_dense() if g.is_sparse else g).reshape(-1) for g in dense])
    return whole, labels, {name for name, gradient in zip(names, each, strict=True) if gradient is None}


def _of_slot(parts: list[GradientBlock], slot: int, theta: torch.Tensor) -> torch.Tensor:
    """Unclipped gradient (p,) of the record in one slot."""
    found = torch.full_like(theta, math.nan)
    for at, gradient in (part.gradient(slot) for part in parts):
        found[at : at + len(gradient)] = gradient
    return found


def _error(found: torch.Tensor, true: torch.Tensor, module: nn.Module) -> float:
    """Largest error over parameter tensors: L2 norm relative to the true gradient's."""
    sizes = [parameter.numel() for parameter in module.parameters()]
    whole = _norm(true)
    errors = [
        _norm(part) / (_norm(own) + _SHARE * whole + torch.finfo(torch.float32).tiny)
        for part, own in zip((found - true).split(sizes), true.split(sizes), strict=True)
    ]
    return math.inf if any(math.isnan(error) for error in errors) else max(errors)


def _norm(vector: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))
