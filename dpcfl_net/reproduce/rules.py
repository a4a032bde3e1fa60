"""Rules that choose the number of clusters M from first updates: the paper's, this project's and others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from dpcfl_net.clustering import em, mixture, noise_spectrum, separation
from dpcfl_net.clustering.gram import centred_gram, coordinates
from dpcfl_net.clustering.known_noise import KnownNoise

MOST = 8


@dataclass(frozen=True, eq=False)
class RoundEvidence:
    """Input of the rules for one round.

    Attributes:
        updates: First updates, (n, p) float32.
        points: Exact coordinates of the updates, (n, r).
        fits: Mixture in M - 1 components without clusters of one by M, for M = 1..most + 1.
        used: Fit that a run uses, with known noise and unknown M.
        dimension: p.
        deviation: Standard deviation of the noise per coordinate.
        seed: Seed of the fits.
    """

    updates: np.ndarray
    points: np.ndarray
    fits: Mapping[int, mixture.MixtureFit]
    used: mixture.MixtureFit
    dimension: int
    deviation: float
    seed: int

    @classmethod
    def at(cls, updates: np.ndarray, deviation: float, seed: int) -> RoundEvidence:
        """Fit the mixtures of one round.

        Args:
            updates: First updates, (n, p) float32.
            deviation: Standard deviation of the noise per coordinate.
            seed: Seed of the fits.

        Returns:
            The evidence.
        """
        fits = {m: mixture.fit(updates, clusters=m, seed=seed) for m in range(1, most(len(updates)) + 2)}
        used = mixture.fit(updates, clusters=None, max_clusters=MOST, seed=seed, noise_deviation=deviation)
        return cls(updates, coordinates(centred_gram(updates)), fits, used, updates.shape[1], deviation, seed)

    @property
    def candidates(self) -> range:
        return range(2, most(len(self.points)) + 1)

    @property
    def scores(self) -> dict[int, float]:
        return {m: fit.mss for m, fit in self.fits.items() if m > 1}


def most(rows: int) -> int:
    """Return the largest candidate for M, given the number of updates."""
    return min(MOST, rows // 2)


def with_outliers(evidence: RoundEvidence) -> int:
    """Choose as `known_noise`, and give clients that resemble no others clusters of one: the rule of runs."""
    return evidence.used.clusters


def known_noise(evidence: RoundEvidence) -> int:
    """Choose the smallest M that explains the updates at the known noise if it is separated, else the largest fall."""
    noise = KnownNoise(evidence.dimension, evidence.deviation)
    explained = (
        m for m in (1, *evidence.candidates) if noise_spectrum.explained(evidence.points, evidence.fits[m].labels, noise)
    )
    return mixture.choose(evidence.scores, evidence.candidates, explained=next(explained, None))


def largest_fall(evidence: RoundEvidence) -> int:
    """Choose, among the M with effective MSS >= 2.5, the M with the largest fall to M + 1: the rule for unknown noise."""
    return mixture.choose(evidence.scores, evidence.candidates)


def published(evidence: RoundEvidence) -> int:
    """Choose the largest MSS in two scaled components, as the paper's published code does."""
    return mixture.fit(evidence.updates, clusters=None, max_clusters=MOST, space="pca2", seed=evidence.seed).clusters


def largest_plain(evidence: RoundEvidence) -> int:
    """Choose the largest MSS of the mixture in all dimensions, as the paper is printed."""
    plain = {
        m: mixture.fit(evidence.updates, clusters=m, space="full", seed=evidence.seed).mss_plain for m in evidence.candidates
    }
    return max(plain, key=lambda m: plain[m])


def directions(evidence: RoundEvidence) -> int:
    """Return 1 + the number of directions beyond the edge of the known noise."""
    rows = len(evidence.points)
    return 1 + noise_spectrum.beyond(evidence.points, evidence.dimension, evidence.deviation, rows - 1)


def above_null(evidence: RoundEvidence) -> int:
    """Choose the largest M whose effective MSS exceeds the .99 quantile of rounds with noise only, at this n and p."""
    cuts = null(len(evidence.points), evidence.dimension)[0]
    return max((m for m in evidence.candidates if evidence.fits[m].mss > cuts[m]), default=1)


def gap(evidence: RoundEvidence) -> int:
    """Choose the smallest M with gap(M) >= gap(M+1) - s(M+1), against noise only.

    Source: Tibshirani, Walther, Hastie 2001 (gap statistic).
    """
    _, mean, spread = null(len(evidence.points), evidence.dimension)
    within = {m: separation.within(evidence.points, fit.labels) for m, fit in evidence.fits.items()}
    gaps = {m: mean[m] - math.log(value) for m, value in within.items()}
    return next((m for m in (1, *evidence.candidates) if gaps[m] >= gaps[m + 1] - spread[m + 1]), evidence.candidates[-1])


def bayes(evidence: RoundEvidence) -> int:
    """Choose the smallest BIC of spherical mixtures; every M uses the first eight principal components."""
    points = evidence.points[:, :MOST]
    n, d = points.shape
    floor = 1e-6 * float((points**2).sum()) / (n * d)

    def criterion(m: int) -> float:
        found = em.spherical(points, m, dimension=d, floor=floor, seed=evidence.seed)
        return -2 * n * found.log_likelihood + (m * (d + 2) - 1) * math.log(n)

    return min((1, *evidence.candidates), key=criterion)


RULES: dict[str, Callable[[RoundEvidence], int]] = {
    "known noise, outliers alone": with_outliers,
    "known noise, else largest fall": known_noise,
    "largest fall": largest_fall,
    "largest MSS, 2 components (published code)": published,
    "largest MSS, all dimensions (as printed)": largest_plain,
    "directions beyond the noise": directions,
    "largest M above noise alone": above_null,
    "gap statistic against noise": gap,
    "BIC in 8 components": bayes,
}


@cache
def null(rows: int, dimension: int, draws: int = 100) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
    """Simulate rounds with noise of standard deviation 1 only.

    Args:
        rows: Number of updates (n).
        dimension: Parameters of an update (p).
        draws: Simulated rounds.

    Returns:
        By M: .99 quantile of the effective MSS; mean of the log within-scatter; its standard deviation times
        sqrt(1 + 1 / draws), as in the gap statistic.
    """
    rng = np.random.default_rng([rows, dimension])
    looks = [_noise_fits(rng, rows, dimension, seed) for seed in range(draws)]
    scores = {m: np.quantile([fits[m][0] for fits in looks], 0.99) for m in looks[0]}
    logs = {m: np.array([fits[m][1] for fits in looks]) for m in looks[0]}
    more = math.sqrt(1 + 1 / draws)
    return scores, {m: float(v.mean()) for m, v in logs.items()}, {m: float(v.std()) * more for m, v in logs.items()}


def _noise_fits(rng: np.random.Generator, rows: int, dimension: int, seed: int) -> dict[int, tuple[float, float]]:
    """Return effective MSS and log within-scatter of one round of noise, by M."""
    # The rows of a Wishart matrix's triangular factor (Bartlett) have the distances of rows of `dimension` normals.
    factor = np.tril(rng.standard_normal((rows, rows)), -1)
    factor[np.arange(rows), np.arange(rows)] = np.sqrt(rng.chisquare(dimension - np.arange(rows)))
    points = coordinates(centred_gram(factor))
    found = {}
    for m in range(1, most(rows) + 2):
        labels = mixture.fit(factor, clusters=m, seed=seed).labels
        found[m] = (separation.effective(points, labels, m, dimension), math.log(separation.within(points, labels)))
    return found
