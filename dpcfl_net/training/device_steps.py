"""DP-SGD steps of a task on a GPU: model, sums and noise stay there, so that nothing of the model's size crosses to the host."""

from __future__ import annotations

import numpy as np
import torch

from dpcfl_net.privacy.device_noise import DeviceNoise
from dpcfl_net.training import devices


class DeviceSteps:
    """The steps of one task.

    Args:
        weights: The model on the device, (p,) float32; changed by each step.
        key: Secret of the task.
        deviation: Standard deviation of the noise.
        expected: Expected batch size.
        learning_rate: Step size.
        proximal: As for `Trainer.train`.
    """

    def __init__(
        self, weights: torch.Tensor, key: bytes, *, deviation: float, expected: float, learning_rate: float,
        proximal: tuple[float, np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        self._weights, self._deviation = weights, deviation
        self._noise = DeviceNoise(key, weights.device)
        # Tensors on the device: a GPU would multiply by the rounded inverse of a number.
        self._expected = torch.tensor(expected, dtype=torch.float32, device=weights.device)
        self._rate = torch.tensor(learning_rate, dtype=torch.float32, device=weights.device)
        self._pull = None
        if proximal is not None:
            centre = np.require(proximal[1], np.float32, ["C", "W"])
            self._pull = float(np.float32(proximal[0])), torch.from_numpy(centre).to(weights.device)

    @torch.no_grad()
    def descend(self, total: torch.Tensor) -> torch.Tensor:
        """Take one step.

        Args:
            total: Clipped sum on the device, (p,).

        Returns:
            The noisy sum, (p,) float32.
        """
        noisy = self._noise.add(total.double(), self._deviation).float()
        gradient = noisy / self._expected
        if self._pull is not None:
            gradient.add_((self._weights - self._pull[1]).mul_(self._pull[0]))
        self._weights.sub_(gradient.mul_(self._rate))
        return noisy


def noisy(value: np.ndarray, deviation: float, key: bytes) -> np.ndarray:
    """Add noise to a vector on this process's device and round to the grid.

    Args:
        value: The vector, (p,) float64.
        deviation: Standard deviation of the noise.
        key: Secret of the task.
    """
    device = devices.torch_device()
    return DeviceNoise(key, device).add(torch.from_numpy(value).to(device), deviation).cpu().numpy()
