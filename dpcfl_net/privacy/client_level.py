"""Client-level releases of clustered learning: their sensitivities, and how labels and sums share one round's noise."""

from __future__ import annotations

import math

# A count enters beside an update of norm clip as clip times this: noise on the count of about 4 z clients, 3 % more norm.
COUNT_SCALE = 0.25


def labels_first_sensitivity(clip: float, label_clip: float) -> tuple[float, float]:
    """Replace-one L2 sensitivities of a round that releases noisy labels before anything else: of the sums, of the labels.

    clip: C, the norm of a client's update. label_clip: C_s, to which one-hot labels are scaled down.
    A label swapped for another moves two coordinates of one slot: sqrt(2) C_s. Once the labels are public, so is which slot
    counts for which cluster, rebalanced or not: a client replaced changes one slot in one cluster's sum, by 2 C.
    """
    return 2 * clip, math.sqrt(2) * min(label_clip, 1.0)


def block_norm(clip: float) -> float:
    """L2 norm of a client's update in its cluster's block of a vector over all clusters, with its count beside it: 1.03 C.

    The add/remove sensitivity of the sum of such vectors. Nothing is decided on a label, so there is none to release;
    rebalancing in expectation is post-processing of the noisy sums and counts. Replaced, two such vectors differ by at most
    twice this.
    """
    return clip * math.hypot(1.0, COUNT_SCALE)


def joint_noise(*noise_multipliers: float) -> float:
    """The noise multiplier of one Gaussian release that costs what several cost together: 1 / z^2 = 1 / z_1^2 + 1 / z_2^2 + ...

    Each z_i is noise over the sensitivity of its own release, and a later release may depend on earlier ones; all of them use
    the same sample. Source: Dong, Roth, Su 2022 (composition of Gaussian differential privacy). ValueError: none given, or one
    not positive and finite.
    """
    for noise in noise_multipliers:
        if not 0 < noise < math.inf:
            raise ValueError(f"noise_multipliers must be positive and finite, got {noise!r}")
    if not noise_multipliers:
        raise ValueError("noise_multipliers must not be empty")
    return math.fsum(noise**-2 for noise in noise_multipliers) ** -0.5


def split_noise(noise_multiplier: float, labels_share: float) -> tuple[float, float]:
    """Noise multipliers of a round's sums and of its labels that cost `noise_multiplier` together.

    labels_share: the part of 1 / z^2 that the labels get. `joint_noise` of the two is `noise_multiplier` again.
    ValueError, naming the argument: a noise multiplier not positive and finite, a share not strictly between 0 and 1.
    """
    if not 0 < noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier must be positive and finite, got {noise_multiplier!r}")
    if not 0 < labels_share < 1:
        raise ValueError(f"labels_share must lie strictly between 0 and 1, got {labels_share!r}")
    return noise_multiplier / math.sqrt(1 - labels_share), noise_multiplier / math.sqrt(labels_share)
