"""Interface of the engines that compute a model's logits and per-record gradients."""

from __future__ import annotations

from typing import Protocol

import torch

from dpcfl_net.privacy.clipping import GradientBlock


class Forward(Protocol):
    """A way to run a model."""

    def logits(self, theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return logits, (n, classes), of x, (n, ...), under theta, (p,)."""


class GradientEngine(Forward, Protocol):
    """A way to compute per-record gradients."""

    def gradients(self, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[GradientBlock]]:
        """Compute per-record gradients of the cross-entropy.

        Args:
            theta: Parameters, (p,); the dtype is the precision.
            x: Records, (n, ...) float32.
            y: Labels, (n,) int64.

        Returns:
            Logits, (n, classes), and blocks that together hold each record's gradient, (p,).
        """
