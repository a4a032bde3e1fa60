"""Memory and noise of DP-SGD steps: a step of a large model is bound by memory, so nothing of its size is allocated or copied."""

from __future__ import annotations

import numpy as np
import torch

from dpcfl_net.privacy.mechanisms import gaussian_on_grid
from dpcfl_net.training import devices, memory

_CHUNK = 2**17  # coordinates that are noised and applied together: their float64 numbers stay in the processor's cache


class Sums:
    """Model and sums of clipped gradients, in the same memory for all steps of a task.

    Args:
        theta: The model, (p,); on the CPU `weights` are its memory, if it can be written.

    Attributes:
        weights: The model on the device, (p,).
        part: Memory for the sum of one physical batch, (p,), in the model's precision.
    """

    def __init__(self, theta: np.ndarray) -> None:
        self.weights = tensor(theta)
        self.part = torch.empty_like(self.weights)
        self._total: torch.Tensor | None = None
        self._batches = 0

    def begin(self, theta: np.ndarray) -> None:
        """Begin a step from theta, (p,)."""
        self._batches = 0
        if self.weights.device.type != "cpu":
            self.weights.copy_(torch.from_numpy(theta))

    def add(self) -> None:
        """Add `part` to the step's total, in float64."""
        if self._total is None:
            self._total = torch.empty_like(self.part, dtype=torch.float64)
        if self._batches == 0:
            self._total.copy_(self.part)
        else:
            memory.add(self._total, self.part)
        self._batches += 1

    def total(self) -> np.ndarray:
        """Return the total, (p,) float64; zero if nothing was added."""
        if self._total is None or self._batches == 0:
            return np.zeros(len(self.part))
        return self._total.cpu().numpy()


def descend(
    theta: np.ndarray, total: np.ndarray, *, deviation: float, noise: np.random.Generator, expected: float, learning_rate: float,
    proximal: tuple[float, np.ndarray] | None = None, noisy: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Take the step theta -= learning_rate * (total + noise) / expected in place.

    Args:
        theta: The model, (p,) float32; changed.
        total: Clipped sum, (p,).
        deviation: Standard deviation of the noise.
        noise: Source of the noise.
        expected: Expected batch size.
        learning_rate: Step size.
        proximal: As for `Trainer.train`.
        noisy: Memory for the noisy sum, (p,) float32.
    """
    for start in range(0, len(theta), _CHUNK):
        span = slice(start, start + _CHUNK)
        gradient = gaussian_on_grid(total[span], deviation, noise).astype(np.float32)
        if noisy is not None:
            noisy[span] = gradient
        gradient /= np.float32(expected)
        if proximal is not None:
            gradient += np.float32(proximal[0]) * (theta[span] - proximal[1][span])
        gradient *= np.float32(learning_rate)
        theta[span] -= gradient


def tensor(theta: np.ndarray) -> torch.Tensor:
    """Return a model as a tensor on the device; torch has no read-only tensors, so one received over the wire is copied."""
    return torch.from_numpy(np.require(theta, requirements=["C", "W"])).to(devices.torch_device())
