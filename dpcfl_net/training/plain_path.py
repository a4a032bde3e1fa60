"""Outputs of any network through its own forward pass, for evaluation."""

from __future__ import annotations

import copy

import torch
from torch import nn

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.training import devices, layer_rules


class PlainPath:
    """A copy of a network in evaluation mode that runs any parameter values.

    Args:
        module: The model.
        by_record: True if DP-SGD trains it.

    Raises:
        ConfigError: For each layer that mixes records, draws random numbers, keeps state outside the parameters, or (by_record)
            has no per-record gradients.
    """

    def __init__(self, module: nn.Module, by_record: bool = False) -> None:
        if problems := layer_rules.problems(module, by_record):
            raise ConfigError(problems)
        self.module = copy.deepcopy(module).requires_grad_(True).eval()

    def logits(self, theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return logits, (n, classes)."""
        devices.lend(self.module)
        self.module.to(theta.dtype)
        fill(list(self.module.parameters()), theta)
        with torch.no_grad():
            return self.module(x.to(theta.dtype))


def fill(parameters: list[nn.Parameter], theta: torch.Tensor) -> None:
    """Write a flat model, (p,), into parameters."""
    at = 0
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(theta[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()
