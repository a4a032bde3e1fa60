"""Loss and correctness of each record, by task."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Largest error of a regression prediction that counts as right.
REGRESSION_TOLERANCE = 0.5


def each_loss(task: str, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compute the loss of each record.

    Args:
        task: "classification" or "regression".
        outputs: Logits (n, classes), or predictions (n, 1).
        y: Labels (n,) int64, or targets (n,).

    Returns:
        Cross-entropy in nats, or squared error, (n,).
    """
    from torch.nn import functional

    if task == "regression":
        return (outputs[:, 0] - y) ** 2
    return functional.cross_entropy(outputs, y, reduction="none")


def each_right(task: str, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Decide which records are right: the largest logit is the label's (ties: first index), or within `REGRESSION_TOLERANCE`.

    Args:
        task: "classification" or "regression".
        outputs: Logits (n, classes), or predictions (n, 1).
        y: Labels (n,) int64, or targets (n,).

    Returns:
        (n,) bool.
    """
    import torch

    if task == "regression":
        return (outputs[:, 0] - y).abs() <= REGRESSION_TOLERANCE
    # numpy's argmax takes the first of equals; torch promises no order.
    return torch.from_numpy(outputs.numpy().argmax(1)) == y


def at_least_single(logits: torch.Tensor) -> torch.Tensor:
    """Convert logits of a shorter format to float32: in bfloat16, 1 - p of a confident record would be lost."""
    import torch

    return logits.to(torch.promote_types(logits.dtype, torch.float32))
