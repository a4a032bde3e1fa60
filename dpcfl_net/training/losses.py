"""What a model's outputs are worth: the loss of each record and whether it counts as right, by task."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Regression has no classes: a record counts as right when its prediction is this close to the target.
REGRESSION_TOLERANCE = 0.5


def each_loss(task: str, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(n,): cross-entropy in nats of logits (n, classes) with labels int64 (n,), or the squared error of outputs (n, 1)."""
    from torch.nn import functional

    if task == "regression":
        return (outputs[:, 0] - y) ** 2
    return functional.cross_entropy(outputs, y, reduction="none")


def each_right(task: str, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(n,) bool: the largest logit is the label's, the first of equals; or the prediction is within `REGRESSION_TOLERANCE`."""
    import torch

    if task == "regression":
        return (outputs[:, 0] - y).abs() <= REGRESSION_TOLERANCE
    # numpy's argmax takes the first of equals; torch promises no order.
    return torch.from_numpy(outputs.numpy().argmax(1)) == y
