"""Privacy losses of Gaussian releases: plain ones in closed form, Poisson-sampled ones from the library's divergences."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.accounting.composition import Losses, symmetric, two_sided

_NARROW = 1e-3  # below this mean, the difference of two nearly equal probabilities is integrated instead
_MARGIN = 1e-8  # what rounding may take from a divergence, relative to it: added


def plain_epsilon(mean: float, delta: float) -> float:
    """Epsilon of one Gaussian release, never below the truth and at most 1e-6 of it above.

    Args:
        mean: Sensitivity over the noise's standard deviation; for n full-batch releases the root of the sum of their squares.
        delta: Target delta, in (0, 1).

    Source: Balle and Wang 2018, Theorem 8: delta = Phi(mean/2 - epsilon/mean) - e^epsilon Phi(-mean/2 - epsilon/mean).
    """
    if _plain_delta(mean, 0.0) <= delta:
        return 0.0
    # Phi(-x) <= e^(-x^2 / 2) / 2, so that this epsilon is enough.
    low, high = 0.0, mean**2 / 2 + mean * math.sqrt(2 * math.log(1 / delta))
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
    """Losses of one Gaussian release whose sensitivity over noise is `mean`."""
    from scipy.special import log_ndtr, ndtr

    # Ten standard deviations: what is above counts as infinite, and is less than 1e-23.
    losses = interval * np.arange(math.ceil((mean**2 / 2 + 10 * mean) / interval) + 1)
    below = np.exp(losses + log_ndtr(-mean / 2 - losses / mean))
    return symmetric(np.maximum(ndtr(mean / 2 - losses / mean) - below, 0.0), interval)


@lru_cache(maxsize=16)
def sampled_gaussian(noise: float, rate: float, adjacency: Adjacency, interval: float) -> tuple[Losses, ...]:
    """Losses of one Poisson-sampled Gaussian release of sensitivity 1, rate < 1.

    Returns:
        One distribution for each direction of the adjacency: "zero-out" takes a record out or puts one in; "replace-one"
        moves a record from +1 to -1, which is its own mirror image.
    """
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    def profile(kind: AdjacencyType) -> np.ndarray:
        pair = GaussianPrivacyLoss(noise, sampling_prob=rate, adjacency_type=kind)
        top = math.ceil(pair.connect_dots_bounds().epsilon_upper / interval)
        return np.asarray(pair.get_delta_for_epsilon(interval * np.arange(top + 1)))

    if adjacency == "replace-one":
        return (symmetric(profile(AdjacencyType.REPLACE), interval),)
    removed, added = profile(AdjacencyType.REMOVE), profile(AdjacencyType.ADD)
    return two_sided(removed, added, interval), two_sided(added, removed, interval)
