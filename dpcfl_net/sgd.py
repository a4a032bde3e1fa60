"""Plain mini-batch SGD over one client's records, for releases that a trusted server protects. Nothing here is private."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from dpcfl_net.job import LocalTraining
from dpcfl_net.losses import each_loss
from dpcfl_net.privacy.randomness import stream


class PlainSGD:
    """`local.epochs` passes over shuffled batches with momentum and weight decay, on the parameters as one vector.

    module: the template; its values are overwritten. task: "classification" or "regression".
    """

    def __init__(self, module: nn.Module, local: LocalTraining, task: str = "classification") -> None:
        self._local, self._task = local, task
        self._module = module.train()
        self._theta, self._gradient = _flattened(self._module)

    def train(
        self,
        theta: np.ndarray,
        data: Any,
        key: bytes,
        *,
        pull: tuple[float, np.ndarray] | None = None,
        beside: np.ndarray | None = None,
    ) -> np.ndarray:
        """The model after this client's epochs, (p,) float32 to (p,) float32; batches are shuffled by `key` alone.

        pull = (mu, centre): adds mu (theta - centre) to every gradient (FedProx). beside: a second model, (p,), whose
        outputs are added to this one's and which stays as it is (FedCAM). Momentum starts anew at every call.
        """
        local, order = self._local, stream(key, "batches")
        offsets = None if beside is None else self._outputs(beside, data)
        centre = None if pull is None else torch.from_numpy(np.array(pull[1], np.float32))
        self._theta.copy_(torch.from_numpy(np.array(theta, np.float32)))
        velocity = torch.zeros_like(self._theta)
        for _ in range(local.epochs):
            rows = order.permutation(len(data))
            for start in range(0, len(rows), local.batch_size):
                piece = rows[start : start + local.batch_size]
                x, y = data.batch(piece, len(piece))
                outputs = self._module(x)
                if offsets is not None:
                    outputs = outputs + offsets[torch.from_numpy(piece)]
                self._gradient.zero_()
                each_loss(self._task, outputs, y).mean().backward()
                if local.weight_decay:
                    self._gradient.add_(self._theta, alpha=local.weight_decay)
                if pull is not None:
                    self._gradient.add_(self._theta - centre, alpha=pull[0])
                velocity.mul_(local.momentum).add_(self._gradient)
                self._theta.add_(velocity, alpha=-local.lr)
        return self._theta.numpy().copy()

    @torch.no_grad()
    def _outputs(self, theta: np.ndarray, data: Any) -> torch.Tensor:
        """Outputs of a model for every record, in the data's order."""
        self._theta.copy_(torch.from_numpy(np.array(theta, np.float32)))
        rows = np.arange(len(data))
        pieces = [rows[start : start + 128] for start in range(0, len(rows), 128)]
        return torch.cat([self._module(data.batch(piece, len(piece))[0]) for piece in pieces])


def _flattened(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """One vector of all parameters and one of all gradients, of which the module's own are views from here on."""
    parameters = list(module.parameters())
    theta = torch.zeros(sum(p.numel() for p in parameters))
    gradient = torch.zeros_like(theta)
    at = 0
    for parameter in parameters:
        span = slice(at, at + parameter.numel())
        parameter.data = theta[span].view(parameter.shape)
        parameter.grad = gradient[span].view(parameter.shape)
        at = span.stop
    return theta, gradient
