"""Privacy loss distributions on a grid: discretised pessimistically, composed by convolution, read as epsilon at a delta."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Pair = Literal["remove", "add", "replace"]

# One release's distribution ends where its divergence is below this: the mass beyond counts as infinite loss. Noise passes so
# many standard deviations less often still.
_NEGLIGIBLE, _DEVIATIONS = 1e-21, 9.6
_TAIL = 1e-15
# What one composition of n steps may lose to rounding, charged as infinite loss: a root of unity to the n-th power is off by
# about n times the machine's precision.
_ROUNDING = 1e-15


@dataclass(frozen=True)
class Losses:
    """A discrete privacy loss distribution.

    masses: (n,) probabilities of the losses step * (lowest + i); infinite: probability of an infinite loss.
    """

    step: float
    lowest: int
    masses: np.ndarray
    infinite: float

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon >= 0 whose hockey-stick divergence is at most delta; inf where no finite one is."""
        if self.infinite >= delta:
            return math.inf
        from scipy.signal import lfilter

        decay = math.exp(-self.step)
        # at[i] = sum over j >= i of p_j exp(l_i - l_j); with `above` it gives the divergence at every grid point.
        at = lfilter([1.0], [1.0, -decay], self.masses[::-1])[::-1]
        above = np.cumsum(self.masses[::-1])[::-1]
        divergence = self.infinite + above - at
        i = int(np.argmax(divergence <= delta))
        loss = self.step * (self.lowest + i)
        return max(0.0, loss + math.log((self.infinite + above[i] - delta) / at[i]))


def from_excess(step: float, lowest: int, excess: np.ndarray) -> Losses:
    """The pessimistic distribution with given hockey-stick divergences on the grid, straight lines in exp(epsilon) between.

    excess: (n,) divergence at step * (lowest + i), less max(0, 1 - exp(loss)), which is the divergence of a mechanism that
    reveals nothing (its mass 1 at loss 0 is added back). Taking the difference off first keeps tiny masses exact.
    Source: Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, "Connect the Dots", Algorithm 1.
    """
    padded = np.concatenate(([excess[0] * math.exp(-step)], excess, [excess[-1]]))
    rises = np.diff(padded)
    masses = (rises[1:] - math.exp(step) * rises[:-1]) / math.expm1(step)
    masses[-lowest] += 1.0
    return Losses(step, lowest, np.maximum(masses, 0.0), float(excess[-1]))


def gaussian(noise_multiplier: float, rate: float, pair: Pair, step: float) -> Losses:
    """One Poisson-sampled Gaussian release (rate 1: plain), sensitivity 1; "replace" moves a record from +1 to -1.

    Pairs, with N(m) of standard deviation noise_multiplier: remove (1-q)N(0)+qN(-1) against N(0); add N(0) against
    (1-q)N(0)+qN(1); replace (1-q)N(0)+qN(-1) against (1-q)N(0)+qN(1).
    """
    low, high = loss_range(noise_multiplier, rate, pair)
    lowest, highest = min(-1, math.floor(low / step)), max(1, math.ceil(high / step))
    losses = step * np.arange(lowest, highest + 1)
    below = losses[:-lowest]
    swapped: dict[Pair, Pair] = {"remove": "add", "add": "remove", "replace": "replace"}
    excess = np.concatenate(
        (
            np.exp(below) * _divergence(-below, noise_multiplier, rate, swapped[pair]),
            _divergence(losses[-lowest:], noise_multiplier, rate, pair),
        )
    )
    kept = np.append(np.flatnonzero(excess > _NEGLIGIBLE), -lowest)
    # One negligible point is kept at either end: a bounded loss ends abruptly, and what is cut above is infinite.
    first, last = max(int(kept.min()) - 1, 0), int(kept.max()) + 1
    return from_excess(step, lowest + first, excess[first : last + 1])


def loss_range(noise_multiplier: float, rate: float, pair: Pair) -> tuple[float, float]:
    """Lowest and highest loss outside which the mass is negligible."""
    low, high = -_DEVIATIONS * noise_multiplier - 1, _DEVIATIONS * noise_multiplier + 1
    return _loss(high, noise_multiplier, rate, pair), _loss(low, noise_multiplier, rate, pair)


def _loss(x: float, z: float, q: float, pair: Pair) -> float:
    outside = math.log1p(-q) if q < 1 else -math.inf
    toward = float(np.logaddexp(outside, math.log(q) + (-x - 0.5) / z**2))
    away = float(np.logaddexp(outside, math.log(q) + (x - 0.5) / z**2))
    return {"remove": toward, "add": -away, "replace": toward - away}[pair]


def _divergence(epsilon: np.ndarray, z: float, q: float, pair: Pair) -> np.ndarray:
    """Hockey-stick divergence at epsilon >= 0 (n,); every term is of order q, so that small rates lose no digits."""
    from scipy.special import ndtr

    if pair == "remove" or (q == 1 and pair == "add"):
        log_lower = epsilon + np.log(q * np.exp(-epsilon) - np.expm1(-epsilon))
        x = -0.5 - z**2 * (log_lower - math.log(q))
        divergence = q * ndtr((x + 1) / z) - _scaled_ndtr(log_lower, x / z)
    elif pair == "add":
        divergence = np.zeros_like(epsilon)
        inside = epsilon < -math.log1p(-q)
        inner = epsilon[inside]
        upper = q - (1 - q) * np.expm1(inner)
        # Both sides of the limit -log(1-q) round alike: a non-positive `upper` there means no divergence.
        x = 0.5 + z**2 * (np.log(np.maximum(upper, 1e-300)) - inner - math.log(q))
        divergence[inside] = upper * ndtr(x / z) - q * np.exp(inner) * ndtr((x - 1) / z)
    else:
        x = _replace_threshold(epsilon, z, q)
        unsampled = -(1 - q) * np.expm1(-epsilon) * _scaled_ndtr(epsilon, x / z)
        divergence = q * ndtr((x + 1) / z) - q * _scaled_ndtr(epsilon, (x - 1) / z) - unsampled
    return np.asarray(np.clip(divergence, 0.0, 1.0))


def _scaled_ndtr(log_scale: np.ndarray, x: np.ndarray) -> np.ndarray:
    from scipy.special import log_ndtr

    return np.asarray(np.exp(log_scale + log_ndtr(x)))


def _replace_threshold(epsilon: np.ndarray, z: float, q: float) -> np.ndarray:
    """Where the loss of the replace pair equals epsilon >= 0: z^2 (asinh(-a sinh(epsilon/2)) - epsilon/2), in logarithms."""
    if q == 1:
        return -0.5 * z**2 * epsilon
    with np.errstate(divide="ignore"):
        log_sinh = epsilon / 2 + np.log(-np.expm1(-epsilon)) - math.log(2)
    log_product = log_sinh + 0.5 / z**2 + math.log1p(-q) - math.log(q)
    asinh = np.logaddexp(log_product, 0.5 * np.logaddexp(0.0, 2 * log_product))
    return np.asarray(-(z**2) * (asinh + epsilon / 2))


def repeat(losses: Losses, count: int) -> Losses:
    """`count` >= 1 independent compositions of one distribution with itself."""
    if count == 1:
        return losses
    from dp_accounting.pld.common import self_convolve

    shift, masses = self_convolve(losses.masses, count, _TAIL)
    infinite = -math.expm1(count * math.log1p(-losses.infinite)) + _TAIL + count * _ROUNDING
    return Losses(losses.step, count * losses.lowest + shift, np.maximum(masses, 0.0), infinite)


def compose(parts: Sequence[Losses]) -> Losses:
    """The composition of distributions on one grid; at least one."""
    total = parts[0]
    for part in parts[1:]:
        total = _pair(total, part)
    return total


def _pair(left: Losses, right: Losses) -> Losses:
    from scipy.signal import fftconvolve

    masses = np.maximum(fftconvolve(left.masses, right.masses), 0.0)
    first = int(np.searchsorted(np.cumsum(masses), _TAIL))
    last = len(masses) - int(np.searchsorted(np.cumsum(masses[::-1]), _TAIL))
    kept = masses[first:last].copy()
    # Pessimistic: what is cut below moves up to the lowest loss kept, what is cut above becomes infinite.
    kept[0] += masses[:first].sum()
    infinite = left.infinite + right.infinite + float(masses[last:].sum()) + _ROUNDING
    return Losses(left.step, left.lowest + right.lowest + first, kept, infinite)
