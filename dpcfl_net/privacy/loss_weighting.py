"""Clients weighted by their losses: the exponential mechanism over clients, draws from it, and how mass gathers at the worst.

Source: Yan, Guo, Liu, Liu, "Client-Level Differential Privacy via Federated Distributionally Robust Optimization" (EM-FDRO).
What is said of a neighbourhood of the worst client is said of weights w_i = exp(-epsilon gap_i / (2 tau)), 1 for the worst
client itself: all of it is rational in them, so that fractions give exact answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TypeVar

import numpy as np

Weight = TypeVar("Weight", float, Fraction)


def probabilities(losses: Sequence[float], epsilon: float, tau: float) -> np.ndarray:
    """p_i proportional to exp(epsilon L_i / (2 tau)) (equation 1): (n,) float64 for n finite losses."""
    scores = epsilon / (2 * tau) * np.asarray(losses, np.float64)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def draw(losses: Sequence[float], epsilon: float, tau: float, count: int, rng: np.random.Generator) -> list[int]:
    """`count` different positions, in the order in which they come: each from `probabilities` among those that are left.

    The largest scores with Gumbel noise on them (Gumbel top-k; Kool, van Hoof, Welling 2019). ValueError for more positions
    than losses.
    """
    if not 0 <= count <= len(losses):
        raise ValueError(f"count must lie between 0 and {len(losses)}, got {count!r}")
    # random() lies in [0, 1): a half step up keeps both logarithms finite and never meets 1.
    uniform = rng.random(len(losses)) * (1 - 2.0**-53) + 2.0**-54
    keys = epsilon / (2 * tau) * np.asarray(losses, np.float64) - np.log(-np.log(uniform))
    return [int(k) for k in np.argsort(-keys, kind="stable")[:count]]


def top_mass(chances: np.ndarray, k: int) -> float:
    """The k largest probabilities together."""
    return float(np.sort(chances)[-k:].sum())


def near_mass(weights: Sequence[Weight], least: Weight) -> Weight:
    """Probability of the clients whose weight is at least `least` = exp(-epsilon delta / (2 tau)): P(N(delta)), equation 3."""
    zero = least - least
    return sum((w for w in weights if w >= least), zero) / sum(weights, zero)


def printed_bounds(weights: Sequence[Weight], least: Weight) -> tuple[Weight, Weight]:
    """Proposition 4.1's bounds on `near_mass`, as printed."""
    near, far = _count(weights, least)
    return near * least / (near + far * least), near / (near * least + far * min(weights))


def sharp_bounds(weights: Sequence[Weight], least: Weight) -> tuple[Weight, Weight]:
    """The best bounds on `near_mass` from the same four numbers: n, N(delta), delta and the largest gap.

    The worst client weighs 1, the others near it between `least` and 1, the rest between the smallest weight and `least`.
    The lower bound is at least N / n, which the printed one never exceeds; the upper one is at most 1, which the printed one
    often does exceed.
    """
    near, far = _count(weights, least)
    low = 1 + (near - 1) * least
    return low / (low + far * least), near / (near + far * min(weights))


def _count(weights: Sequence[Weight], least: Weight) -> tuple[int, int]:
    near = sum(1 for w in weights if w >= least)
    return near, len(weights) - near
