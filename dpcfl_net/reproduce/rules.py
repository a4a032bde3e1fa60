"""Rules that estimate the number of clusters from n first updates: the paper's, this project's and others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from dpcfl_net.clustering import em, mixture, noise_spectrum, separation
from dpcfl_net.clustering.gram import centred_gram, coordinates

MOST = 8


@dataclass(frozen=True, eq=False)
class RoundEvidence:
    """Input of the rules from one round.

    Attributes:
        updates: (n, p) float32.
        points: Exact coordinates, (n, r).
        fits: Mixtures of M = 1 to most + 1 components in M - 1 components.
        dimension: Number of parameters p.
        deviation: Standard deviation of the noise in each coordinate.
        seed: Seed of the fits.
    """

    updates: np.ndarray
    points: np.ndarray
    fits: Mapping[int, mixture.MixtureFit]
    dimension: int
    deviation: float
    seed: int

    @classmethod
    def at(cls, updates: np.ndarray, deviation: float, seed: int) -> RoundEvidence:
        """Return the evidence of (n, p) float32 updates with a known standard deviation of the noise."""
        fits = {m: mixture.fit(updates, clusters=m, seed=seed) for m in range(1, most(len(updates)) + 2)}
        return cls(updates, coordinates(centred_gram(updates)), fits, updates.shape[1], deviation, seed)

    @property
    def candidates(self) -> range:
        return range(2, most(len(self.points)) + 1)

    @property
    def scores(self) -> dict[int, float]:
        return {m: fit.mss for m, fit in self.fits.items() if m > 1}


def most(rows: int) -> int:
    """Return the largest M considered for `rows` updates."""
    return min(MOST, rows // 2)


def known_noise(evidence: RoundEvidence) -> int:
    """This project's rule: the smallest M that explains the updates with the known noise, if separated; else `largest_fall`."""
    explained = next(
        (
            m
            for m in (1, *evidence.candidates)
            if noise_spectrum.explained(evidence.points, evidence.fits[m].labels, evidence.dimension, evidence.deviation)
        ),
        None,
    )
    return mixture.choose(evidence.scores, evidence.candidates, explained=explained)


def largest_fall(evidence: RoundEvidence) -> int:
    """This project's rule for unknown noise: among M with effective MSS >= 2.5 the largest drop of the score to M + 1."""
    return mixture.choose(evidence.scores, evidence.candidates)


def published(evidence: RoundEvidence) -> int:
    """The paper's published code: the largest MSS in two scaled components."""
    return mixture.fit(evidence.updates, clusters=None, max_clusters=MOST, space="pca2", seed=evidence.seed).clusters


def largest_plain(evidence: RoundEvidence) -> int:
    """The paper as printed: the largest MSS of the mixture in all dimensions."""
    plain = {
        m: mixture.fit(evidence.updates, clusters=m, space="full", seed=evidence.seed).mss_plain for m in evidence.candidates
    }
    return max(plain, key=lambda m: plain[m])


def directions(evidence: RoundEvidence) -> int:
    """1 + the number of singular values above the edge of the known noise."""
    rows = len(evidence.points)
    return 1 + noise_spectrum.beyond(evidence.points, evidence.dimension, evidence.deviation, rows - 1)


def above_null(evidence: RoundEvidence) -> int:
    """The largest M whose effective MSS exceeds the .99 quantile of pure noise at this n and p."""
    cuts = null(len(evidence.points), evidence.dimension)[0]
    return max((m for m in evidence.candidates if evidence.fits[m].mss > cuts[m]), default=1)


def gap(evidence: RoundEvidence) -> int:
    """The gap statistic against pure noise (Tibshirani, Walther, Hastie 2001): smallest M with gap(M) >= gap(M+1) - s(M+1)."""
    _, mean, spread = null(len(evidence.points), evidence.dimension)
    within = {m: separation.within(evidence.points, fit.labels) for m, fit in evidence.fits.items()}
    gaps = {m: mean[m] - math.log(value) for m, value in within.items()}
    return next((m for m in (1, *evidence.candidates) if gaps[m] >= gaps[m + 1] - spread[m + 1]), evidence.candidates[-1])


def bayes(evidence: RoundEvidence) -> int:
    """The smallest BIC of spherical mixtures in the first eight principal components."""
    points = evidence.points[:, :MOST]
    n, d = points.shape
    floor = 1e-6 * float((points**2).sum()) / (n * d)

    def criterion(m: int) -> float:
        found = em.spherical(points, m, dimension=d, floor=floor, seed=evidence.seed)
        return -2 * n * found.log_likelihood + (m * (d + 2) - 1) * math.log(n)

    return min((1, *evidence.candidates), key=criterion)


RULES: dict[str, Callable[[RoundEvidence], int]] = {
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
    """Simulate rounds of pure noise with standard deviation 1.

    Args:
        rows: Number of updates n.
        dimension: Number of parameters p.
        draws: Number of rounds.

    Returns:
        By M: .99 quantile of the effective MSS; mean, and s, of the log within-cluster scatter. s is the standard deviation
        times sqrt(1 + 1 / draws), as in the gap statistic.
    """
    rng = np.random.default_rng([rows, dimension])
    samples = [_noise_fits(rng, rows, dimension, seed) for seed in range(draws)]
    scores = {m: np.quantile([fits[m][0] for fits in samples], 0.99) for m in samples[0]}
    logs = {m: np.array([fits[m][1] for fits in samples]) for m in samples[0]}
    more = math.sqrt(1 + 1 / draws)
    return scores, {m: float(v.mean()) for m, v in logs.items()}, {m: float(v.std()) * more for m, v in logs.items()}


def _noise_fits(rng: np.random.Generator, rows: int, dimension: int, seed: int) -> dict[int, tuple[float, float]]:
    """Effective MSS and log within-cluster scatter by M, for one round of noise."""
    # The triangular factor of a Wishart matrix (Bartlett) has the distances of rows of `dimension` normals.
    factor = np.tril(rng.standard_normal((rows, rows)), -1)
    factor[np.arange(rows), np.arange(rows)] = np.sqrt(rng.chisquare(dimension - np.arange(rows)))
    points = coordinates(centred_gram(factor))
    found = {}
    for m in range(1, most(rows) + 2):
        labels = mixture.fit(factor, clusters=m, seed=seed).labels
        found[m] = (separation.effective(points, labels, m, dimension), math.log(separation.within(points, labels)))
    return found
