"""Canaries: synthetic records or clients in known orthonormal directions, included by secret bits, for empirical privacy audits.

An excluded canary is an empty slot, like a record that zero-out adjacency replaces by nothing. A client is a canary by its update
(`vector`): excluded, it sends zeros, or under replace-one adjacency the opposite update. Sources: Steinke, Nasr, Jagielski
2023 (one-run audits); Nasr et al. 2023 (gradients that are chosen, not computed).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from dpcfl_net.privacy.clipping import GradientBlock, Rows
from dpcfl_net.privacy.randomness import derive, stream

GAIN = 4.0  # norm of a canary's gradient or update over the clip norm, so that clipping takes effect


class Canaries:
    """m orthonormal directions in p dimensions and each client's inclusion bits, derived from one secret.

    Direction u_i has random signs on the coordinates i, i + m, i + 2m, ... and norm 1; together they cover every coordinate.

    Args:
        count: Number of canaries m.
        parameters: Number of model parameters p.
        secret: Key of at least 16 bytes.

    Raises:
        ValueError: Unless 1 <= count <= parameters.
    """

    def __init__(self, count: int, parameters: int, secret: bytes) -> None:
        if not 1 <= count <= parameters:
            raise ValueError(f"canaries must be 1 to {parameters}, at most one per parameter, got {count!r}")
        self.count, self.parameters, self._secret = count, parameters, secret
        coordinates = np.arange(parameters)
        sizes = np.bincount(coordinates % count)
        signs = 2.0 * stream(secret, "canary signs").integers(0, 2, parameters) - 1
        self._units = signs / np.sqrt(sizes[coordinates % count])
        # A short block names its first coordinate twice, with the same value.
        places = np.arange(count)[:, None] + count * np.arange(-(-parameters // count))
        self._places = torch.from_numpy(np.where(places < parameters, places, places[:, :1]))

    def bits(self, client: int) -> np.ndarray:
        """Draw which of a client's canaries are included, each with probability 1/2; (m,) bool."""
        return stream(derive(self._secret, "canary bits", client), "bits").integers(0, 2, self.count).astype(bool)

    def project(self, vector: np.ndarray) -> np.ndarray:
        """Compute the inner products of a (p,) vector with each direction; (m,) float64."""
        width = self._places.shape[1]
        padded = np.zeros(width * self.count)
        np.multiply(vector, self._units, out=padded[: self.parameters])
        return padded.reshape(width, self.count).sum(0)

    def vector(self, number: int, norm: float) -> np.ndarray:
        """Return norm * u_i with i = number, from 0; (p,) float64."""
        return norm * np.where(np.arange(self.parameters) % self.count == number, self._units, 0.0)

    def gradients(self, numbers: torch.Tensor, norm: float, dtype: torch.dtype) -> torch.Tensor:
        """Build the gradient of each slot.

        Args:
            numbers: Canary numbers from 1, (slots,) int64; any other number, as 0, is an empty slot.
            norm: Norm of the gradients.
            dtype: Their dtype.

        Returns:
            norm * u_i with i = number - 1, zeros for empty slots, (slots, p).
        """
        values = torch.zeros((len(numbers), self.parameters), dtype=dtype)
        held = torch.nonzero((numbers >= 1) & (numbers <= self.count))  # the engine is also tried on random numbers
        places = self._places[numbers[held[:, 0]] - 1]
        values[held, places] = norm * torch.from_numpy(self._units).to(dtype)[places]
        return values


class CanaryRecords:
    """Records of an audited client: canary i at position i if it is included; all other positions are empty.

    A record is its canary's number (from 1; 0: empty) as the first entry of an otherwise empty input, with label 0.

    Args:
        records: Number of positions.
        present: Inclusion bits, (m,) bool.
        input_shape: Shape of one record.

    Raises:
        ValueError: If there are more canaries than positions.
    """

    def __init__(self, records: int, present: np.ndarray, input_shape: tuple[int, ...]) -> None:
        if len(present) > records:
            raise ValueError(f"{len(present)} canaries do not fit {records} records")
        self._numbers = np.zeros(records, dtype=np.int64)
        self._numbers[: len(present)] = np.where(present, np.arange(1, len(present) + 1), 0)
        self._shape = tuple(input_shape)

    def __len__(self) -> int:
        return len(self._numbers)

    def batch(self, rows: np.ndarray, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a batch.

        Args:
            rows: Positions, at most `size`.
            size: Number of slots.

        Returns:
            Inputs (size, ...) float32, exact up to 2^24 canaries, and labels (size,) int64, all 0.
        """
        x = torch.zeros((size, math.prod(self._shape)))
        x[: len(rows), 0] = torch.from_numpy(self._numbers[rows]).float()
        return x.view(size, *self._shape), torch.zeros(size, dtype=torch.int64)


class CanaryPath:
    """Gradient engine (`training.engine.GradientEngine`) that returns the canaries' gradients for any model, before clipping and noise."""

    def __init__(self, canaries: Canaries, norm: float) -> None:
        self._canaries, self._norm = canaries, norm

    def logits(self, theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return (n, 2) zeros, since a canary has no class."""
        return torch.zeros((len(x), 2), device=x.device)

    def gradients(self, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[GradientBlock]]:
        """Return logits, and the canaries' gradients in theta's precision as one block."""
        numbers = x.flatten(1)[:, 0].long()
        gradients = self._canaries.gradients(numbers.cpu(), self._norm, theta.dtype)
        return self.logits(theta, x), [Rows(gradients.to(theta.device), 0)]
