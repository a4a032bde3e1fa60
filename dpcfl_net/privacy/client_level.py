"""Sensitivities of client-level releases of clustered learning, and the joint noise multiplier of several releases."""

from __future__ import annotations

import math

# Scale of the count that is released with an update of norm `clip`: its noise is about 4 z clients, and the norm grows by 3 %.
COUNT_SCALE = 0.25
# Up to this many clients the margin of clipped updates (`mechanisms.shortened`) covers the rounding of a sum, 4.4e-10 of a norm.
_FEW = 2000


def labels_first_sensitivity(clip: float, label_clip: float) -> tuple[float, float]:
    """Compute replace-one L2 sensitivities of a round that releases noisy labels before anything else.

    A label replaced by another moves two coordinates of one slot: sqrt(2) C_s. Public labels determine which slot
    counts for which cluster, rebalanced or not: replacing a client changes one slot in one cluster's sum, by 2 C.

    Args:
        clip: Clip norm C of a client's update.
        label_clip: Norm C_s to which one-hot labels are scaled down.

    Returns:
        Sensitivity of the sums, and of the labels.
    """
    return 2 * clip, math.sqrt(2) * min(label_clip, 1.0)


def block_norm(clip: float) -> float:
    """Compute the largest L2 norm of a client's update in its cluster's block, with its count appended: 1.03 C.

    This is the add/remove sensitivity of the sum of such vectors over all clusters. No decision depends on a label, so none is
    released; rebalancing in expectation is post-processing of the noisy sums and counts. Under replacement two such vectors
    differ by at most twice this.

    Args:
        clip: Clip norm C of a client's update.

    Returns:
        C * sqrt(1 + COUNT_SCALE^2).
    """
    return clip * math.hypot(1.0, COUNT_SCALE)


def rounding_factor(clients: int) -> float:
    """Compute the factor by which rounding of a sum over clients can exceed the sensitivity of the exact sum.

    The i-th addition in float64 is off by at most 2^-53 of the partial sum's norm, which is at most i updates' norms. So a sum of
    n vectors is off by at most 2^-53 n (n + 1) / 2 norms, and two sums differ by at most twice that more than the exact ones.

    Args:
        clients: Largest number n of clients in the sum; public.

    Returns:
        1 + 2^-53 n (n + 1); 1 for at most 2,000 clients.
    """
    return 1 + 2.0**-53 * clients * (clients + 1) if clients > _FEW else 1.0


def joint_noise(*noise_multipliers: float) -> float:
    """Compute the noise multiplier of one Gaussian release that costs what several cost together.

    A later release may depend on earlier ones; all of them use the same sample.

    Args:
        *noise_multipliers: Noise of each release over its own sensitivity.

    Returns:
        z with 1 / z^2 = 1 / z_1^2 + 1 / z_2^2 + ...

    Raises:
        ValueError: If none is given, or one is not positive and finite.

    Source: Dong, Roth, Su 2022 (composition of Gaussian differential privacy).
    """
    for noise in noise_multipliers:
        if not 0 < noise < math.inf:
            raise ValueError(f"noise_multipliers must be positive and finite, got {noise!r}")
    if not noise_multipliers:
        raise ValueError("noise_multipliers must not be empty")
    return math.fsum(noise**-2 for noise in noise_multipliers) ** -0.5
