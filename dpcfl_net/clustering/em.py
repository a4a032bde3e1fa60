"""Expectation-maximisation for a spherical Gaussian mixture whose dimension may exceed that of the points given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

STARTS = 20
MAX_ITERATIONS = 100
TOLERANCE = 1e-3
_TINY = 10 * np.finfo(np.float64).eps


@dataclass(frozen=True, eq=False)
class Mixture:
    """posteriors (n, M), means (M, d), variances (M,) per coordinate, mean log-likelihood of a point, iterations run."""

    posteriors: np.ndarray
    means: np.ndarray
    variances: np.ndarray
    log_likelihood: float
    iterations: int


def spherical(
    points: np.ndarray,
    clusters: int,
    *,
    dimension: int,
    floor: float,
    seed: int,
    equal_weights: bool = False,
    merit: Callable[[Mixture], float] | None = None,
) -> Mixture:
    """The best of 20 runs from k-means++ starts: of those in which every component is some two points' best, the likeliest.

    points: (n, d) float64; dimension >= d counts in the likelihood and in the variances, so that exact coordinates of n
    points in p dimensions give the mixture in p dimensions. `floor` is added to each variance. A run whose component
    holds one point is likelier without end as its variance shrinks: it is taken only if there is no other. `merit` judges
    runs by something else than their likelihood. Starts, steps and stopping are those of scikit-learn's
    GaussianMixture(init_params="k-means++", random_state=seed).
    """
    # scikit-learn draws its starts from the legacy generator: the same stream gives the same starts
    random = np.random.RandomState(seed % 2**32)
    runs = []
    for _ in range(STARTS):
        posteriors = np.zeros((len(points), clusters))
        posteriors[kmeans_plusplus(points, clusters, random), np.arange(clusters)] = 1
        runs.append(run(points, posteriors, dimension=dimension, floor=floor, equal_weights=equal_weights))
    merit = merit or (lambda mixture: mixture.log_likelihood)
    return max(runs, key=lambda mixture: (smallest_component(mixture) >= 2, merit(mixture)))


def smallest_component(mixture: Mixture) -> int:
    """How many points have the component fewest have as their likeliest."""
    count = np.bincount(mixture.posteriors.argmax(axis=1), minlength=len(mixture.means))
    return int(count.min())


def run(points: np.ndarray, posteriors: np.ndarray, *, dimension: int, floor: float, equal_weights: bool = False) -> Mixture:
    """EM from the given posteriors until the mean log-likelihood changes by less than 1e-3, 100 iterations at most."""
    model = _maximise(points, posteriors, dimension, floor, equal_weights)
    before = -np.inf
    for iteration in range(1, MAX_ITERATIONS + 1):  # noqa: B007
        posteriors, likelihood = _expect(points, *model, dimension)
        model = _maximise(points, posteriors, dimension, floor, equal_weights)
        if abs(likelihood - before) < TOLERANCE:
            break
        before = likelihood
    posteriors, _ = _expect(points, *model, dimension)
    return Mixture(posteriors, model[1], model[2], likelihood, iteration)


def kmeans_plusplus(points: np.ndarray, clusters: int, random: np.random.RandomState) -> list[int]:
    """Greedy k-means++ (Arthur and Vassilvitskii 2007): indices of points, far apart, the best of 2 + ln M draws each."""
    distances = ((points[:, None] - points[None]) ** 2).sum(axis=2)
    chosen = [int(random.choice(len(points), p=np.full(len(points), 1 / len(points))))]
    closest = distances[chosen[0]]
    for _ in range(1, clusters):
        draws = random.uniform(size=2 + int(np.log(clusters))) * closest.sum()
        candidates = np.minimum(np.searchsorted(np.cumsum(closest), draws), len(points) - 1)
        after = np.minimum(closest, distances[candidates])
        best = int(after.sum(axis=1).argmin())
        chosen.append(int(candidates[best]))
        closest = after[best]
    return chosen


def _squared_distances(points: np.ndarray, means: np.ndarray) -> np.ndarray:
    return ((points[:, None] - means[None]) ** 2).sum(axis=2)


def _maximise(
    points: np.ndarray, posteriors: np.ndarray, dimension: int, floor: float, equal_weights: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    mass = posteriors.sum(axis=0) + _TINY
    means = posteriors.T @ points / mass[:, None]
    variances = (posteriors * _squared_distances(points, means)).sum(axis=0) / mass / dimension + floor
    weights = np.full(len(mass), 1 / len(mass)) if equal_weights else mass / mass.sum()
    return np.log(weights), means, variances


def _expect(
    points: np.ndarray, weights: np.ndarray, means: np.ndarray, variances: np.ndarray, dimension: int
) -> tuple[np.ndarray, float]:
    exponent = _squared_distances(points, means) / variances
    densities = weights - 0.5 * (dimension * np.log(2 * np.pi * variances) + exponent)
    top = densities.max(axis=1, keepdims=True)
    posteriors = np.exp(densities - top)
    total = posteriors.sum(axis=1, keepdims=True)
    return posteriors / total, float(np.mean(np.log(total) + top))
