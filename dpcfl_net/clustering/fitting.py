"""Gaussian mixtures of one set of updates, their confidence, and the number of clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from dpcfl_net.clustering import em, noise_spectrum, separation
from dpcfl_net.clustering.gram import centred_gram, coordinates
from dpcfl_net.clustering.known_noise import KnownNoise

Space = Literal["spectral", "pca2", "full", "sklearn"]
SPACES: tuple[Space, ...] = get_args(Space)
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
            client that is no outlier). With k outliers among members of clusters, at most the score whose overlap is k / n.
        mss_plain: R's separation score of the mixture in the space it was fitted in.
        mpo: Maximum pairwise overlap, 0 to 1, from `mss`; in space "pca2", as published, from `mss_plain`.
        iterations: EM iterations of the best run.
        coordinates: First two principal components of the updates, (n, 2).
        centres: Component centres in these coordinates, (M, 2).
        deviations: Component standard deviations in these coordinates, (M,).
        candidates: Numbers of components that were compared.
        scores: Separation score of each candidate, from the same score as `mpo`.
        space: Space that the mixture was fitted in.
        outliers: True for clients that resemble no others, (n,): alone in a cluster, or, if there is no room for one, in a
            cluster that they do not belong to. All False if the noise is not known.
        unverified: True for clients that may resemble no other, (n,): no outliers, but noise may hide a distance from their cluster
            as large as that between the two closest clusters. All False if the noise is not known.

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
    outliers: np.ndarray
    unverified: np.ndarray


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


class Fitter:
    """Fits mixtures to one set of updates; reads the updates once."""

    def __init__(
        self, updates: np.ndarray | Sequence[np.ndarray], dimension: int, space: Space, seed: int, noise: KnownNoise | None
    ) -> None:
        self.updates, self.p, self.space, self.seed, self.noise = updates, dimension, space, seed, noise
        self.points = coordinates(centred_gram(updates))
        self.weights = noise.weights if noise else None
        self.flat = np.zeros((len(updates), 2))
        self.flat[:, : self.points.shape[1]] = self.points[:, :2]
        self._fits: dict[int, MixtureFit] = {}

    def part(self, rows: np.ndarray) -> Fitter:
        """Return a fitter of some of the updates."""
        return Fitter(self.points[rows], self.p, self.space, self.seed, self.noise.part(rows) if self.noise else None)

    def best(self, clusters: int | None, max_clusters: int) -> MixtureFit:
        """Fit a given number of clusters, or choose it."""
        if clusters is not None:
            return self.fit(clusters)
        candidates = list(range(2, min(max_clusters, len(self.points) // 2) + 1))
        fits = {m: self.fit(m) for m in (1, *candidates, *(m + 1 for m in candidates[-1:]))}
        scores = {m: self.score(one) for m, one in fits.items() if m > 1}
        enough = None
        if self.noise:
            known = self.noise
            enough = next((m for m in (1, *candidates) if noise_spectrum.explained(self.points, fits[m].labels, known)), None)
        chosen = fits[choose(scores, candidates, published=self.space == "pca2", explained=enough)]
        return replace(chosen, candidates=np.array(candidates, np.int64), scores=np.array([scores[m] for m in candidates]))

    def fit(self, clusters: int) -> MixtureFit:
        """Fit a number of clusters; equal calls share one fit."""
        if clusters not in self._fits:
            self._fits[clusters] = self._fit(clusters)
        return self._fits[clusters]

    def _fit(self, clusters: int) -> MixtureFit:
        mixture = self._mixture(clusters)
        labels = mixture.posteriors.argmax(axis=1).astype(np.int64)
        mss = separation.effective(self.points, labels, clusters, self.p, weights=self.weights)
        plain = separation.plain(mixture.means, mixture.variances)
        used = plain if self.space == "pca2" else mss
        centres, deviations = shadow(self.flat, mixture.posteriors)
        return MixtureFit(
            clusters, labels, mixture.posteriors, mss, plain, separation.maximum_pairwise_overlap(used), mixture.iterations,
            self.flat, centres, deviations, np.array([clusters], np.int64), np.array([used]), self.space,
            np.zeros(len(labels), bool), np.zeros(len(labels), bool),
        )  # fmt: skip

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
            points = self._directions(clusters - 1)
            dimension = points.shape[1]
        else:
            points, dimension = self.points, self.p
        floor = _FLOOR * float((points**2).sum()) / (n * dimension)
        if self.space == "sklearn":
            return _reference(np.asarray(self.updates, np.float64), clusters, floor, self.seed)
        # In few components a tight pair of points dominates the likelihood (seen on real CIFAR-10 updates): rank runs by the
        # within-cluster scatter in the full space instead.
        score = self._tightness if self.space == "spectral" else None
        return em.spherical(
            points, clusters, dimension=dimension, floor=floor, seed=self.seed, precision=self.weights, score=score
        )

    def _directions(self, count: int) -> np.ndarray:
        """First principal components of the updates, weighted by the inverse variance of their noise."""
        if self.weights is None:
            return self.points[:, :count]
        centred = self.points - np.average(self.points, axis=0, weights=self.weights)
        axes = np.linalg.svd(centred * np.sqrt(self.weights)[:, None], full_matrices=False)[2]
        return centred @ axes[:count].T

    def _tightness(self, mixture: em.Mixture) -> float:
        return -separation.within(self.points, mixture.posteriors.argmax(axis=1), self.weights)


def _reference(updates: np.ndarray, clusters: int, floor: float, seed: int) -> em.Mixture:
    from sklearn.mixture import GaussianMixture

    model = GaussianMixture(
        clusters, covariance_type="spherical", init_params="k-means++", n_init=em.STARTS, reg_covar=floor,
        max_iter=em.MAX_ITERATIONS, tol=em.TOLERANCE, random_state=seed % 2**32,
    )  # fmt: skip
    posteriors = model.fit(updates).predict_proba(updates)
    return em.Mixture(posteriors, model.means_, model.covariances_, model.lower_bound_, model.n_iter_)


def shadow(flat: np.ndarray, posteriors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centre and spherical standard deviation of each component in the two plotted coordinates."""
    mass = np.maximum(posteriors.sum(axis=0), np.finfo(np.float64).tiny)
    centres = posteriors.T @ flat / mass[:, None]
    squared = ((flat[:, None] - centres[None]) ** 2).sum(axis=2)
    return centres, np.sqrt((posteriors * squared).sum(axis=0) / mass / 2)
