"""Quantity skew: training records of clients of unequal size."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.frozen import FrozenModel


class SizeLaw(FrozenModel):
    """Law of the numbers of training records; `train_per_client` is their mean.

    A client's share of the records of its cluster is proportional to exp(spread * N(0, 1)) under "lognormal", to
    rank ** -spread, in random order, under "zipf", and drawn from Dirichlet(alpha) with all alphas equal under "dirichlet"
    (quantity skew of Li et al. 2022, NIID-Bench).
    """

    added = ("spread", "alpha")  # so that a law holds nothing of another one
    law: Literal["lognormal", "zipf", "dirichlet"] = Field(description="lognormal, zipf or dirichlet")
    spread: float | None = Field(
        None, ge=0, le=10, allow_inf_nan=False,
        description="lognormal: standard deviation of the logarithm; zipf: exponent; 0 makes equal sizes",
    )  # fmt: skip
    alpha: float | None = Field(
        None, ge=1e-3, le=1e6, allow_inf_nan=False, description="dirichlet: concentration; small values give uneven sizes"
    )
    smallest: int = Field(default=1, ge=1, le=1_000_000, description="fewest training records of a client")

    @model_validator(mode="after")
    def _complete(self) -> SizeLaw:
        needed, other = ("alpha", "spread") if self.law == "dirichlet" else ("spread", "alpha")
        given, extra = getattr(self, needed), getattr(self, other)
        if given is None or extra is not None:
            raise ValueError(f"law {self.law!r} needs {needed}, got {given}; {other} must be null, got {extra}")
        return self


def drawn_sizes(law: SizeLaw, clients: int, total: int, rng: np.random.Generator) -> list[int]:
    """Draw the training records of each client of a cluster.

    Args:
        law: The law.
        clients: Number of clients.
        total: Records of all clients together, at least `clients * law.smallest`.
        rng: Source of random numbers.

    Returns:
        Sizes with sum `total`, each at least `law.smallest`.
    """
    weights = _weights(law, clients, rng)
    spare = total - clients * law.smallest
    exact = spare * weights / weights.sum()
    sizes = np.floor(exact).astype(np.int64)
    left_over = np.argsort(sizes - exact, kind="stable")[: spare - int(sizes.sum())]  # largest fractions first
    sizes[left_over] += 1
    return [int(size) + law.smallest for size in sizes]


def _weights(law: SizeLaw, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Weights that the sizes are proportional to, (clients,)."""
    if law.alpha is not None:
        return rng.dirichlet(np.full(clients, law.alpha))
    spread = 0.0 if law.spread is None else law.spread
    if law.law == "lognormal":
        weights: np.ndarray = np.exp(spread * rng.standard_normal(clients))
        return weights
    return rng.permutation(np.arange(1.0, clients + 1) ** -spread)


def held_back(validation: float, train: int) -> int:
    """Return how many training records of a client are set aside for validation.

    Args:
        validation: Fraction, `data.validation`.
        train: Training records of the client.

    Raises:
        ConfigError: If the fraction takes nothing or all.
    """
    held = round(validation * train)
    if validation and not 1 <= held < train:
        raise ConfigError(f"data.validation is {validation}: it takes {held} of a client's {train} training records")
    return held
