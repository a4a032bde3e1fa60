"""Epochs of Gaussian releases with random allocation: each record is in one batch of each epoch, drawn uniformly."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.accounting.allocation import allocation_losses
from dpcfl_net.privacy.accounting.allocation_replaced import difference_spread, replacement_losses
from dpcfl_net.privacy.accounting.composition import Losses
from dpcfl_net.privacy.events import gaussian
from dpcfl_net.privacy.events.base import Event, LossSpread, Mechanism, check_count
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian

# Below the first, the amplification is not computed: an epoch counts as one full release. More noise than the second counts as it.
LEAST_AMPLIFIED: dict[Adjacency, float] = {"zero-out": 0.1, "replace-one": 0.2}
MOST_NOISE = 1e3
MOST_BATCHES = 1_000_000
_MOST_INVERSE = 26.0**2  # of the squared noise, whose exponential is still finite


@dataclass(frozen=True)
class AllocatedGaussian(Mechanism):
    """Epochs of Gaussian releases, one for each batch; each record is in one batch of each epoch, independently and uniformly.

    Args:
        noise_multiplier: Standard deviation of the noise on each sum, over the clip norm. The accountant covers the doubled
            sensitivity under "replace-one".
        batches: Batches of an epoch, 1 to 1,000,000; 1 is a full batch.
        epochs: Number of epochs, each with its own allocation.

    Raises:
        ValueError: If an argument is out of range.

    Source: Feldman, Shenfeld 2025, "Privacy amplification by random allocation"; Chua et al. 2024, "Balls-and-bins sampling for
    DP-SGD". Proofs: docs/explanation/privacy.md, random allocation.
    """

    noise_multiplier: float
    batches: int
    epochs: int

    rank: ClassVar[int] = 3
    runs_field: ClassVar[str | None] = "epochs"
    maxima: ClassVar[dict[str, float]] = {
        "noise_multiplier": gaussian.MOST_DOCUMENT_NOISE, "batches": MOST_BATCHES, "epochs": 1e9,
    }  # fmt: skip
    doubles: ClassVar[bool] = True

    def __post_init__(self) -> None:
        gaussian.check_noise(self.noise_multiplier)
        for name in ("batches", "epochs"):
            check_count(name, getattr(self, name))
        if not 1 <= self.batches <= MOST_BATCHES:
            raise ValueError(f"batches must lie between 1 and {MOST_BATCHES}, got {self.batches!r}")

    @property
    def unprotected(self) -> str:
        """See `Event`."""
        return gaussian.unprotected(self.noise_multiplier)

    @property
    def weight(self) -> float:
        """See `Event`."""
        return gaussian.gaussian_weight(self.noise_multiplier, 1 / self.batches, self.epochs * self.batches)

    def counted(self) -> Self | None:
        """See `Event`."""
        return replace(self, noise_multiplier=min(self.noise_multiplier, MOST_NOISE)) if self.epochs else None

    def search_start(self) -> Event:
        """Poisson samples of the same rate."""
        return SampledGaussian(self.noise_multiplier, 1 / self.batches, self.epochs * self.batches)

    def check(self, adjacency: Adjacency, accountant: str) -> None:
        """See `Composable`."""
        if accountant == "rdp":
            raise ValueError('accountant "rdp" has no bound for AllocatedGaussian: use accountant "pld"')

    def losses(self, adjacency: Adjacency, interval: float) -> list[tuple[tuple[Losses, ...], int]]:
        """See `Composable`."""
        return [(_losses_of_epoch(self.noise_multiplier, self.batches, adjacency, interval), self.epochs)]

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """See `Composable`; that of one full release for each epoch, which convexity gives. No accountant reads it (`check`)."""
        return self.epochs * orders / (2 * self.noise_multiplier**2)

    def total_variation(self, adjacency: Adjacency) -> float:
        """See `Composable`. Half the root of the mean squared difference of both densities also bounds it (Cauchy-Schwarz)."""
        noise = self._noise(adjacency)
        of_epoch = gaussian.gaussian_total_variation(noise, 1.0, 1)
        return self.epochs * min(of_epoch, math.sqrt(self._squared_difference(adjacency)) / 2)

    def spread(self, adjacency: Adjacency) -> LossSpread:
        """See `Composable`."""
        inverse, squared_difference = self._noise(adjacency) ** -2, self._squared_difference(adjacency)
        variance = self.epochs * (min(inverse, math.log1p(squared_difference)) if inverse < _MOST_INVERSE else inverse)
        extent = 2 * (0.5 * inverse + 10 * math.sqrt(inverse))
        return LossSpread(variance, self.epochs, extent, gaussian.MIN_INTERVAL)

    def _noise(self, adjacency: Adjacency) -> float:
        """Noise over the sensitivity."""
        return self.noise_multiplier if adjacency == "zero-out" else self.noise_multiplier / 2

    def _squared_difference(self, adjacency: Adjacency) -> float:
        """Mean squared difference of both densities of an epoch, over the density of the noise alone."""
        inverse = min(self.noise_multiplier**-2, _MOST_INVERSE)  # above it the result is above e^600, where no bound uses it
        return (math.expm1(inverse) if adjacency == "zero-out" else difference_spread(inverse)) / self.batches


def _losses_of_epoch(noise: float, batches: int, adjacency: Adjacency, interval: float) -> tuple[Losses, ...]:
    """Both directions, or one distribution if they are equal."""
    if batches == 1 or noise < LEAST_AMPLIFIED[adjacency]:
        return (gaussian.plain_gaussian((1 if adjacency == "zero-out" else 2) / noise, interval),)
    noise = min(noise, MOST_NOISE)
    if adjacency == "zero-out":
        return allocation_losses(noise, batches, interval)
    return (replacement_losses(noise, batches, interval),)
