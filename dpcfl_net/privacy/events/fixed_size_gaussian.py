"""Gaussian releases over samples of fixed size, drawn without replacement; replace-one adjacency only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Self

import numpy as np

from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.accounting.composition import Losses, symmetric
from dpcfl_net.privacy.events import gaussian
from dpcfl_net.privacy.events.base import Event, LossSpread, Mechanism, check_count
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian, divergences


@dataclass(frozen=True)
class FixedSizeGaussian(Mechanism):
    """Gaussian releases, each over a fresh sample of exactly `sample_size` of `population`, drawn without replacement.

    Args:
        noise_multiplier: Standard deviation of the noise over the L2 sensitivity of one whole release when a member of the
            sample is replaced by another (2 * clip for a sum of clipped vectors). The accountant does not double it.
        sample_size: Members of each sample, 1 to `population`.
        population: Number of members.
        steps: Number of releases.

    Raises:
        ValueError: If an argument is out of range.
    """

    noise_multiplier: float
    sample_size: int
    population: int
    steps: int

    rank: ClassVar[int] = 1
    runs_field: ClassVar[str | None] = "steps"
    maxima: ClassVar[dict[str, float]] = {
        "noise_multiplier": gaussian.MOST_DOCUMENT_NOISE, "sample_size": 1e9, "population": 1e9, "steps": 1e9,
    }  # fmt: skip

    def __post_init__(self) -> None:
        gaussian.check_noise(self.noise_multiplier)
        for name in ("sample_size", "population", "steps"):
            check_count(name, getattr(self, name))
        if not 1 <= self.sample_size <= self.population:
            raise ValueError(f"sample_size must lie between 1 and population {self.population}, got {self.sample_size!r}")

    @property
    def sampling_rate(self) -> float:
        """Probability that a given member is in a sample."""
        return self.sample_size / self.population

    @property
    def unprotected(self) -> str:
        """See `Event`."""
        return gaussian.unprotected(self.noise_multiplier)

    @property
    def weight(self) -> float:
        """See `Event`."""
        return gaussian.gaussian_weight(self.noise_multiplier, self.sampling_rate, self.steps)

    def counted(self) -> Self | None:
        """See `Event`."""
        return replace(self, noise_multiplier=min(self.noise_multiplier, gaussian.MAX_NOISE)) if self.steps else None

    def search_start(self) -> Event:
        """A Poisson sample of the same rate."""
        return SampledGaussian(self.noise_multiplier, self.sampling_rate, self.steps)

    def check(self, adjacency: Adjacency, accountant: str) -> None:
        """See `Composable`."""
        check_replace_one("FixedSizeGaussian", adjacency)

    def losses(self, adjacency: Adjacency, interval: float) -> list[tuple[tuple[Losses, ...], int]]:
        """See `Composable`."""
        return [((fixed_size_losses(self.noise_multiplier, self.sampling_rate, interval),), self.steps)]

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """See `Composable`."""
        return self.steps * _renyi_of_one(self.noise_multiplier, self.sample_size, self.population, tuple(orders))

    def total_variation(self, adjacency: Adjacency) -> float:
        """See `Composable`."""
        return gaussian.gaussian_total_variation(self.noise_multiplier, self.sampling_rate, self.steps)

    def spread(self, adjacency: Adjacency) -> LossSpread:
        """See `Composable`."""
        return gaussian.gaussian_spread(self.noise_multiplier, self.sampling_rate, self.steps, symmetric=True)


def check_replace_one(event: str, adjacency: Adjacency) -> None:
    """ValueError for another adjacency than that of samples of fixed size.

    Args:
        event: Name of the event.
        adjacency: The adjacency that epsilon is asked for.
    """
    if adjacency != "replace-one":
        raise ValueError(
            f'{event} holds for adjacency "replace-one" only, got {adjacency!r}: in a sample of fixed size a member that is left out '
            "makes room for another"
        )


@lru_cache(maxsize=8)
def fixed_size_losses(noise: float, rate: float, interval: float) -> Losses:
    """Compute the loss distribution of one release of replace-one sensitivity 1 over m of n members, rate = m / n.

    The profile is the pointwise maximum of the divergences of the Poisson-sampled pair in both directions. With
    P = N(1, z^2), Q = N(0, z^2): that of ((1-q) Q + q P, Q) where a = e^y >= 1, and of its mirror image (P, (1-q) P + q Q) below.

    Validity: let R and R' be the release when the sample has the member, N when it has not. A sample without the member is a
    sample with it in which another member takes its place, so any two of the three are no farther apart than P and Q. For
    a >= 1, with a' = 1 + (a - 1) / q and b = a / a', advanced joint convexity (Balle, Barthe, Gaboardi 2018, Theorem 2) gives
    H_a((1-q) N + q R, (1-q) N + q R') = q H_a'(R, (1-b) N + b R') <= q H_a'(P, Q) = H_a((1-q) Q + q P, Q);
    below 1 exchange the two inputs. Zhu, Dong, Wang 2022 state this amplification as Theorem 11.

    Composition: the maximum is convex in a, hence the profile of one pair of distributions, and that pair dominates a release
    for every earlier outcome; k releases are then dominated by k such pairs (their Theorem 10). Composing each direction
    separately and taking the worse at the end is not covered by this, and fails in general (Lebeda, Regehr, Kamath,
    Steinke 2024).

    Args:
        noise: Noise multiplier over the replace-one sensitivity.
        rate: Sample size over population.
        interval: Grid interval of the losses.

    Returns:
        One symmetric distribution.
    """
    return symmetric(divergences(noise, rate, "REMOVE", interval), interval)


@lru_cache(maxsize=64)
def _renyi_of_one(noise: float, size: int, population: int, orders: tuple[float, ...]) -> np.ndarray:
    return fixed_size_renyi(noise, size, population, np.array(orders))


def fixed_size_renyi(noise_multiplier: float, size: int, population: int, orders: np.ndarray) -> np.ndarray:
    """Compute Renyi divergences of one release over `size` of `population` without replacement, replace-one adjacency.

    Args:
        noise_multiplier: Noise over the replace-one sensitivity.
        size: Sample size.
        population: Number of members.
        orders: Renyi orders above 1.

    Returns:
        Upper bounds, not tight, (len(orders),) float64.

    Source: Wang, Balle, Kasiviswanathan 2019, Theorem 27, as the library implements it.
    """
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    released = dp_accounting.GaussianDpEvent(noise_multiplier)
    sampled = dp_accounting.SampledWithoutReplacementDpEvent(population, size, released)
    accountant = RdpAccountant(orders, dp_accounting.NeighboringRelation.REPLACE_ONE)
    return np.asarray(accountant.compose(sampled).rdp) + gaussian.RENYI_ROUNDING
