"""Differences between true clusters: rotated or otherwise changed images (feature shift), and other labels (concept shift)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from dpcfl_net.data import regression

ShiftName = Literal[
    "rotation", "label-flip", "label-permutation", "inversion", "blur", "noise", "channels", "line", "none"
]  # fmt: skip
NAMES: tuple[str, ...] = get_args(ShiftName)
# Clusters that a shift can tell apart; cluster k + n has the same records as cluster k. No entry: no limit; label-flip: the classes.
PERIODS = {"rotation": 4, "inversion": 2, "channels": 6, "line": len(regression.LINES)}
GRADES = {"blur": 7, "noise": 11}  # a shift that grows with k ends here
IMAGES = ("rotation", "inversion", "blur", "noise", "channels")  # shifts that need square or other images
BLUR, NOISE = 0.5, 0.1  # a step of the blur's deviation in pixels, and of the noise's as a share of the largest value
COLOURS = ((0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 2, 1), (2, 1, 0), (1, 0, 2))


@dataclass(frozen=True)
class FeatureShift:
    """Change of the images of a true cluster, in this order.

    Attributes:
        channels: New order of the colour channels; empty: as they are.
        blur: Standard deviation of a Gaussian blur in pixels; 0: none.
        inverted: True if a value v becomes 255 - v.
        noise: Standard deviation of Gaussian noise as a share of 255, drawn once for each record; 0: none.
        seed: Seed of the noise.
    """

    channels: tuple[int, ...] = ()
    blur: float = 0.0
    inverted: bool = False
    noise: float = 0.0
    seed: int = 0

    def applied(self, values: np.ndarray, rows: np.ndarray, part: Literal["train", "test"]) -> np.ndarray:
        """Return changed images.

        Args:
            values: Images, uint8 (n, C, H, W).
            rows: Their rows in the data set, (n,); the same row has the same noise in each call.
            part: Part of the data set.

        Returns:
            uint8 (n, C, H, W).

        Source: noise-based feature skew of Li et al. 2022 (NIID-Bench), section 3; FedBN (Li et al. 2021) for feature shift.
        """
        if self.channels:
            values = values[:, list(self.channels)]
        if self.blur:
            from scipy.ndimage import gaussian_filter

            values = _bytes(gaussian_filter(values.astype(np.float32), (0, 0, self.blur, self.blur), mode="nearest"))
        if self.inverted:
            values = 255 - values
        if self.noise:
            drawn = [self._drawn(int(row), part, values.shape[1:]) for row in rows]
            values = _bytes(values + 255 * self.noise * np.stack(drawn)) if drawn else values
        return np.ascontiguousarray(values)

    def _drawn(self, row: int, part: Literal["train", "test"], shape: tuple[int, ...]) -> np.ndarray:
        """Standard normal noise of one record."""
        key = [self.seed % 2**64, 2 * row + (part == "test")]
        return np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, np.float32)


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.rint(values).clip(0, 255).astype(np.uint8)


def most_clusters(shifts: Sequence[str], classes: int) -> int | None:
    """Return how many clusters the shifts together can tell apart; None: no limit.

    Args:
        shifts: Names of the shifts; several act together, each with the cluster's number.
        classes: Number of classes, which limits label-flip.
    """
    if not shifts:
        return None
    known = {**PERIODS, "label-flip": classes}
    periods = [known[name] for name in shifts if name in known]
    if "label-permutation" in shifts:
        return None
    # From the last grade on only the periods tell clusters apart: the first repetition is one period later.
    return max((GRADES[name] for name in shifts if name in GRADES), default=1) - 1 + math.lcm(*periods)


def problems(shifts: Sequence[str], clusters: int, shape: tuple[int, ...], classes: int) -> list[str]:
    """Return messages about shifts that are impossible on these records.

    Args:
        shifts: Names of the shifts.
        clusters: Number of true clusters.
        shape: Shape of a record.
        classes: Number of classes.
    """
    if clusters < 2:
        return []
    found = []
    if "rotation" in shifts and (len(shape) != 3 or shape[1] != shape[2]):
        found.append(f"data.shift is 'rotation': must be label-flip or none where records, here {shape}, are not square images")
    found += [
        f"data.shift is {name!r}: needs images, records are {shape}"
        for name in shifts
        if name in IMAGES and name != "rotation" and len(shape) != 3
    ]
    if "channels" in shifts and len(shape) == 3 and shape[0] != len(COLOURS[0]):
        found.append(f"data.shift is 'channels': needs images of {len(COLOURS[0])} channels, records are {shape}")
    most = most_clusters(shifts, classes)
    if "label-flip" in shifts and most is not None and clusters > most:
        found.append(f"data.shift is 'label-flip': {clusters} clusters of {classes} classes cannot all differ")
    if "label-permutation" in shifts and clusters > math.factorial(min(classes, 12)):
        found.append(f"data.shift is 'label-permutation': {clusters} clusters of {classes} classes cannot all differ")
    return found


def feature_shift(shifts: Sequence[str], cluster: int, seed: int) -> FeatureShift | None:
    """Return the change of a cluster's images besides rotation; None without one.

    Args:
        shifts: Names of the shifts.
        cluster: True cluster k.
        seed: Seed of the partition.
    """
    found = FeatureShift(
        channels=COLOURS[cluster % len(COLOURS)] if "channels" in shifts and cluster % len(COLOURS) else (),
        blur=BLUR * min(cluster, GRADES["blur"] - 1) if "blur" in shifts else 0.0,
        inverted="inversion" in shifts and cluster % 2 == 1,
        noise=NOISE * min(cluster, GRADES["noise"] - 1) if "noise" in shifts else 0.0,
        seed=seed if "noise" in shifts else 0,
    )
    unchanged = FeatureShift(seed=found.seed)
    return None if found == unchanged else found


def label_orders(clusters: int, classes: int, seed: int) -> list[tuple[int, ...]]:
    """Draw different permutations of the labels, the identity for cluster 0 (concept shift).

    Args:
        clusters: Number of true clusters, at most classes!.
        classes: Number of classes.
        seed: Seed of the partition.

    Returns:
        For each cluster: the new label of each old one.
    """
    rng = np.random.Generator(np.random.PCG64([seed, clusters]))
    orders = [tuple(range(classes))]
    while len(orders) < clusters:
        order = tuple(rng.permutation(classes).tolist())
        if order not in orders:
            orders.append(order)
    return orders
