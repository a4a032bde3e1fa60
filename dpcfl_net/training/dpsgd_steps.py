"""Memory and noise of DP-SGD steps: a step of a large model is bound by memory, so nothing of its size is allocated or copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dpcfl_net.privacy.mechanisms import gaussian_on_grid
from dpcfl_net.privacy.normal_stream import NormalStream
from dpcfl_net.training import devices, memory
from dpcfl_net.training.device_steps import DeviceSteps

_CHUNK = 2**15  # coordinates that are noised and applied together: their float64 numbers stay in the processor's cache


class Sums:
    """Model and sums of clipped gradients, in the same memory for all steps of a task.

    Args:
        theta: The model, (p,); on the CPU `weights` are its memory, if it can be written. On a GPU `weights` are a copy, which
            stays there for all steps.

    Attributes:
        weights: The model on the device, (p,).
        part: Memory for the sum of one physical batch, (p,), in the model's precision.
    """

    def __init__(self, theta: np.ndarray) -> None:
        self.weights = tensor(theta)
        self.part = torch.empty_like(self.weights)
        self._total: torch.Tensor | None = None
        self._batches = 0

    def begin(self) -> None:
        """Begin a step."""
        self._batches = 0

    def add(self) -> None:
        """Add `part` to the step's total, in float64."""
        if self._total is None:
            self._total = torch.empty_like(self.part, dtype=torch.float64)
        if self._batches == 0:
            self._total.copy_(self.part)
        else:
            memory.add(self._total, self.part)
        self._batches += 1

    def total(self) -> torch.Tensor:
        """Return the total, (p,) float64; zero if nothing was added."""
        if self._total is None or self._batches == 0:
            return torch.zeros_like(self.part, dtype=torch.float64)
        return self._total

    def model(self, theta: np.ndarray) -> np.ndarray:
        """Return the model after all steps: theta, (p,), on the CPU, where steps change it."""
        return theta if self.weights.device.type == "cpu" else self.weights.cpu().numpy()


def stepper(
    theta: np.ndarray, sums: Sums, key: bytes, tap: Callable[[np.ndarray], None] | None = None, **step: Any
) -> Callable[[torch.Tensor], None]:
    """Return a function that takes a step, given the clipped sum: `descend` on the CPU, `DeviceSteps` on a GPU.

    Args:
        theta: The model, (p,) float32; changed on the CPU.
        sums: Its sums, whose `weights` are changed on a GPU.
        key: Secret of the task.
        tap: Called with each noisy sum, (p,) float32.
        **step: `deviation`, `expected`, `learning_rate` and `proximal` of `descend`.
    """
    on_device = None if devices.repeatable() else DeviceSteps(sums.weights, key, **step)
    noise = NormalStream(key, "noise")

    def take(total: torch.Tensor) -> None:
        if on_device is not None:
            released = on_device.descend(total)
            if tap is not None:
                tap(released.cpu().numpy())
            return
        noisy = None if tap is None else np.empty_like(theta)
        descend(theta, total.numpy(), noise=noise, noisy=noisy, **step)
        if tap is not None and noisy is not None:
            tap(noisy)

    return take


def descend(
    theta: np.ndarray, total: np.ndarray, *, deviation: float, noise: NormalStream, expected: float, learning_rate: float,
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
