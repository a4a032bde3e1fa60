"""Loss weighting of clients: exponential mechanism over clients, draws from it, and bounds on the mass near the worst client.

Source: Yan, Guo, Liu, Liu, "Client-Level Differential Privacy via Federated Distributionally Robust Optimization" (EM-FDRO).
Bounds are in terms of weights w_i = exp(-epsilon gap_i / (2 tau)), 1 for the worst client. They are rational in the weights, so
that fractions give exact answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TypeVar

import numpy as np

from dpcfl_net.privacy.mechanisms import gumbel

Weight = TypeVar("Weight", float, Fraction)


def probabilities(losses: Sequence[float], epsilon: float, tau: float) -> np.ndarray:
    """Compute selection probabilities p_i proportional to exp(epsilon L_i / (2 tau)).

    Args:
        losses: Finite losses of n clients.
        epsilon: Parameter of the exponential mechanism.
        tau: Upper bound on the losses.

    Returns:
        Probabilities, (n,) float64.

    Source: EM-FDRO, equation 1.
    """
    scores = epsilon / (2 * tau) * np.asarray(losses, np.float64)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def draw(losses: Sequence[float], epsilon: float, tau: float, count: int, rng: np.random.Generator) -> list[int]:
    """Draw clients without replacement, each from `probabilities` among the remaining clients.

    Args:
        losses: Finite losses of n clients.
        epsilon: Parameter of the exponential mechanism.
        tau: Upper bound on the losses.
        count: Number of clients to draw, 0 to n.
        rng: Source of the noise.

    Returns:
        Positions in `losses`, in the order of the draws.

    Raises:
        ValueError: If `count` is out of range.

    Source: Kool, van Hoof, Welling 2019 (Gumbel top-k).
    """
    if not 0 <= count <= len(losses):
        raise ValueError(f"count must lie between 0 and {len(losses)}, got {count!r}")
    keys = epsilon / (2 * tau) * np.asarray(losses, np.float64) + gumbel(len(losses), rng)
    return [int(k) for k in np.argsort(-keys, kind="stable")[:count]]


def top_mass(chances: np.ndarray, k: int) -> float:
    """Sum the k largest probabilities."""
    return float(np.sort(chances)[-k:].sum())


def near_mass(weights: Sequence[Weight], threshold: Weight) -> Weight:
    """Compute the probability of the clients near the worst one, P(N(delta)).

    Args:
        weights: Weight of each client.
        threshold: Smallest weight of a client in N(delta), exp(-epsilon delta / (2 tau)).

    Returns:
        Probability of all clients whose weight is at least `threshold`.

    Source: EM-FDRO, equation 3.
    """
    zero = threshold - threshold
    return sum((w for w in weights if w >= threshold), zero) / sum(weights, zero)


def printed_bounds(weights: Sequence[Weight], threshold: Weight) -> tuple[Weight, Weight]:
    """Compute the bounds of EM-FDRO, Proposition 4.1, on `near_mass`, as printed."""
    near, far = _count(weights, threshold)
    return near * threshold / (near + far * threshold), near / (near * threshold + far * min(weights))


def sharp_bounds(weights: Sequence[Weight], threshold: Weight) -> tuple[Weight, Weight]:
    """Compute the best bounds on `near_mass` from the same four numbers: n, N(delta), delta and the largest gap.

    The worst client weighs 1, the others near it between `threshold` and 1, the rest between the smallest weight and `threshold`.

    Args:
        weights: Weight of each client.
        threshold: Smallest weight of a client in N(delta).

    Returns:
        Lower bound, at least N / n, which the printed one never exceeds; upper bound, at most 1, which the printed one often
        exceeds.
    """
    near, far = _count(weights, threshold)
    low = 1 + (near - 1) * threshold
    return low / (low + far * threshold), near / (near + far * min(weights))


def _count(weights: Sequence[Weight], threshold: Weight) -> tuple[int, int]:
    near = sum(1 for w in weights if w >= threshold)
    return near, len(weights) - near
