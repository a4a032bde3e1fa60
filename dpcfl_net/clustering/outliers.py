"""Clients that belong to no cluster of others: test of each update against the clusters and the known noise."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from dpcfl_net.clustering import separation
from dpcfl_net.clustering.chi_square import LEVEL, chi_square_quantile
from dpcfl_net.clustering.known_noise import KnownNoise

MOST_DEGREES = 12.0  # of heterogeneity: clients differ more in its size than the chi-square law of more degrees says
MEDIAN = 0.4549  # of the chi-square law with one degree of freedom
SHARE = 0.5  # of the farthest outlier's excess: one outlier among m members gives each of them 1 / m^2 of its own


def outliers(
    points: np.ndarray, labels: np.ndarray, noise: KnownNoise, *, heterogeneity: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Find the points that are farther from every cluster of other points than noise and usual heterogeneity reach.

    A point is an outlier if its smallest value of `residuals` exceeds its reach, p s^2 + h + sqrt(q^2 + (g h)^2): the mean of a
    member's residual, and the upper ends of noise and heterogeneity in quadrature. p s^2 + q is the 1 - LEVEL / n quantile of s^2
    times the chi-square law with p degrees of freedom, and (1 + g) h that of heterogeneity with `_degrees` and median h. h is the
    median over points of (smallest residual - p s^2) / sqrt(w), at least 0, times sqrt(w): means of N records have heterogeneity
    of variance ~ 1 / N and noise of variance 1 / w ~ 1 / N^2, so that heterogeneity in units of the noise is ~ sqrt(w).

    An outlier moves the centre of its cluster and so puts other members beyond reach ("swamping"). Therefore the test sets the
    farthest outliers of each cluster aside, tests the other points without them, and repeats this until it finds none.

    Args:
        points: Coordinates with the distances of the full space, (n, r).
        labels: Cluster of each point, (n,).
        noise: Noise of the points, in the p coordinates of the full space.
        heterogeneity: False: test against noise alone (h = 0).

    Returns:
        True for outliers, (n,), and the reach of each point, (n,).

    Source: Hadi 1992 (swamping and masking by several outliers).
    """
    aside = np.zeros(len(points), bool)
    while True:
        beyond, reach = _beyond(points, labels, aside, noise, heterogeneity)
        far = beyond > reach[1]
        if not far.any():
            return aside, reach.sum(axis=0)
        farthest = np.zeros(int(labels.max()) + 1)
        np.maximum.at(farthest, labels[far], beyond[far])
        aside |= far & (beyond >= farthest[labels] * SHARE)


def _beyond(
    points: np.ndarray, labels: np.ndarray, aside: np.ndarray, noise: KnownNoise, heterogeneity: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return how far each smallest residual exceeds the mean of a member's, (n,), and that mean and the largest usual excess, (2, n).

    Points set aside are in no cluster; their excess counts as -inf, as does that of a point without others to compare it with.
    """
    weights = noise.weights_of(len(points))
    roots, rest = np.sqrt(weights), np.flatnonzero(~aside)
    nearest = residuals(points[rest], labels[rest], weights[rest]).min(axis=1) if len(rest) else np.zeros(0)
    finite = np.isfinite(nearest)
    rest, nearest = rest[finite], nearest[finite]
    usual = 0.0
    if heterogeneity and len(rest):
        usual = max(0.0, float(np.median((nearest - noise.squared_norm) / roots[rest])))
    level, spread = LEVEL / len(points), 0.0
    upper = noise.deviation**2 * (chi_square_quantile(noise.dimension, level) - noise.dimension)
    if usual:
        degrees = _degrees(points[rest], labels[rest], weights[rest], usual, noise)
        spread = usual * (chi_square_quantile(degrees, level) / chi_square_quantile(degrees, 0.5) - 1)
    mean = noise.squared_norm + usual * roots
    beyond = np.full(len(points), -np.inf)
    beyond[rest] = nearest - mean[rest]
    return beyond, np.stack([mean, np.hypot(upper, spread * roots)])


def _degrees(points: np.ndarray, labels: np.ndarray, weights: np.ndarray, usual: float, noise: KnownNoise) -> float:
    """Estimate the directions of heterogeneity, (tr S)^2 / tr S^2 for its covariance S, from products of two points' residuals.

    For independent residuals with noise, their squares have the mean tr S^2 + 2 s^2 tr S + p s^4; the median resists outliers.
    Fewer degrees than MOST_DEGREES are only believed beyond two standard errors of the noise.
    """
    names, own, counts = np.unique(labels, return_inverse=True, return_counts=True)
    centres = np.stack([separation.centre(points, labels == m, weights) for m in names])
    factors = np.sqrt(weights * counts[own] / np.maximum(counts[own] - 1, 1))
    residual = (points - centres[own]) * factors[:, None]
    # Residuals from one centre have the mean product -(p s^2 + h) sqrt(w_i w_j) / W.
    centred = np.where(own[:, None] == own[None], np.outer(factors, factors), 0.0) / np.bincount(own, weights)[own]
    pairs = ~np.eye(len(points), dtype=bool) & (counts[own] > 1)[:, None] & (counts[own] > 1)[None]
    products = (residual @ residual.T + (noise.squared_norm + usual) * centred)[pairs] ** 2
    if not products.size:
        return MOST_DEGREES
    variance = noise.deviation**2
    expected = 2 * variance * usual + noise.dimension * variance**2
    error = 2.34 * expected / (products.size / 2) ** 0.5  # standard error of a median of squared normals
    squared = float(np.median(products)) / MEDIAN - expected - 2 * error
    return max(1.0, min(MOST_DEGREES, usual**2 / max(squared, usual**2 / MOST_DEGREES)))


def unverified(points: np.ndarray, labels: np.ndarray, noise: KnownNoise, marked: np.ndarray) -> np.ndarray:
    """Find the members of clusters that may resemble no other: they are no outliers, but noise may hide that they are.

    A client that resembles no other is at least as far from its cluster as the two closest clusters are from each other, d. Its
    residual then has the law of s^2 times a noncentral chi-square with p degrees of freedom. A member is verified if its residual
    is below the LEVEL / n quantile of that law, as a normal law: noise puts any of n such clients there once in 1,000 rounds.
    Heterogeneity would only lengthen residuals.

    Args:
        points: Coordinates with the distances of the full space, (n, r).
        labels: Cluster of each point, (n,).
        noise: Noise of the points, in the p coordinates of the full space.
        marked: True for outliers, (n,).

    Returns:
        True for points that are neither outliers nor verified, (n,). False for points without others in their cluster, and if
        there is one cluster, so that d is unknown.
    """
    names, own = np.unique(labels, return_inverse=True)
    if len(names) < 2:
        return np.zeros(len(points), bool)
    weights, variance = noise.weights_of(len(points)), noise.deviation**2
    floor = noise.squared_norm
    centres = np.stack([separation.centre(points, labels == m, weights) for m in names])
    masses = np.bincount(own, weights)
    apart = ((centres[:, None] - centres[None]) ** 2).sum(axis=2) - floor * (1 / masses[:, None] + 1 / masses[None])
    np.fill_diagonal(apart, np.inf)
    beyond = max(0.0, float(apart.min())) * weights * (masses[own] - weights) / masses[own]
    far = NormalDist().inv_cdf(1 - LEVEL / len(points))
    lower = floor + beyond - far * np.sqrt(2 * floor * variance + 4 * beyond * variance)
    nearest = residuals(points, labels, weights).min(axis=1)
    hidden: np.ndarray = (lower <= nearest) & ~marked
    return hidden & (np.bincount(own)[own] > 1)


def residuals(points: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Compute squared distances from the centres of clusters, divided by the variance that noise of weight 1 would give them.

    The centre of a point's own cluster is taken without the point. Members of a cluster have p s^2 as mean, s the standard
    deviation of the noise of weight 1, if there is no heterogeneity.

    Args:
        points: Coordinates with the distances of the full space, (n, r).
        labels: Cluster of each point, (n,), values 0..M-1 or less.
        weights: Inverse noise variances relative to each other, (n,).

    Returns:
        Scaled squared distances, (n, M); inf where a cluster has no other point.
    """
    found = np.full((len(points), int(labels.max()) + 1), np.inf)
    for m in np.unique(labels):
        members = labels == m
        mass = float(weights[members].sum())
        squared = ((points - separation.centre(points, members, weights)) ** 2).sum(axis=1)
        others = np.where(members, mass - weights, mass + weights)
        alone = members & (members.sum() == 1)
        found[:, m] = np.where(alone, np.inf, squared * weights * mass / np.where(alone, 1.0, others))
    return found


def grouped(points: np.ndarray, rows: Sequence[int], weights: np.ndarray, reach: np.ndarray) -> list[list[int]]:
    """Join outliers that are within reach of each other.

    Args:
        points: Coordinates of all points, (n, r).
        rows: Indices of the outliers.
        weights: Inverse noise variances of all points, (n,).
        reach: Reach of all points, (n,), as `outliers` returns it.

    Returns:
        Indices of each group; most groups have one point.
    """
    groups: list[list[int]] = []
    for row in rows:
        for group in groups:
            both = [*group, row]
            apart = residuals(points[both], np.array([0] * len(group) + [1]), weights[both])[-1, 0]
            if apart <= reach[row]:
                group.append(row)
                break
        else:
            groups.append([row])
    return groups
