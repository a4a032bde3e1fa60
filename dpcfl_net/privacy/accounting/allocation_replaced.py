"""Privacy loss of one epoch with random allocation if a record is replaced by another one."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from dpcfl_net.privacy.accounting.allocation import NODES, ROUNDING, TAIL, UNSEEN
from dpcfl_net.privacy.accounting.composition import Losses, symmetric
from dpcfl_net.privacy.accounting.signed_sums import SignedSum, sum_of

_POINTS = 64  # points of a level, a power of two
_END = 2 * UNSEEN  # divergence at which the losses end
_STEP, _GROWTH = 0.06, 1.05  # first step between losses in their spread, and the largest ratio of steps
_FALL, _FAR_FALL, _FAR = 0.4, 2.0, 1e-10  # wanted fall of the divergence's logarithm in a step, and where it is below _FAR


@lru_cache(maxsize=8)
def replacement_losses(noise: float, batches: int, interval: float) -> Losses:
    """Compute the loss distribution of one epoch, which is the same in both directions.

    Let A_i = exp(x_i / z - 1 / (2 z^2)) and B_i = exp(-x_i / z - 1 / (2 z^2)) for independent standard normal x_i. For
    P = (1/t) sum_i N(e_i, z^2) and P' = (1/t) sum_i N(-e_i, z^2),

        H_a(P, P') = (1/t) E max(sum_i (A_i - a B_i), 0).

    The sum is rounded in convex order (`SignedSum`), and H_a is computed at a few a. Between them it is below its chords, as it is
    convex in a; the lower hull of the chords is still above it.

    Args:
        noise: Noise multiplier z, 0.2 to 1000.
        batches: Batches of an epoch, t.
        interval: Grid interval of the losses.

    Source: docs/explanation/privacy.md, random allocation.
    """
    nodes, found = _profile(noise, batches)
    places, values = _lower_hull(np.expm1(nodes), found)
    losses = interval * np.arange(max(math.floor(nodes[-1] / interval), 1) + 1)
    return symmetric(np.interp(np.expm1(losses), places, values), interval)


def _profile(noise: float, batches: int) -> tuple[np.ndarray, np.ndarray]:
    """Losses from 0 up, closer where most of the mass is and where the divergence falls fast, and divergences at them."""
    spread = math.sqrt(min(4 / noise**2, math.log1p(difference_spread(noise**-2) / batches)))
    last = 2 / noise * (1 / noise + TAIL)  # where a full release has a negligible divergence
    losses, found, step = [0.0], [divergence(noise, batches, 0.0)], _STEP * spread
    while losses[-1] < last and found[-1] > _END:
        losses.append(losses[-1] + step)
        found.append(divergence(noise, batches, losses[-1]))
        fall = math.log(found[-2] / found[-1])
        wanted = _FALL if found[-1] > _FAR else _FAR_FALL
        step *= min(_GROWTH, wanted / fall) if fall > 0 else _GROWTH
    return np.array(losses), np.array(found)


def divergence(noise: float, batches: int, loss: float) -> float:
    """Bound H_a(P, P') of one epoch from above, a = e^loss.

    Args:
        noise: z.
        batches: t.
        loss: Logarithm of a, at least 0.
    """
    ratio = math.exp(loss)
    total = sum_of(difference(noise, ratio, _POINTS), batches)
    values, masses = total.points()
    mean = float(masses @ np.maximum(values, 0.0)) + total.excess
    return mean / batches * (1 + ROUNDING * batches) + UNSEEN


def difference(noise: float, ratio: float, resolution: int) -> SignedSum:
    """Compute the distribution of A - a B, rounded in convex order.

    Args:
        noise: z.
        ratio: a, at least 1.
        resolution: Points of a level, a power of two.
    """
    from scipy.special import ndtr

    shift, m = 1 / noise, resolution
    end = TAIL + shift
    zero = float(_place_of(np.zeros(1), shift, ratio)[0])
    scale = float((ndtr(shift - zero) - ratio * ndtr(-shift - zero)) / ndtr(-zero))  # mean of the positive numbers
    exponent = math.floor(math.log2(scale / (16 * m)))
    top = float(np.max(np.abs(_difference_at(np.array([-end, end]), shift, ratio))))
    count = max(1, math.ceil(math.log2(top / m) - exponent))
    positive = np.concatenate([np.arange(1, 2 * m), *((m + np.arange(m)) * 2.0**k for k in range(1, count))]) * 2.0**exponent
    points = np.concatenate([-positive[::-1], [0.0], positive])
    x = _place_of(points, shift, ratio)
    masses = _rounded(x, shift, ratio)
    masses[0] += float(ndtr(x[0]))
    masses[-1] += float(ndtr(-x[-1]))
    # Above the last point A grows, and a B falls by less than its value there.
    fallen = ratio * math.exp(-shift * x[-1] - shift**2 / 2) * float(ndtr(-x[-1]))
    excess = float(ndtr(shift - x[-1])) + fallen
    return SignedSum(exponent, _levels(masses, m, count), 1, excess)


def _difference_at(x: np.ndarray, shift: float, ratio: float) -> np.ndarray:
    return np.asarray(np.exp(shift * x - shift**2 / 2) - ratio * np.exp(-shift * x - shift**2 / 2))


def _place_of(values: np.ndarray, shift: float, ratio: float) -> np.ndarray:
    """The inverse of `_difference_at`: a quadratic equation in exp(x / z), whose roots have opposite signs."""
    y = values * math.exp(shift**2 / 2)
    root = np.hypot(y, 2 * math.sqrt(ratio))
    return np.asarray(np.log(np.where(y > 0, (y + root) / 2, 2 * ratio / (root - np.minimum(y, 0)))) / shift)


def _rounded(x: np.ndarray, shift: float, ratio: float) -> np.ndarray:
    """Masses of the points whose places are x: what lies between two of them is divided so that its mean stays."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    wide = np.diff(x)[:, None]
    beyond = wide * (nodes + 1) / 2
    density = np.exp(-((x[:-1, None] + beyond) ** 2) / 2) * (wide * weights / 2 / math.sqrt(2 * math.pi))
    rise, fall = np.exp(shift * x[:-1, None]), ratio * np.exp(-shift * x[:-1, None])

    def gained(distance: np.ndarray) -> np.ndarray:
        return np.asarray(rise * np.expm1(shift * distance) - fall * np.expm1(-shift * distance))

    shares = np.minimum(gained(beyond) / gained(wide), 1.0)
    masses = np.zeros(len(x))
    masses[:-1] += (density * (1 - shares)).sum(axis=1)
    masses[1:] += (density * shares).sum(axis=1)
    return masses


def _levels(masses: np.ndarray, m: int, count: int) -> tuple[np.ndarray, ...]:
    """Arrange masses of increasing points as `SignedSum.levels`."""
    middle = len(masses) // 2
    levels = [masses[middle - 2 * m + 1 : middle + 2 * m]]
    for k in range(1, count):
        first = (k + 1) * m
        level = np.zeros(4 * m - 1)
        level[3 * m - 1 :] = masses[middle + first : middle + first + m]
        level[:m] = masses[middle - first - m + 1 : middle - first + 1]
        levels.append(level)
    return tuple(levels)


def difference_spread(inverse: float) -> float:
    """Return E (A - B)^2.

    Args:
        inverse: 1 / z^2.
    """
    return 4 * math.sinh(inverse)


def _lower_hull(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Corners of the largest convex function below the points; x increases."""
    kept: list[int] = []
    for i in range(len(x)):
        while len(kept) > 1:
            (a, b) = kept[-2:]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(i)
    return x[kept], y[kept]
