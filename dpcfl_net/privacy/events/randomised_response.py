"""k-ary randomised response: a label is kept with probability e^E / (e^E + k - 1), else replaced by another one at random."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.accounting.composition import Losses, symmetric
from dpcfl_net.privacy.events.base import LossSpread, Mechanism, check_count, check_number

MOST = 500.0  # larger epsilons are counted as they are, with e^-E below 1e-217


@dataclass(frozen=True)
class RandomisedResponse(Mechanism):
    """Releases of one of `categories` labels by randomised response; a release without a label is uniform.

    Two labels are E, 0 or -E apart in log-probability. A uniform release is a mixture of the releases of all labels, so that its
    divergence from any of them is not larger: the bound holds under both adjacencies.

    Args:
        epsilon: E, at most 500.
        categories: Number of labels k, 2 or more.
        count: Number of releases.

    Raises:
        ValueError: If an argument is out of range.

    Source: Kairouz, Bonawitz, Ramage 2016 (k-ary randomised response).
    """

    epsilon: float
    categories: int
    count: int

    rank: ClassVar[int] = 4
    runs_field: ClassVar[str | None] = "count"
    maxima: ClassVar[dict[str, float]] = {"epsilon": MOST, "categories": 1e9, "count": 1e9}
    noisy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= check_number("epsilon", self.epsilon) <= MOST:
            raise ValueError(f"epsilon must lie between 0 and {MOST:g}, got {self.epsilon!r}")
        check_count("categories", self.categories)
        check_count("count", self.count)
        if self.categories < 2:
            raise ValueError(f"categories must be at least 2, got {self.categories!r}")

    @property
    def kept(self) -> float:
        """Probability that the label is released as it is."""
        return 1 / (1 + (self.categories - 1) * math.exp(-self.epsilon))

    @property
    def mean_loss(self) -> float:
        """Mean of the loss of one release."""
        return self.epsilon * self.kept * -math.expm1(-self.epsilon)

    @property
    def log_chi_square(self) -> float:
        """Logarithm of 1 + the chi-square divergence of one release, the mean of e^loss."""
        other = math.exp(-self.epsilon) * self.kept
        rest = (self.categories - 2) * other + other * math.exp(-self.epsilon)
        return self.epsilon + math.log(self.kept + rest * math.exp(-self.epsilon))

    @property
    def weight(self) -> float:
        """See `Event`."""
        return self.count * self._variance()

    def counted(self) -> Self | None:
        """See `Event`."""
        return self if self.count and self.epsilon else None

    def losses(self, adjacency: Adjacency, interval: float) -> list[tuple[tuple[Losses, ...], int]]:
        """See `Composable`. At y >= 0 only the label itself counts: its probability times 1 - e^(y - E)."""
        losses = interval * np.arange(math.ceil(self.epsilon / interval) + 1)
        profile = self.kept * np.maximum(-np.expm1(losses - self.epsilon), 0.0)
        return [((symmetric(profile, interval),), self.count)]

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """See `Composable`; at most min(a E^2 / 2, E) for each release (Bun, Steinke 2016)."""
        other = math.exp(-self.epsilon) * self.kept
        terms = [
            math.log(self.kept) + (orders - 1) * self.epsilon,
            np.full(len(orders), math.log(max((self.categories - 2) * other, 1e-300))),
            math.log(max(other, 1e-300)) - (orders - 1) * self.epsilon,
        ]
        # For a small E the rounding of the logarithms exceeds the divergence, and only the bound remains.
        rounding = 2e-15 * (1 + orders * self.epsilon + math.log(self.categories)) / (orders - 1)
        found = np.maximum(np.logaddexp.reduce(terms) / (orders - 1), 0.0) + rounding
        return np.asarray(self.count * np.minimum(found, np.minimum(orders * self.epsilon**2 / 2, self.epsilon)))

    def total_variation(self, adjacency: Adjacency) -> float:
        """See `Composable`."""
        return self.count * self.kept * -math.expm1(-self.epsilon)

    def spread(self, adjacency: Adjacency) -> LossSpread:
        """See `Composable`."""
        return LossSpread(self.count * self._variance(), self.count, 2 * self.epsilon)

    def _variance(self) -> float:
        """Variance of the loss of one release."""
        other = math.exp(-self.epsilon) * self.kept
        return self.epsilon**2 * (self.kept + other - (self.kept - other) ** 2)
