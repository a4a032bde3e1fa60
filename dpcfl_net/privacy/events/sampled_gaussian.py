"""Poisson-sampled Gaussian releases: DP-SGD, and with rate 1 every full-batch release."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np

from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.accounting.composition import Losses, symmetric, two_sided
from dpcfl_net.privacy.events import gaussian
from dpcfl_net.privacy.events.base import Composable, LossSpread, Mechanism, check_count, check_number

MIN_RATE = 1e-100  # smaller rates above 0 are counted as this


@dataclass(frozen=True)
class SampledGaussian(Mechanism):
    """Poisson-sampled Gaussian releases.

    Args:
        noise_multiplier: Standard deviation of the noise on each sum, over the clip norm. The accountant doubles the
            sensitivity under "replace-one".
        sampling_rate: Probability that a given record (or client) is in a sample, in [0, 1].
        steps: Number of releases.

    Raises:
        ValueError: If an argument is out of range.
    """

    noise_multiplier: float
    sampling_rate: float
    steps: int

    rank: ClassVar[int] = 0
    runs_field: ClassVar[str | None] = "steps"
    maxima: ClassVar[dict[str, float]] = {"noise_multiplier": gaussian.MOST_DOCUMENT_NOISE, "sampling_rate": 1, "steps": 1e9}
    doubles: ClassVar[bool] = True

    def __post_init__(self) -> None:
        gaussian.check_noise(self.noise_multiplier)
        if not 0 <= check_number("sampling_rate", self.sampling_rate) <= 1:
            raise ValueError(f"sampling_rate must lie in [0, 1], got {self.sampling_rate!r}")
        check_count("steps", self.steps)

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
        if not self.steps or not self.sampling_rate:
            return None
        noise, rate = min(self.noise_multiplier, gaussian.MAX_NOISE), max(self.sampling_rate, MIN_RATE)
        return replace(self, noise_multiplier=noise, sampling_rate=rate)

    @classmethod
    def composed(cls, events: Sequence[Any]) -> list[Composable]:
        """All full-batch releases as one, then the others, sorted."""
        # The maximum only keeps events without a guarantee from overflowing.
        precision = math.fsum(
            event.steps / max(event.noise_multiplier, gaussian.MIN_NOISE) ** 2 for event in events if event.sampling_rate == 1
        )
        sampled = sorted((event for event in events if event.sampling_rate < 1), key=astuple)
        return [gaussian.FullBatchGaussian(precision), *sampled] if precision else sampled

    def check(self, adjacency: Adjacency, accountant: str) -> None:
        """See `Composable`."""
        gaussian.check_sampled(adjacency, accountant)

    def losses(self, adjacency: Adjacency, interval: float) -> list[tuple[tuple[Losses, ...], int]]:
        """See `Composable`."""
        return [(sampled_losses(self.noise_multiplier, self.sampling_rate, adjacency, interval), self.steps)]

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """See `Composable`; under "zero-out"."""
        return self.steps * _renyi_of_one(self.noise_multiplier, self.sampling_rate, tuple(orders))

    def total_variation(self, adjacency: Adjacency) -> float:
        """See `Composable`."""
        return gaussian.gaussian_total_variation(self._noise(adjacency), self.sampling_rate, self.steps)

    def spread(self, adjacency: Adjacency) -> LossSpread:
        """See `Composable`."""
        symmetric = adjacency == "replace-one"
        return gaussian.gaussian_spread(self._noise(adjacency), self.sampling_rate, self.steps, symmetric)

    def _noise(self, adjacency: Adjacency) -> float:
        """Noise over the sensitivity under `adjacency`."""
        return self.noise_multiplier / (1 if adjacency == "zero-out" else 2)


@lru_cache(maxsize=16)
def sampled_losses(noise: float, rate: float, adjacency: Adjacency, interval: float) -> tuple[Losses, ...]:
    """Compute the loss distributions of one Poisson-sampled Gaussian release of sensitivity 1.

    Args:
        noise: Noise multiplier.
        rate: Sampling rate, below 1.
        adjacency: "zero-out" removes or adds a record; "replace-one" moves a record from +1 to -1, its own mirror image.
        interval: Grid interval of the losses.

    Returns:
        One distribution for each direction of the adjacency.
    """
    if adjacency == "replace-one":
        return (symmetric(divergences(noise, rate, "REPLACE", interval), interval),)
    removed, added = (divergences(noise, rate, side, interval) for side in ("REMOVE", "ADD"))
    return two_sided(removed, added, interval), two_sided(added, removed, interval)


def divergences(noise: float, rate: float, side: str, interval: float) -> np.ndarray:
    """Compute the hockey-stick divergence of one release at each multiple of an interval.

    Args:
        noise: Noise multiplier.
        rate: Sampling rate, below 1.
        side: Adjacency of the library: "REMOVE", "ADD" or "REPLACE".
        interval: Grid interval of the losses.

    Returns:
        Divergences at 0, `interval` and so on, up to where the library ends the distribution; 0 to 1.
    """
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    pair = GaussianPrivacyLoss(noise, sampling_prob=rate, adjacency_type=AdjacencyType[side])
    top = max(1, math.ceil(pair.connect_dots_bounds().epsilon_upper / interval))  # tiny rates: the library has no loss above 0
    epsilons = interval * np.arange(top + 1)
    at = _outputs(epsilons, noise, rate, side)
    return np.clip(pair.mu_upper_cdf(at) - np.exp(epsilons + pair.mu_lower_log_cdf(at)), 0.0, 1.0)


def _outputs(losses: np.ndarray, noise: float, rate: float, side: str) -> np.ndarray:
    """Compute the largest output whose privacy loss is at least each of the given ones; -inf where none is.

    The library has the same formulas, one loss after the other: with them an epsilon takes four times as long.

    Args:
        losses: Privacy losses, none negative.
        noise: As for `divergences`.
        rate: As for `divergences`.
        side: As for `divergences`.

    Returns:
        The outputs, of the shape of `losses`.

    Source: dp_accounting.pld.privacy_loss_mechanism, `inverse_privacy_loss` of `GaussianPrivacyLoss`.
    """
    with np.errstate(divide="ignore"):  # of log(0), at the loss 0 and at the end of "ADD"
        if side == "ADD":  # no output has a loss of -log(1 - rate) or more
            return 0.5 + noise**2 * np.log1p(np.maximum(np.expm1(-losses) / rate, -1.0))
        if side == "REMOVE":
            near = np.log1p(np.expm1(np.minimum(losses, 30.0)) / rate)
            far = losses - math.log(rate) + np.log1p((rate - 1) * np.exp(-losses))
            return -0.5 - noise**2 * np.where(losses < 30, near, far)
        log_alpha = 0.5 / noise**2 + math.log1p(-rate) - math.log(rate)
        log_sinh = losses / 2 + np.log(-np.expm1(-losses)) - math.log(2)
    exponent = log_alpha + log_sinh
    asinh = np.where(exponent < 300, np.arcsinh(np.exp(np.minimum(exponent, 300.0))), exponent + math.log(2))
    return noise**2 * (-asinh - losses / 2)


@lru_cache(maxsize=64)
def _renyi_of_one(noise: float, rate: float, orders: tuple[float, ...]) -> np.ndarray:
    return sampled_renyi(noise, rate, np.array(orders))


def sampled_renyi(noise_multiplier: float, rate: float, orders: np.ndarray) -> np.ndarray:
    """Compute Renyi divergences of one Poisson-sampled Gaussian release under add/remove adjacency; never too small.

    The library's series for a fractional order takes every term as positive, so it may be high, or not converge and give inf.
    (a - 1) times the divergence is convex in a and 0 at 1: the chord between the whole orders around a fractional one also
    bounds it.

    Args:
        noise_multiplier: Noise over the clip norm.
        rate: Sampling rate; 1 is the plain Gaussian mechanism, a / (2 z^2).
        orders: Renyi orders above 1.

    Returns:
        Divergences, (len(orders),) float64.

    Source: Mironov, Talwar, Zhang 2019.
    """
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    released = dp_accounting.GaussianDpEvent(noise_multiplier)
    if rate == 1:
        return np.asarray(RdpAccountant(orders).compose(released).rdp)
    whole = np.union1d(np.floor(orders), np.ceil(orders))
    needed = np.union1d(whole[whole > 1], orders)
    with _quiet():
        divergences = RdpAccountant(needed).compose(dp_accounting.PoissonSampledDpEvent(rate, released)).rdp
    moments = np.concatenate(([0.0], (needed - 1) * divergences))
    integer = np.concatenate(([True], needed % 1 == 0))
    points = np.concatenate(([1.0], needed))
    chords = np.interp(orders, points[integer], moments[integer]) / (orders - 1)
    bounded = np.minimum(divergences[np.searchsorted(needed, orders)], chords)
    return np.maximum(bounded, 0.0) + gaussian.RENYI_ROUNDING


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's warnings about orders that do not converge: chords bound these."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
