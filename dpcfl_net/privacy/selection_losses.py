"""The tight privacy loss distribution of k adaptive bounded-range selections (exponential mechanisms), as one block."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import lru_cache

import numpy as np

from dpcfl_net.privacy.losses import Losses, compose, from_excess, repeat

_LARGEST = 256
_NARROWEST, _WIDEST = 1e-4, 4.0


def selection_blocks(epsilon: float, counts: Collection[int], step: float) -> dict[int, Losses]:
    """For every count, the distribution of a block of so many selections of range `epsilon` > 0, on the grid `step`.

    The divergence of a block, whatever each selection is and however it depends on the earlier ones, is at most F_k:
    F_0(y) = (1 - e^y)^+, F_{j+1}(y) = max over 0 < t < E of p_t F_j(y - t) + (1 - p_t) F_j(y - t + E),
    p_t = e^t (1 - e^{t-E}) / (e^t - e^{t-E}) = (1 - e^{t-E}) / (1 - e^{-E}).
    Source: Dong, Durfee, Rogers 2020, "Optimal differential privacy composition for exponential mechanisms".
    Values between grid points are taken on the chord in e^y, above the convex F_j, and the maximum over t is exact for the
    chords: the result is never below the truth. More than 256 selections are several blocks, composed: the work grows with
    the square of a block, and large blocks lose next to nothing by it. A range above 4 or below
    1e-4 is charged as count * epsilon, which pure differential privacy allows: the recursion is costly there, or rough.
    """
    if not _NARROWEST <= epsilon <= _WIDEST:
        return {count: _pure(count * epsilon, step) for count in counts}
    sizes = {count % _LARGEST for count in counts if count % _LARGEST} | {min(_LARGEST, max(counts))}
    points = max(64 if max(sizes) <= 64 else 32, math.ceil(epsilon / 0.04))
    profiles = _profiles(epsilon, tuple(sorted(sizes)), points)
    blocks = {size: _losses(profile, epsilon / points, step) for size, profile in profiles.items()}
    found = {}
    for count in counts:
        whole, rest = divmod(count, _LARGEST)
        found[count] = compose(([repeat(blocks[_LARGEST], whole)] if whole else []) + ([blocks[rest]] if rest else []))
    return found


@lru_cache(maxsize=4)  # A calibration asks for the same profiles on a dozen grids.
def _profiles(epsilon: float, counts: tuple[int, ...], points: int) -> dict[int, np.ndarray]:
    """F_k at epsilon * i / points for i = 0, 1, ... up to where it is negligible or zero, for every k in counts."""
    last = max(counts)
    # Hoeffding: a sum of k losses of range E and mean at most k E^2 / 8 passes this with probability below 1e-18.
    top = min(last, math.ceil(last * epsilon / 8 + 4.6 * math.sqrt(last)))
    profile = np.zeros(points * top + 1)
    found = {}
    for count in range(1, last + 1):
        profile = _one_more(profile, epsilon, points)
        if count in counts:
            found[count] = profile
    return found


def _one_more(profile: np.ndarray, epsilon: float, points: int) -> np.ndarray:
    """F_{j+1} from F_j, both (n,) at y = epsilon * i / points >= 0.

    Below zero F(y) = 1 - e^y + e^y F(-y), since exchanging the two inputs maps the class of selections to itself. With
    u = e^t and the chords A = F_j(y - t) = c + d/u, B = F_j(y - t + E) likewise, p A + (1 - p) B is alpha/u + beta + gamma u
    with gamma <= 0 on every interval of the grid: its maximum is at sqrt(alpha/gamma), or at the nearer end.
    """
    width, span, stretch = epsilon / points, math.exp(epsilon), math.expm1(epsilon)
    below = np.exp(-width * np.arange(points, 0, -1))
    reflected = below * profile[points:0:-1] - np.expm1(-width * np.arange(points, 0, -1))
    extended = np.concatenate((reflected, profile, np.full(points, profile[-1])))
    slope = np.diff(extended) / math.expm1(width)
    intercept = extended[:-1] - slope
    size, best = len(profile), np.zeros_like(profile)
    for i in range(points):
        near, far = slice(points - i - 1, points - i - 1 + size), slice(2 * points - i - 1, 2 * points - i - 1 + size)
        left, right = math.exp(width * i), math.exp(width * (i + 1))
        intercepts, slopes = intercept[near] - intercept[far], (slope[near] - slope[far]) * right
        alpha = slope[far] * right + span * slopes / stretch
        beta = intercept[far] + (span * intercepts - slopes) / stretch
        gamma = -intercepts / stretch
        ratio = np.divide(alpha, gamma, out=np.full(size, right**2), where=gamma < 0)
        u = np.clip(np.sqrt(np.maximum(ratio, 0.0)), left, right)
        np.maximum(best, alpha / u + beta + gamma * u, out=best)
    return best


def _losses(profile: np.ndarray, width: float, step: float) -> Losses:
    """The profile, known at multiples of `width`, carried to multiples of `step` along its chords."""
    top = math.ceil(width * (len(profile) - 1) / step)
    losses = step * np.arange(top + 1)
    index = np.minimum((losses / width).astype(np.int64), len(profile) - 2)
    share = np.clip(np.expm1(losses - width * index) / math.expm1(width), 0.0, 1.0)
    above = profile[index] + share * (profile[index + 1] - profile[index])
    return from_excess(step, -top, np.concatenate(((np.exp(-losses) * above)[:0:-1], above)))


def _pure(loss: float, step: float) -> Losses:
    """The distribution whose loss is always at most `loss`, and as bad as that allows."""
    losses = step * np.arange(-1, math.ceil(loss / step) + 1)
    within = np.minimum(np.maximum(losses, 0.0) - loss, 0.0)
    return from_excess(step, -1, -np.exp(np.minimum(losses, 0.0)) * np.expm1(within))
