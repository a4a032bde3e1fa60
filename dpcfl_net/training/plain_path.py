"""Outputs of any network, by its own forward: evaluation needs no gradient by record, so this takes what training does not."""

from __future__ import annotations

import copy

import torch
from torch import nn

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.training import devices, layer_rules


class PlainPath:
    """A copy of a network in evaluation mode, into which each model's values are written.

    by_record: whether DP-SGD trains it. Raises ConfigError naming each layer that mixes records, draws at random, keeps values
    outside the parameters, or has no gradients by record where it needs them.
    """

    def __init__(self, module: nn.Module, by_record: bool = False) -> None:
        if problems := layer_rules.problems(module, by_record):
            raise ConfigError(problems)
        self.module = copy.deepcopy(module).requires_grad_(True).eval()

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
