"""R-DPCFL's first round at the server: a spherical Gaussian mixture over the clients' updates, its confidence, and M.

Source: Malekmohammadi, Taik, Farnadi, "Differentially Private Clustered Federated Learning", TMLR 2025. With n updates in
p >> n dimensions its score is about 50 whatever the data and its EM stays where it starts: hence `spectral` and the
effective separation.
"""

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
    """The mixture fitted to n updates.

    clusters: M. labels: (n,) int64, each client's likeliest component. posteriors: (n, M), rows sum to 1.
    mss: effective minimum separation in the full space (0: no evidence of clusters, e.g. M = 1 or a component with one
    client). mss_plain: R's own score of the fitted mixture, in the space it was fitted in. mpo: maximum pairwise overlap
    in [0, 1], from mss (in `pca2`, as published, from mss_plain). iterations: EM iterations of the run that was kept.
    coordinates: (n, 2) first two principal components of the updates; centres (M, 2) and deviations (M,): the components there.
    candidates, scores: every M considered and its score (as mpo's), in that order.
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
    """Fit the mixture to updates (n rows of p float32) with `clusters` components, or with a number chosen (None).

    spectral: in the first M - 1 principal components; of 20 runs the one whose clusters are tightest in the full space.
    full: in all p dimensions. pca2: as the paper's published code, two min-max scaled components, equal weights.
    sklearn: scikit-learn's GaussianMixture on the updates, the reference of `full`. noise_deviation: of the noise in each
    coordinate of an update, if it is known and the same for all; it helps to choose the number. The same updates, options
    and seed give the same fit. ValueError: a value that is not finite, unknown space, `clusters` not in 1..n,
    max_clusters < 1, noise_deviation not positive and finite.
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
    scores = {m: fitter.score(found) for m, found in fits.items()}
    fits[1] = fitter.fit(1)
    enough = None
    if noise_deviation is not None:
        enough = next((m for m in (1, *candidates) if fitter.explained(fits[m], noise_deviation)), None)
    found = fits[choose(scores, candidates, published=space == "pca2", explained=enough)]
    return replace(found, candidates=np.array(candidates, np.int64), scores=np.array([scores[m] for m in candidates]))


def choose(
    scores: dict[int, float], candidates: Sequence[int], *, published: bool = False, explained: int | None = None
) -> int:
    """The number of clusters: that which explains the updates, or else that with the largest fall of the score behind it.

    explained: the smallest M at which clusters and the known noise are all there is (`noise_spectrum.explained`), None if there is
    none or the noise is not known. Where noise is high it knows best: it is taken if it is 1, or scores 2 or more and no less
    than a quarter of what fewer clusters score by the fall. Where noise is low, what clients' own data add reaches beyond it
    as well, and the fall decides: score(M) / max(1, score(M + 1)), a score that is not there counting as 1, of the M that score
    2.5 or more; 1 if none does. (The largest M above the cut would split real clusters there, the largest score would
    merge them.) published: R's rule, the largest score.
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
    """Fits of one set of updates: the data are read once, whatever the number of fits."""

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

    def explained(self, found: MixtureFit, deviation: float) -> bool:
        return noise_spectrum.explained(self.points, found.labels, self.p, deviation)

    def score(self, found: MixtureFit) -> float:
        return found.mss_plain if self.space == "pca2" else found.mss

    def _mixture(self, clusters: int) -> em.Mixture:
        n, rank = self.points.shape
        if clusters == 1 or rank == 0:
            # one cluster, or updates that are all the same and say nothing: every component is as likely
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
        # In a few components a tight pair of points outweighs all else in the likelihood; what the full space says of a
        # run's clusters is the better judge there (seen on real CIFAR-10 updates).
        merit = self._tightness if self.space == "spectral" else None
        return em.spherical(points, clusters, dimension=dimension, floor=floor, seed=self.seed, merit=merit)

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
    """Centre and spherical deviation of each component in the two coordinates that pictures show."""
    mass = np.maximum(posteriors.sum(axis=0), np.finfo(np.float64).tiny)
    centres = posteriors.T @ flat / mass[:, None]
    squared = ((flat[:, None] - centres[None]) ** 2).sum(axis=2)
    return centres, np.sqrt((posteriors * squared).sum(axis=0) / mass / 2)
