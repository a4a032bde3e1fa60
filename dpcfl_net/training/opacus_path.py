"""Per-record gradients with Opacus' GradSampleModule, for networks that the fast path does not support."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.privacy.clipping import GradientBlock, Rows
from dpcfl_net.training import devices
from dpcfl_net.training.plain_path import PlainPath, fill


class OpacusPath:
    """Engine on Opacus.

    Args:
        module: The model.

    Raises:
        ConfigError: For each layer that cannot be trained record by record.
    """

    def __init__(self, module: nn.Module) -> None:
        self._plain = PlainPath(module, by_record=True)
        self._sampled = _wrap(copy.deepcopy(self._plain.module).train())
        self._parameters = list(self._sampled.parameters())

    def logits(self, theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return logits, (n, classes), in evaluation mode."""
        return self._plain.logits(theta, x)

    def gradients(self, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[GradientBlock]]:
        """Return logits and gradient blocks, as `GradientEngine.gradients`."""
        devices.lend(self._sampled)
        self._sampled.to(theta.dtype)
        fill(self._parameters, theta)
        with torch.enable_grad(), warnings.catch_warnings():
            # The first layer's input needs no gradient.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            # Layers that Opacus does not support go through vmap, which runs some operations record by record.
            warnings.filterwarnings("ignore", "There is a performance drop")
            logits = self._sampled(x.to(theta.dtype))
            F.cross_entropy(logits, y, reduction="sum").backward()
        parts: list[GradientBlock] = []
        at = 0
        for parameter in self._parameters:
            sample: Any = parameter
            parts.append(Rows(sample.grad_sample.reshape(x.shape[0], -1), at))
            at += parameter.numel()
            sample.grad_sample = sample.grad = None
        return logits.detach(), parts


def _wrap(module: nn.Module) -> nn.Module:
    from opacus.grad_sample import GradSampleModule
    from opacus.validators.errors import UnsupportedModuleError

    try:
        return GradSampleModule(module, loss_reduction="sum", strict=True)
    except (UnsupportedModuleError, NotImplementedError) as problem:
        raise ConfigError(f"Opacus cannot give per-record gradients of this model: {problem}") from problem
