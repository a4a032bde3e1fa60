"""Outputs of any network, by its own forward: evaluation needs no gradient by record, so this takes what training does not."""

from __future__ import annotations

import copy

import torch
from torch import nn

from dpcfl_net import devices
from dpcfl_net.errors import ConfigError


class PlainPath:
    """A copy of a network in evaluation mode, into which each model's values are written.

    ConfigError naming each layer that mixes records, draws at random or keeps values outside the parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = copy.deepcopy(module).requires_grad_(True).eval()
        problems = [problem for name, child in self.module.named_modules() if (problem := _problem(name, child))]
        if problems:
            raise ConfigError(problems)

    def logits(self, theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(n, classes) for a batch."""
        devices.lend(self.module)
        self.module.to(theta.dtype)
        fill(list(self.module.parameters()), theta)
        with torch.no_grad():
            return self.module(x.to(theta.dtype))


def fill(parameters: list[nn.Parameter], theta: torch.Tensor) -> None:
    """Write one flat model, (p,), into the parameters it is made of."""
    at = 0
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(theta[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()


def _problem(name: str, child: nn.Module) -> str | None:
    kind = type(child).__name__
    if isinstance(child, nn.modules.batchnorm._BatchNorm):
        return f"layer {name!r} ({kind}) mixes the records of a batch, so no record's gradient can be clipped: use GroupNorm"
    drops = child.p if isinstance(child, (nn.modules.dropout._DropoutNd, nn.AlphaDropout)) else 0
    if drops > 0 or (isinstance(child, nn.RNNBase) and child.dropout > 0):
        return f"layer {name!r} ({kind}) draws from torch's generator, not from the task's private key: remove it"
    if any(True for _ in child.buffers(recurse=False)):
        return f"layer {name!r} ({kind}) keeps buffers that training may change outside the clipped sum"
    return None
