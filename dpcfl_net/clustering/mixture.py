"""R-DPCFL's first round at the server: Gaussian mixture over the updates, its confidence, and the number of clusters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from dpcfl_net.clustering import em, noise_spectrum, separation
from dpcfl_net.clustering.gram import centred_gram, coordinates

Space = Literal["spectral", "pca2", "full", "sklearn"]
SPACES: tuple[Space, ...] = ("spectral", "pca2", "full", "sklearn")
CUT = 2.5
ENOUGH = 2.0
FAR = 4.0
_FLOOR = 1e-6


@dataclass(frozen=True, eq=False)
class MixtureFit:
    """A mixture fitted to n updates.

    Attributes:
        clusters: Number of components M.
        labels: Most probable component of each client, (n,) int64.
        posteriors: Component probabilities, (n, M), rows sum to 1.
        mss: Effective minimum separation in the full space; 0 without evidence of clusters (M = 1, or a component with one
            client).
        mss_plain: R's separation score of the mixture in the space it was fitted in.
        mpo: Maximum pairwise overlap, 0 to 1, from `mss`; in space "pca2", as published, from `mss_plain`.
        iterations: EM iterations of the best run.
        coordinates: First two principal components of the updates, (n, 2).
        centres: Component centres in these coordinates, (M, 2).
        deviations: Component standard deviations in these coordinates, (M,).
        candidates: Numbers of components that were compared.
        scores: Separation score of each candidate, from the same score as `mpo`.
        space: Space that the mixture was fitted in.

    Source: Malekmohammadi, Taik, Farnadi, "Differentially Private Clustered Federated Learning", TMLR 2025.
    """

    clusters: int
    labels: np.ndarray
    posteriors: np.ndarray
    mss: float
    mss_plain: float
    mpo: float
    iterations: int
    coordinates: np.ndarray
    centres: np.ndarray
    deviations: np.ndarray
    candidates: np.ndarray
    scores: np.ndarray
    space: Space


def fit(
    updates: np.ndarray | Sequence[np.ndarray],
    *,
    clusters: int | None,
    max_clusters: int = 8,
    space: Space = "spectral",
    seed: int = 0,
    noise_deviation: float | None = None,
) -> MixtureFit:
    """Fit a mixture to the updates, with a given or an estimated number of components.

    With n updates in p >> n dimensions, R's own score is about 50 for any data and its EM stays at its start; "spectral" and
    the effective separation avoid this.

    Args:
        updates: n rows of p float32.
        clusters: Number of components, 1 to n; None: estimate it (`choose`).
        max_clusters: Largest number to consider, at least 1.
        space: "spectral": the first M - 1 principal components; of 20 runs the one with the tightest clusters in the full
            space. "full": all p dimensions. "pca2": the paper's published code, two min-max scaled components and equal
            weights. "sklearn": scikit-learn's GaussianMixture on the updates, the reference for "full".
        seed: Seed of the starts; equal arguments give the same fit.
        noise_deviation: Standard deviation of the noise in each coordinate of every update, if known.

    Returns:
        The fit.

    Raises:
        ValueError: If an argument is out of range or an update holds a value that is not finite.
    """
    n = len(updates)
    if space not in SPACES:
        raise ValueError(f"unknown space {space!r}, allowed: {', '.join(SPACES)}")
    if clusters is not None and not 1 <= clusters <= n:
        raise ValueError(f"clusters must lie in 1..{n} (the number of updates), got {clusters}")
    if max_clusters < 1:
        raise ValueError(f"max_clusters must be at least 1, got {max_clusters}")
    if noise_deviation is not None and not 0 < noise_deviation < math.inf:
        raise ValueError(f"noise_deviation must be positive and finite, got {noise_deviation}")
    fitter = _Fitter(updates, space, seed)
    if clusters is not None:
        return fitter.fit(clusters)
    candidates = list(range(2, min(max_clusters, n // 2) + 1))
    fits = {m: fitter.fit(m) for m in (*candidates, *(m + 1 for m in candidates[-1:]))}
    scores = {m: fitter.score(one) for m, one in fits.items()}
    fits[1] = fitter.fit(1)
    enough = None
    if noise_deviation is not None:
        enough = next((m for m in (1, *candidates) if fitter.explained(fits[m], noise_deviation)), None)
    best = fits[choose(scores, candidates, published=space == "pca2", explained=enough)]
    return replace(best, candidates=np.array(candidates, np.int64), scores=np.array([scores[m] for m in candidates]))


def choose(
    scores: dict[int, float], candidates: Sequence[int], *, published: bool = False, explained: int | None = None
) -> int:
    """Choose the number of clusters from separation scores.

    Default rule: the number with the largest drop score(M) / max(1, score(M + 1)) among those that score 2.5 or more (a missing
    score counts as 1), or 1 if no number does. The largest M above the cut would split real clusters, the largest score would
    merge them. `explained` takes precedence if it is 1, or if it scores at least 2 and at least a quarter of the score of the
    default choice, when that is smaller: at high noise the known noise is the better guide, at low noise the clients' own
    heterogeneity exceeds it.

    Args:
        scores: Separation score by number of clusters.
        candidates: Numbers to choose from.
        published: Use R's rule, the largest score.
        explained: Smallest number at which clusters and known noise explain the updates (`noise_spectrum.explained`); None if
            there is none or the noise is not known.

    Returns:
        The number of clusters.
    """
    if published:
        return max(candidates, key=lambda m: scores[m], default=1)
    enough = [m for m in candidates if scores[m] >= CUT]
    fall = max(enough, key=lambda m: scores[m] / max(1.0, scores.get(m + 1, 1.0)), default=1)
    if explained is None or explained == 1:
        return explained or fall
    clear = scores[fall] / FAR if 1 < fall < explained else 0.0
    return explained if scores[explained] >= max(ENOUGH, clear) else fall


class _Fitter:
    """Fits mixtures to one set of updates; reads the updates once."""

    def __init__(self, updates: np.ndarray | Sequence[np.ndarray], space: Space, seed: int) -> None:
        self.updates, self.space, self.seed = updates, space, seed
        self.points = coordinates(centred_gram(updates))
        self.p = len(updates[0])
        self.flat = np.zeros((len(updates), 2))
        self.flat[:, : self.points.shape[1]] = self.points[:, :2]

    def fit(self, clusters: int) -> MixtureFit:
        mixture = self._mixture(clusters)
        labels = mixture.posteriors.argmax(axis=1).astype(np.int64)
        mss = separation.effective(self.points, labels, clusters, self.p)
        plain = separation.plain(mixture.means, mixture.variances)
        used = plain if self.space == "pca2" else mss
        centres, deviations = _shadow(self.flat, mixture.posteriors)
        return MixtureFit(
            clusters, labels, mixture.posteriors, mss, plain, separation.maximum_pairwise_overlap(used), mixture.iterations,
            self.flat, centres, deviations, np.array([clusters], np.int64), np.array([used]), self.space,
        )  # fmt: skip

    def explained(self, mixture: MixtureFit, deviation: float) -> bool:
        return noise_spectrum.explained(self.points, mixture.labels, self.p, deviation)

    def score(self, mixture: MixtureFit) -> float:
        return mixture.mss_plain if self.space == "pca2" else mixture.mss

    def _mixture(self, clusters: int) -> em.Mixture:
        n, rank = self.points.shape
        if clusters == 1 or rank == 0:
            # One cluster, or all updates equal: all components are equally likely.
            even = np.full((n, clusters), 1 / clusters)
            return em.Mixture(even, np.zeros((clusters, 1)), np.zeros(clusters), 0.0, 0)
        if self.space == "pca2":
            low = self.flat.min(axis=0)
            width = self.flat.max(axis=0) - low
            scaled = (self.flat - low) / np.where(width > 0, width, 1)
            return em.spherical(scaled, clusters, dimension=2, floor=_FLOOR, seed=self.seed, equal_weights=True)
        if self.space == "spectral":
            points = self.points[:, : clusters - 1]
            dimension = points.shape[1]
        else:
            points, dimension = self.points, self.p
        floor = _FLOOR * float((points**2).sum()) / (n * dimension)
        if self.space == "sklearn":
            return _reference(np.asarray(self.updates, np.float64), clusters, floor, self.seed)
        # In few components a tight pair of points dominates the likelihood (seen on real CIFAR-10 updates): rank runs by the
        # within-cluster scatter in the full space instead.
        score = self._tightness if self.space == "spectral" else None
        return em.spherical(points, clusters, dimension=dimension, floor=floor, seed=self.seed, score=score)

    def _tightness(self, mixture: em.Mixture) -> float:
        return -separation.within(self.points, mixture.posteriors.argmax(axis=1))


def _reference(updates: np.ndarray, clusters: int, floor: float, seed: int) -> em.Mixture:
    from sklearn.mixture import GaussianMixture

    model = GaussianMixture(
        clusters, covariance_type="spherical", init_params="k-means++", n_init=em.STARTS, reg_covar=floor,
        max_iter=em.MAX_ITERATIONS, tol=em.TOLERANCE, random_state=seed % 2**32,
    )  # fmt: skip
    posteriors = model.fit(updates).predict_proba(updates)
    return em.Mixture(posteriors, model.means_, model.covariances_, model.lower_bound_, model.n_iter_)


def _shadow(flat: np.ndarray, posteriors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centre and spherical standard deviation of each component in the two plotted coordinates."""
    mass = np.maximum(posteriors.sum(axis=0), np.finfo(np.float64).tiny)
    centres = posteriors.T @ flat / mass[:, None]
    squared = ((flat[:, None] - centres[None]) ** 2).sum(axis=2)
    return centres, np.sqrt((posteriors * squared).sum(axis=0) / mass / 2)
