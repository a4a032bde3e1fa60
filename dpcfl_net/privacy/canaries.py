"""Canaries: made-up records with known orthonormal gradients, in or out by a secret bit, to measure what DP-SGD lets through.

A canary that is out is an empty slot, as a record is that zero-out adjacency replaces by nothing. (One-run audits of this
kind: Steinke, Nasr, Jagielski 2023; Nasr et al. 2023 for gradients that are chosen and not computed.)
"""

from __future__ import annotations

import math

import numpy as np
import torch

from dpcfl_net.privacy.clipping import GradientBlock, Rows
from dpcfl_net.privacy.randomness import derive, stream

GAIN = 4.0  # a canary's gradient norm over the clip norm, so that clipping has to act


class Canaries:
    """m directions u_i in p dimensions, and for each client which of its canaries are in: all out of one secret.

    u_i is random signs on the coordinates i, i + m, i + 2m, ... of norm 1: orthonormal, and together they see every coordinate.
    Raises ValueError unless 1 <= count <= parameters.
    """

    def __init__(self, count: int, parameters: int, secret: bytes) -> None:
        if not 1 <= count <= parameters:
            raise ValueError(f"canaries must be 1 to {parameters}, one for a parameter at most, got {count!r}")
        self.count, self.parameters, self._secret = count, parameters, secret
        coordinates = np.arange(parameters)
        sizes = np.bincount(coordinates % count)
        signs = 2.0 * stream(secret, "canary signs").integers(0, 2, parameters) - 1
        self._units = signs / np.sqrt(sizes[coordinates % count])
        # A short block names its first coordinate twice, with the same value.
        places = np.arange(count)[:, None] + count * np.arange(-(-parameters // count))
        self._places = torch.from_numpy(np.where(places < parameters, places, places[:, :1]))

    def bits(self, client: int) -> np.ndarray:
        """(m,) bool: which of the client's canaries are in, each by a fair coin of its own."""
        return stream(derive(self._secret, "canary bits", client), "bits").integers(0, 2, self.count).astype(bool)

    def project(self, vector: np.ndarray) -> np.ndarray:
        """(m,) float64: the inner products of a (p,) vector with each direction."""
        width = self._places.shape[1]
        padded = np.zeros(width * self.count)
        np.multiply(vector, self._units, out=padded[: self.parameters])
        return padded.reshape(width, self.count).sum(0)

    def gradients(self, numbers: torch.Tensor, norm: float, dtype: torch.dtype) -> torch.Tensor:
        """(slots, p): for each slot norm * u_i, i = number - 1, and zeros where the number is 0."""
        values = torch.zeros((len(numbers), self.parameters), dtype=dtype)
        held = torch.nonzero(numbers)
        places = self._places[numbers[held[:, 0]] - 1]
        values[held, places] = norm * torch.from_numpy(self._units).to(dtype)[places]
        return values


class CanaryRecords:
    """The records of an audited client: canary i, if it is in, at position i; every other position is empty.

    A record is its canary's number (from 1; 0: empty) as the first entry of an otherwise empty input, with label 0.
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
        """x (size, ...) float32, exact up to 2^24 canaries, and labels (size,) int64, all 0."""
        x = torch.zeros((size, math.prod(self._shape)))
        x[: len(rows), 0] = torch.from_numpy(self._numbers[rows]).float()
        return x.view(size, *self._shape), torch.zeros(size, dtype=torch.int64)


class CanaryPath:
    """The engine (`dpsgd.Engine`) whose gradients are the canaries' own, whatever the model; clipping and the rest come after."""

    def __init__(self, canaries: Canaries, norm: float) -> None:
        self._canaries, self._norm = canaries, norm

    def logits(self, theta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(n, 2) zeros: a canary has no class."""
        return torch.zeros((len(x), 2), device=x.device)

    def gradients(self, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, list[GradientBlock]]:
        """Logits, and the canaries' gradients in theta's precision as one part."""
        numbers = x.flatten(1)[:, 0].long()
        gradients = self._canaries.gradients(numbers.cpu(), self._norm, theta.dtype)
        return self.logits(theta, x), [Rows(gradients.to(theta.device), 0)]
