"""The privacy loss distribution of a Gaussian release over a sample of fixed size, one member replaced by another."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from dpcfl_net.privacy.accounting.composition import Losses, symmetric


@lru_cache(maxsize=8)
def fixed_size_gaussian(noise: float, rate: float, interval: float) -> Losses:
    """One release of replace-one sensitivity 1 over a sample of m of n members without replacement, rate = m / n.

    The pointwise maximum of the divergences of the Poisson-sampled pair in both directions: with P = N(1, z^2), Q = N(0, z^2),
    that of ((1-q) Q + q P, Q) where a = e^y >= 1, and of (P, (1-q) P + q Q), its mirror image, below.

    Why it holds: let R and R' be the release when the sample has the member, N when it has not. A sample without the member is
    one with it in which somebody else takes its place, so any two of the three are no farther apart than P and Q. For a >= 1,
    with a' = 1 + (a - 1) / q and b = a / a', advanced joint convexity (Balle, Barthe, Gaboardi 2018, Theorem 2) gives
    H_a((1-q) N + q R, (1-q) N + q R') = q H_a'(R, (1-b) N + b R') <= q H_a'(P, Q) = H_a((1-q) Q + q P, Q);
    below 1 exchange the two inputs. This is the amplification that Zhu, Dong, Wang 2022 state as Theorem 11.

    Why it may be composed: the maximum is convex in a, hence the profile of one pair of distributions, and that pair dominates
    a release whatever came before it; k releases are then dominated by k such pairs (their Theorem 10). To compose each direction
    by itself and take the worse at the end is not covered by this, and fails in general (Lebeda, Regehr, Kamath, Steinke 2024).
    """
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    pair = GaussianPrivacyLoss(noise, sampling_prob=rate, adjacency_type=AdjacencyType.REMOVE)
    top = math.ceil(pair.connect_dots_bounds().epsilon_upper / interval)
    return symmetric(pair.get_delta_for_epsilon(interval * np.arange(top + 1)), interval)
