"""R-DPCFL's first round at the server: Gaussian mixture over the updates, its confidence, and the number of clusters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpcfl_net.clustering.fitting import CUT, SPACES, Fitter, MixtureFit, Space, choose
from dpcfl_net.clustering.known_noise import KnownNoise
from dpcfl_net.clustering.lone import with_outliers

__all__ = ["CUT", "SPACES", "MixtureFit", "Space", "choose", "fit"]


def fit(
    updates: np.ndarray | Sequence[np.ndarray],
    *,
    clusters: int | None,
    max_clusters: int = 8,
    space: Space = "spectral",
    seed: int = 0,
    noise_deviation: float | np.ndarray | None = None,
    lone: bool = True,
) -> MixtureFit:
    """Fit a mixture to the updates, with a given or an estimated number of components.

    With n updates in p >> n dimensions, R's own score is about 50 for any data and its EM stays at its start; "spectral" and
    the effective separation avoid this.

    Args:
        updates: n rows of p float32.
        clusters: Number of components, 1 to n; None: estimate it (`choose`).
        max_clusters: Largest number to consider, at least 1.
        space: "spectral": the first M - 1 principal components; of 20 runs the one with the tightest clusters in the full
            space. "full": all p dimensions. "pca2": after the paper's published code, two min-max scaled components and equal
            weights. "sklearn": scikit-learn's GaussianMixture on the updates, the reference for "full".
        seed: Seed of the starts; equal arguments give the same fit.
        noise_deviation: Standard deviation of the noise in each coordinate, if known: of every update, or of each, (n,).
        lone: Give outliers clusters of one ("spectral" with known noise); otherwise only report them.

    Returns:
        The fit.

    Raises:
        ValueError: If an argument is out of range, there is no update, or an update holds a value that is not finite.
    """
    n = len(updates)
    if n < 1:
        raise ValueError("updates must hold at least one row, got none")
    if space not in SPACES:
        raise ValueError(f"unknown space {space!r}, allowed: {', '.join(SPACES)}")
    if clusters is not None and not 1 <= clusters <= n:
        raise ValueError(f"clusters must lie in 1..{n} (the number of updates), got {clusters}")
    if max_clusters < 1:
        raise ValueError(f"max_clusters must be at least 1, got {max_clusters}")
    noise = None if noise_deviation is None else KnownNoise.of(noise_deviation, n, len(updates[0]))
    fitter = Fitter(updates, len(updates[0]), space, seed, noise)
    found = fitter.best(clusters, max_clusters)
    return found if noise is None else with_outliers(fitter, found, clusters, (clusters or max_clusters) if lone else 0)
