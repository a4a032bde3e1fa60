"""Local rate of convergence of EM for spherical Gaussian mixtures: exact for two components, measured for more."""

from __future__ import annotations

import math

import numpy as np

SEPARATIONS = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0)  # SS of every pair of the four components
SMALL = 3.0  # SS from which the overlap counts as small: complete separation in the paper
POINTS = 50_000  # at SS 4 a few of them lie between two components
CLOSE = 1e-5  # distance to the fixed point at which the rate is read
MOST_ITERATIONS = 20_000
Parameters = tuple[np.ndarray, np.ndarray, np.ndarray]  # weights (M,), means (M, d), variances per coordinate (M,)


def tail(x: float) -> float:
    """Q(x): probability that a standard normal exceeds x."""
    return math.erfc(x / math.sqrt(2)) / 2


def overlap(separation: float) -> float:
    """Overlap of two components, 2 Q(SS)."""
    return 2 * tail(separation)


def exact_rates() -> list[tuple[float, float, float]]:
    """Compute the rate for two components of equal, known weight and variance 1 with means -s and s, and infinitely many points.

    EM maps a mean m to E[x tanh(m x)]; the rate is the derivative at m = s, E[x^2 / cosh^2(s x)].

    Returns:
        (separation s, overlap, rate) for s from 1 to 8.
    """
    found = []
    for s in range(1, 9):
        x = np.linspace(-12 / s, 12 / s, 200_001)  # cosh^-2 is below 1e-9 beyond
        density = np.exp(-((x - s) ** 2) / 2) / math.sqrt(2 * math.pi)
        found.append((float(s), overlap(s), float(np.trapezoid(x**2 / np.cosh(s * x) ** 2 * density, x))))
    return found


def measured_rates(seed: int) -> dict[float, float]:
    """Measure the rate at which EM approaches its fixed point, for four components with equal distances in 3 dimensions.

    Args:
        seed: Seed of the points.

    Returns:
        Separation to the last ratio of distances to the fixed point.
    """
    rng, found = np.random.default_rng(seed), {}
    corners = np.array([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]) / math.sqrt(8)  # at distance 1
    for separation in SEPARATIONS:
        true = (np.full(4, 0.25), 2 * separation * corners, np.ones(4))
        points = true[1][rng.integers(4, size=POINTS)] + rng.standard_normal((POINTS, 3))
        path = [flat(true)]
        now = true
        while len(path) < 2 or np.linalg.norm(path[-1] - path[-2]) > CLOSE**2:
            if len(path) > MOST_ITERATIONS:
                raise ArithmeticError(f"EM has not converged after {MOST_ITERATIONS} iterations at separation {separation:g}")
            now = step(points, now)
            path.append(flat(now))
        distances = [float(np.linalg.norm(one - path[-1])) for one in path]
        near = next(k for k, distance in enumerate(distances) if distance < CLOSE)
        found[separation] = distances[near] / distances[near - 1]
    return found


def ratio_to_truth(seed: int) -> float:
    """Run EM from the true parameters on 21 points {3, 6, 6, 6} in 1,000 dimensions at a separation of 3.

    Args:
        seed: Seed of the points.

    Returns:
        Last ratio of distances to the true parameters.
    """
    rng, dimension, sizes = np.random.default_rng(seed), 1000, np.array([3, 6, 6, 6])
    means = 3 * math.sqrt(2) * np.eye(4, dimension)  # pairwise distance 2 SS
    true = (sizes / sizes.sum(), means, np.ones(4))
    points = np.repeat(means, sizes, axis=0) + rng.standard_normal((sizes.sum(), dimension))
    now, distances = true, []
    for _ in range(20):
        now = step(points, now)
        distances.append(float(np.linalg.norm(flat(now) - flat(true))))
    return distances[-1] / distances[-2]


def step(points: np.ndarray, parameters: Parameters) -> Parameters:
    """One iteration of EM.

    Args:
        points: Points, (n, d).
        parameters: Weights, means and variances.

    Returns:
        The next weights, means and variances.
    """
    weights, means, variances = parameters
    dimension = points.shape[1]

    def squared(centres: np.ndarray) -> np.ndarray:
        return (points**2).sum(axis=1)[:, None] - 2 * points @ centres.T + (centres**2).sum(axis=1)

    logs = np.log(weights) - dimension / 2 * np.log(variances) - squared(means) / (2 * variances)
    posteriors = np.exp(logs - logs.max(axis=1, keepdims=True))
    posteriors /= posteriors.sum(axis=1, keepdims=True)
    mass = posteriors.sum(axis=0)
    moved = posteriors.T @ points / mass[:, None]
    return mass / len(points), moved, (posteriors * squared(moved)).sum(axis=0) / (mass * dimension)


def flat(parameters: Parameters) -> np.ndarray:
    """Return all parameters as one vector."""
    return np.concatenate([part.ravel() for part in parameters])
