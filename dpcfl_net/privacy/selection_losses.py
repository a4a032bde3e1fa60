"""The tight privacy loss distribution of k adaptive bounded-range selections (exponential mechanisms), as one block."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

# The work grows with the square of a block, and large blocks lose next to nothing by being several.
LARGEST = 256
_NARROWEST, _WIDEST = 1e-4, 4.0


def selection_blocks(epsilon: float, sizes: Collection[int], interval: float) -> dict[int, PrivacyLossDistribution]:
    """For every size, the distribution of a block of so many selections of range `epsilon` > 0, on the grid of `interval`.

    The divergence of a block, whatever each selection is and however it depends on the earlier ones, is at most F_k:
    F_0(y) = (1 - e^y)^+, F_{j+1}(y) = max over 0 < t < E of p_t F_j(y - t) + (1 - p_t) F_j(y - t + E),
    p_t = e^t (1 - e^{t-E}) / (e^t - e^{t-E}) = (1 - e^{t-E}) / (1 - e^{-E}).
    Source: Dong, Durfee, Rogers 2020, "Optimal differential privacy composition for exponential mechanisms".
    Values between grid points are taken on the chord in e^y, above the convex F_j, and the maximum over t is exact for the
    chords: the result is never below the truth. Blocks larger than 256 are the caller's to split. A range above 4 or below
    1e-4 is charged as size * epsilon, which pure differential privacy allows: the recursion is costly there, or rough.
    """
    if not _NARROWEST <= epsilon <= _WIDEST:
        return {size: _pure(size * epsilon, interval) for size in sizes}
    points = max(64 if max(sizes) <= 64 else 32, math.ceil(epsilon / 0.04))
    profiles = _profiles(epsilon, tuple(sorted(sizes)), points)
    return {size: _distribution(profile, epsilon / points, interval) for size, profile in profiles.items()}


@lru_cache(maxsize=4)  # A calibration asks for the same profiles on several grids.
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


def _distribution(profile: np.ndarray, width: float, interval: float) -> PrivacyLossDistribution:
    """The profile, known at multiples of `width` >= 0, carried to multiples of `interval` along its chords; symmetric."""
    top = math.ceil(width * (len(profile) - 1) / interval)
    losses = interval * np.arange(top + 1)
    index = np.minimum((losses / width).astype(np.int64), len(profile) - 2)
    share = np.clip(np.expm1(losses - width * index) / math.expm1(width), 0.0, 1.0)
    return symmetric(profile[index] + share * (profile[index + 1] - profile[index]), interval)


def symmetric(profile: np.ndarray, interval: float) -> PrivacyLossDistribution:
    """The distribution of a mechanism whose divergence at `interval` * i is at most profile[i], i = 0, 1, ..., (n,).

    Below zero the divergence is F(-y) = 1 - e^-y + e^-y F(y), since the two inputs may be exchanged; between the points it is
    taken on the chord in e^y.
    """
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    top = len(profile) - 1
    losses = interval * np.arange(top + 1)
    below = np.exp(-losses) * profile - np.expm1(-losses)
    deltas = np.clip(np.concatenate((below[:0:-1], profile)), 0.0, 1.0)
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -top, top, deltas)
    return privacy_loss_distribution.PrivacyLossDistribution(pmf)


def _pure(loss: float, interval: float) -> PrivacyLossDistribution:
    """The distribution of a mechanism whose loss never passes `loss`, as bad as that allows: randomised response.

    Its divergence (e^loss - e^y)^+ / (e^loss + 1) is one chord in e^y between -loss and loss, so that four points tell all.
    """
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    inner, outer = math.floor(loss / interval), math.ceil(loss / interval)
    at = np.unique([-outer, -inner, inner, outer])
    losses = interval * at
    flat = -np.expm1(np.minimum(losses, 0.0))
    within = np.maximum(-np.expm1(losses - loss), 0.0) / (1 + math.exp(-loss))
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots(interval, at, np.maximum(flat, within))
    return privacy_loss_distribution.PrivacyLossDistribution(pmf)
