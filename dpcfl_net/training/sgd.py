"""Plain mini-batch SGD on one client's records, for releases that a trusted server protects; nothing here is private."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from dpcfl_net.training import devices
from dpcfl_net.training.flat_models import require_model, require_models
from dpcfl_net.training.gradient_engines import set_processor_flags
from dpcfl_net.training.layers import channels_last, fast_layers, pooled_first, side_by_side
from dpcfl_net.training.losses import each_loss

KEPT = 4096  # largest client whose records are converted to floats once, not batch by batch


class PlainSGD:
    """Mini-batch SGD with momentum and weight decay on the flat parameter vector.

    Args:
        module: The model; its values are overwritten.
        epochs: Passes over the shuffled records.
        batch_size: Records of a batch; the last one may be smaller.
        lr: Step size.
        momentum: Momentum; its state starts at zero in every call.
        weight_decay: L2 penalty added to the gradient.
        task: "classification" or "regression".
        input_shape: Shape of one record, as for `layers.fast_layers`.
    """

    def __init__(
        self, module: nn.Module, *, epochs: int, batch_size: int, lr: float, momentum: float = 0.0, weight_decay: float = 0.0,
        task: str = "classification", input_shape: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        self._epochs, self._batch_size, self._lr = epochs, batch_size, lr
        self._momentum, self._weight_decay, self._task = momentum, weight_decay, task
        self._layers = fast_layers(module, input_shape)
        self._module = (pooled_first(module) if self._layers and isinstance(module, nn.Sequential) else module).train()
        self._theta, self._gradient = _flattened(self._module)

    def to(self, device: torch.device) -> None:
        """Move parameters and gradients to a device (`devices.lend`)."""
        self._module.to(device)
        self._theta, self._gradient = _flattened(self._module)

    def train(
        self,
        theta: np.ndarray,
        data: Any,
        order: np.random.Generator,
        *,
        proximal: tuple[float, np.ndarray] | None = None,
        base_model: np.ndarray | None = None,
    ) -> np.ndarray:
        """Train for the client's epochs.

        Args:
            theta: Initial model, (p,) float32.
            data: The client's records.
            order: Shuffles the batches.
            proximal: (mu, centre): adds mu * (theta - centre) to every gradient (FedProx).
            base_model: A second model, (p,), that is not changed and whose outputs are added to this one's (FedCAM).

        Returns:
            The trained model, (p,) float32.

        Raises:
            ValueError: If a model or the centre has another shape.
        """
        require_model("the model", theta, len(self._theta))
        if proximal is not None:
            require_model("the centre of proximal", proximal[1], len(self._theta))
        set_processor_flags()
        device = devices.lend(self)
        offsets = None if base_model is None else self._outputs(base_model, data)
        centre: Any = None if proximal is None else torch.from_numpy(np.array(proximal[1], np.float32)).to(device)
        self._theta.copy_(torch.from_numpy(np.array(theta, np.float32)))
        velocity = torch.zeros_like(self._theta)
        whole = _batch(data, np.arange(len(data)), device) if len(data) <= KEPT else None
        for _ in range(self._epochs):
            for piece in pieces(order.permutation(len(data)), self._batch_size):
                rows = torch.from_numpy(piece).to(device)
                x, y = _batch(data, piece, device) if whole is None else (whole[0][rows], whole[1][rows])
                outputs = self._forward(x)
                if offsets is not None:
                    outputs = outputs + offsets[rows]
                self._gradient.zero_()
                each_loss(self._task, outputs, y).mean().backward()
                if self._weight_decay:
                    self._gradient.add_(self._theta, alpha=self._weight_decay)
                if proximal is not None:
                    self._gradient.add_(self._theta - centre, alpha=proximal[0])
                velocity.mul_(self._momentum).add_(self._gradient)
                self._theta.add_(velocity, alpha=-self._lr)
        return self._theta.cpu().numpy().copy()

    @torch.no_grad()
    def mean_losses(self, models: np.ndarray, data: Any, base_model: np.ndarray | None = None) -> np.ndarray:
        """Compute the mean loss of models on all records in evaluation mode.

        Args:
            models: Models, (M, p).
            data: The client's records, at least one.
            base_model: As for `train`.

        Returns:
            (M,) float64; inf where a loss is not finite.

        Raises:
            ValueError: If `models` or `base_model` has another shape, or there is no row, or no record.
        """
        require_models(models, len(self._theta))
        if len(data) == 0:
            raise ValueError("no records to compute a mean loss on")
        set_processor_flags()
        device = devices.lend(self)
        offsets = None if base_model is None else self._outputs(base_model, data)
        y = data.batch(np.arange(len(data)), len(data))[1].to(device)
        found = []
        for outputs in self._outputs_of(models, data):
            each = each_loss(self._task, outputs if offsets is None else outputs + offsets, y).double()
            found.append(float(each.mean()) if bool(each.isfinite().all()) else np.inf)
        return np.array(found)

    def _outputs_of(self, models: np.ndarray, data: Any) -> Iterable[torch.Tensor]:
        """Outputs of each of the (M, p) models, jointly where their layers allow it."""
        if self._layers is None:
            return (self._outputs(model, data) for model in models)
        thetas = torch.from_numpy(np.array(models, np.float32)).to(self._theta.device)
        return torch.cat([side_by_side(self._layers, thetas, x) for x in self._inputs(data)], 1)

    @torch.no_grad()
    def _outputs(self, theta: np.ndarray, data: Any) -> torch.Tensor:
        """Outputs of a model for all records in evaluation mode, in the data's order; ValueError for another shape."""
        require_model("base_model", theta, len(self._theta))
        self._theta.copy_(torch.from_numpy(np.array(theta, np.float32)))
        self._module.eval()
        try:
            return torch.cat([self._forward(x) for x in self._inputs(data)])
        finally:
            self._module.train()

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self._module(channels_last(x))
        return outputs

    def _inputs(self, data: Any) -> Iterator[torch.Tensor]:
        """The client's inputs in order, 256 at a time."""
        device = self._theta.device
        return (data.batch(piece, len(piece))[0].to(device) for piece in pieces(np.arange(len(data)), 256))


def _batch(data: Any, rows: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = data.batch(rows, len(rows))
    return x.to(device), y.to(device)


def pieces(rows: np.ndarray, size: int) -> list[np.ndarray]:
    """Cut `rows` into pieces of at most `size`."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _flattened(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the parameters and gradients of a module views of two flat vectors, which are returned."""
    parameters = list(module.parameters())
    theta = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
    gradient = torch.zeros_like(theta)
    at = 0
    for parameter in parameters:
        span = slice(at, at + parameter.numel())
        parameter.data = theta[span].view(parameter.shape)
        parameter.grad = gradient[span].view(parameter.shape)
        at = span.stop
    return theta, gradient
