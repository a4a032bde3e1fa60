"""Full-batch Gaussian releases, composed in closed form, and the bounds that all Gaussian mechanisms share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.accounting.composition import Losses, symmetric
from dpcfl_net.privacy.events.base import LossSpread, check_number

# Less noise than the first has no guarantee. More than the second is counted as the second.
MIN_NOISE, MAX_NOISE = 1e-3, 1e9
MOST_DOCUMENT_NOISE = 1e15
# The divergences of sampled Gaussians are rounded to 1e-16, which a smaller grid interval would show.
MIN_INTERVAL = 1e-7
# Upper bound on the rounding of the library's Renyi divergences, per release and order. At tiny rates the library's sums fall
# below zero, and its conversion then reports a perfect guarantee.
RENYI_ROUNDING = 2e-14

_NARROW = 1e-3  # below this mean, the difference of two nearly equal probabilities is integrated instead
_MARGIN = 1e-8  # relative bound on the rounding of a divergence, which is added to it


def check_noise(noise_multiplier: float) -> None:
    """ValueError if a noise multiplier is not positive and finite."""
    if not 0 < check_number("noise_multiplier", noise_multiplier) < math.inf:
        raise ValueError(f"noise_multiplier must be positive and finite, got {noise_multiplier!r}")


def unprotected(noise_multiplier: float) -> str:
    """Say that the noise is too small for a guarantee; empty if it is not (see `Event.unprotected`)."""
    return f"a noise multiplier below {MIN_NOISE:g} protects nothing" if noise_multiplier < MIN_NOISE else ""


def gaussian_weight(noise: float, rate: float, steps: int) -> float:
    """mu^2 of the Gaussian-DP limit of `steps` sampled Gaussian releases."""
    inverse = noise**-2
    if rate == 1:
        return steps * inverse
    return steps * rate**2 * (math.expm1(inverse) if inverse < 700 else math.inf)


def gaussian_total_variation(noise: float, rate: float, steps: int) -> float:
    """Upper bound on the total variation distance of `steps` sampled Gaussian releases of sensitivity 1."""
    return steps * rate * math.erf(1 / (2**1.5 * noise))


def gaussian_spread(noise: float, rate: float, steps: int, symmetric: bool) -> LossSpread:
    """Size of the losses of `steps` sampled Gaussian releases of sensitivity 1; `symmetric`: equal in both directions."""
    inverse = noise**-2
    variance = steps * min(rate**2 * math.expm1(min(inverse, 700.0)), rate * (inverse + inverse**2))
    highest = _highest_loss(noise, rate)
    extent = highest + (highest if symmetric else -math.log1p(-rate))
    return LossSpread(variance, steps, extent, MIN_INTERVAL)


def _highest_loss(noise: float, rate: float) -> float:
    """Loss of one release of sensitivity 1 at ten standard deviations of the noise."""
    return amplified(0.5 / noise**2 + 10 / noise, rate)


def amplified(loss: float, rate: float) -> float:
    """Compute log(1 + q (e^loss - 1)), the loss after sampling, without overflow.

    Args:
        loss: Loss of a release with the member in the sample, >= 0.
        rate: Sampling rate q.
    """
    return math.log1p(rate * math.expm1(loss)) if loss < 1 else loss + math.log(rate + (1 - rate) * math.exp(-loss))


@dataclass(frozen=True)
class FullBatchGaussian:
    """All full-batch Gaussian releases of a composition; together they equal one Gaussian release.

    Attributes:
        precision: Sum of 1 / z^2 over the releases.
    """

    precision: float
    doubles: ClassVar[bool] = True

    def floor(self) -> None:
        """See `Composable`: nothing."""

    def check(self, adjacency: Adjacency, accountant: str) -> None:
        """See `Composable`."""
        check_sampled(adjacency, accountant)

    def losses(self, adjacency: Adjacency, interval: float) -> list[tuple[tuple[Losses, ...], int]]:
        """See `Composable`."""
        return [((plain_gaussian(self._mean(adjacency), interval),), 1)]

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """See `Composable`."""
        return self.precision * orders / 2

    def total_variation(self, adjacency: Adjacency) -> float:
        """See `Composable`."""
        return gaussian_total_variation(1 / self._mean(adjacency), 1.0, 1)

    def spread(self, adjacency: Adjacency) -> LossSpread:
        """See `Composable`."""
        return gaussian_spread(1 / self._mean(adjacency), 1.0, 1, symmetric=True)

    def closed_form(self, delta: float, adjacency: Adjacency) -> float | None:
        """See `Composable`."""
        return plain_epsilon(self._mean(adjacency), delta)

    def _mean(self, adjacency: Adjacency) -> float:
        """Sensitivity over noise of all releases together."""
        return (1 if adjacency == "zero-out" else 2) * math.sqrt(self.precision)


def check_sampled(adjacency: Adjacency, accountant: str) -> None:
    """ValueError where the Renyi accountant has no bound for a SampledGaussian; that of a full batch would be looser than "pld"."""
    if (adjacency, accountant) == ("replace-one", "rdp"):
        why = "its moments are those of a member that is added or removed"
        raise ValueError(
            f'accountant "rdp" has no bound for SampledGaussian under "replace-one", since {why}: use accountant "pld", which has both'
        )


def plain_epsilon(mean: float, delta: float) -> float:
    """Compute epsilon of one Gaussian release: never below the exact value and at most 1e-6 of it above.

    Args:
        mean: Sensitivity over the noise's standard deviation; for n full-batch releases the root of the sum of their squares.
        delta: Target delta, in (0, 1).

    Returns:
        Epsilon, >= 0.

    Source: Balle and Wang 2018, Theorem 8: delta = Phi(mean/2 - epsilon/mean) - e^epsilon Phi(-mean/2 - epsilon/mean).
    """
    if _plain_delta(mean, 0.0) <= delta:
        return 0.0
    # Phi(-x) <= e^(-x^2 / 2) / 2, so that this epsilon is enough.
    low, high = 0.0, mean**2 / 2 + mean * math.sqrt(-2 * math.log(delta))
    while (middle := (low + high) / 2) > low and high - low > 1e-12 * high:
        low, high = (middle, high) if _plain_delta(mean, middle) > delta else (low, middle)
    return high * (1 + 1e-12)


def _plain_delta(mean: float, epsilon: float) -> float:
    """Divergence of N(mean, 1) and N(0, 1) at `epsilon`, rounded up.

    With x = epsilon/mean -+ mean/2 and Mills' ratio m(x), it is phi(x1) (m(x1) - m(x2)). For a small mean the difference is
    the integral of 1 - x m(x), which is convex (m is completely monotone), so that the trapezoid is above it.
    """
    from scipy.special import erfcx, log_ndtr

    near, far = epsilon / mean - mean / 2, epsilon / mean + mean / 2
    if mean < _NARROW:
        slopes = [1 - x * math.sqrt(math.pi / 2) * float(erfcx(x / math.sqrt(2))) for x in (near, far)]
        found = math.exp(-(near**2) / 2) / math.sqrt(2 * math.pi) * mean * sum(slopes) / 2
    else:
        above = float(log_ndtr(-near))
        found = -math.exp(above) * math.expm1(min(epsilon + float(log_ndtr(-far)) - above, 0.0))
    return found * (1 + _MARGIN)


@lru_cache(maxsize=8)
def plain_gaussian(mean: float, interval: float) -> Losses:
    """Compute the loss distribution of one Gaussian release whose sensitivity over noise is `mean`."""
    # Ten standard deviations: the mass above counts as infinite loss and is less than 1e-23.
    losses = interval * np.arange(math.ceil((mean**2 / 2 + 10 * mean) / interval) + 1)
    return symmetric(plain_divergence(mean, losses), interval)


def plain_divergence(mean: float, losses: np.ndarray) -> np.ndarray:
    """Compute the hockey-stick divergence of N(mean, 1) and N(0, 1) at e^loss, for losses of any sign.

    Args:
        mean: Sensitivity over the noise's standard deviation.
        losses: Losses, (n,).

    Returns:
        Divergences, (n,) float64.

    Source: Balle and Wang 2018, Theorem 8.
    """
    from scipy.special import log_ndtr, ndtr

    below = np.exp(losses + log_ndtr(-mean / 2 - losses / mean))
    return np.maximum(ndtr(mean / 2 - losses / mean) - below, 0.0)
