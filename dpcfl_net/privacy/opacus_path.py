"""Per-record gradients of any network that Opacus' GradSampleModule can do: slower, for what the fast path does not know."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dpcfl_net.errors import ConfigError
from dpcfl_net.privacy.clipping import Part, Rows


class OpacusPath:
    """The fast path's interface on Opacus; raises ConfigError naming each layer that cannot be trained record by record."""

    def __init__(self, module: nn.Module) -> None:
        self._plain = copy.deepcopy(module).requires_grad_(True).eval()
        problems = [problem for name, child in self._plain.named_modules() if (problem := _problem(name, child))]
        if problems:
            raise ConfigError(problems)
        self._sampled = _wrap(copy.deepcopy(self._plain).train())
        self._parameters = list(self._sampled.parameters())

    def logits(self, theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(n, classes) for a batch, in evaluation mode."""
        self._plain.to(theta.dtype)
        _load(list(self._plain.parameters()), theta)
        with torch.no_grad():
            return self._plain(x.to(theta.dtype))

    def gradients(self, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[Part]]:
        """Logits (n, classes), and each record's gradient of its own cross-entropy, as parts."""
        self._sampled.to(theta.dtype)
        _load(self._parameters, theta)
        with torch.enable_grad(), warnings.catch_warnings():
            # The first layer's input needs no gradient, which torch remarks on at every batch.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            logits = self._sampled(x.to(theta.dtype))
            F.cross_entropy(logits, y, reduction="sum").backward()
        parts: list[Part] = []
        at = 0
        for parameter in self._parameters:
            sample: Any = parameter
            parts.append(Rows(sample.grad_sample.reshape(x.shape[0], -1), at))
            at += parameter.numel()
            sample.grad_sample = sample.grad = None
        return logits.detach(), parts


def _load(parameters: list[nn.Parameter], theta: torch.Tensor) -> None:
    at = 0
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(theta[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()


def _problem(name: str, child: nn.Module) -> str | None:
    kind = type(child).__name__
    if isinstance(child, nn.modules.batchnorm._BatchNorm):
        return f"layer {name!r} ({kind}) mixes the records of a batch, so no record's gradient can be clipped: use GroupNorm"
    if isinstance(child, (nn.modules.dropout._DropoutNd, nn.AlphaDropout)) and child.p > 0:
        return f"layer {name!r} ({kind}) draws from torch's generator, not from the task's private key: remove it"
    if any(True for _ in child.buffers(recurse=False)):
        return f"layer {name!r} ({kind}) keeps buffers that training may change outside the clipped sum"
    return None


def _wrap(module: nn.Module) -> nn.Module:
    from opacus.grad_sample import GradSampleModule
    from opacus.validators.errors import UnsupportedModuleError

    try:
        return GradSampleModule(module, loss_reduction="sum", strict=True)
    except (UnsupportedModuleError, NotImplementedError) as problem:
        raise ConfigError(f"Opacus cannot give per-record gradients of this model: {problem}") from problem
