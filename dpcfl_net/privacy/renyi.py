"""Renyi differential privacy of the events, and its conversion to epsilon."""

from __future__ import annotations

import math

import numpy as np

# The default orders of the accountants that the papers used: finer ones would give other numbers.
ORDERS = np.array([1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024], dtype=float)


def to_epsilon(divergences: np.ndarray, delta: float) -> float:
    """Epsilon at delta of a mechanism with Renyi divergences (len(ORDERS),).

    Source: Canonne, Kamath, Steinke 2020, Proposition 12:
    min over a of rdp(a) + log((a - 1) / a) - (log delta + log a) / (a - 1).
    """
    values = divergences + np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)
    return max(0.0, float(np.min(values)))


def sampled_gaussian(noise_multiplier: float, rate: float) -> np.ndarray:
    """Renyi divergences (len(ORDERS),) of one Poisson-sampled Gaussian release under add/remove adjacency.

    Source: Mironov, Talwar, Zhang 2019. Rate 1 is the plain Gaussian mechanism, a / (2 z^2). Fractional orders are integrated
    numerically: their published series may fail to converge, and an order would then be lost.
    """
    if rate == 1:
        return ORDERS / (2 * noise_multiplier**2)
    return np.array([_log_moment(noise_multiplier, rate, order) / (order - 1) for order in ORDERS])


def _log_moment(z: float, q: float, order: float) -> float:
    """log of the mean over x ~ N(0, z^2) of (1 - q + q exp((2x - 1) / (2 z^2)))^order."""
    from scipy.special import gammaln, logsumexp

    if order.is_integer():
        k = np.arange(order + 1)
        choose = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
        return float(logsumexp(choose + k * math.log(q) + (order - k) * math.log1p(-q) + (k * k - k) / (2 * z**2)))
    # The integrand is analytic within pi z^2 of the axis: the sum's error is exp(-2 pi^2 z^2 / spacing), beyond all digits.
    spacing = min(z / 16, z**2 / 2)
    x = np.arange(-12 * z, order + 12 * z, spacing)
    ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z**2))
    return float(logsumexp(order * ratio - x**2 / (2 * z**2))) + math.log(spacing / (z * math.sqrt(2 * math.pi)))


def selection(epsilon: float) -> np.ndarray:
    """Renyi divergences (len(ORDERS),) of one selection of range `epsilon`.

    The largest of log(w e^{at} + (1 - w) e^{a(t - E)}) / (a - 1), w = (1 - e^{t-E}) / (e^t - e^{t-E}), over 0 < t < E,
    never above min(a E^2 / 8, E). Source: Dong, Durfee, Rogers 2020 (the extreme pairs); Bun, Steinke 2016 (the bound).
    """
    low, high = np.zeros_like(ORDERS), np.full_like(ORDERS, epsilon)
    for _ in range(2):
        t = low + (high - low) * np.linspace(0, 1, 1001)[:, None]
        values = _two_point_divergence(t, epsilon)
        best = t[np.argmax(values, axis=0), np.arange(len(ORDERS))]
        width = (high - low) / 1000
        low, high = np.maximum(best - width, 0.0), np.minimum(best + width, epsilon)
    return np.minimum(np.max(values, axis=0), np.minimum(ORDERS * epsilon**2 / 8, epsilon))


def _two_point_divergence(t: np.ndarray, epsilon: float) -> np.ndarray:
    """Divergences of the pair whose losses are t (n, len(ORDERS)) and t - epsilon."""
    w = -np.expm1(t - epsilon) / (np.exp(t) - np.exp(t - epsilon))
    with np.errstate(divide="ignore"):
        rising, falling = np.log(w) + ORDERS * t, np.log1p(-w) + ORDERS * (t - epsilon)
    return np.logaddexp(rising, falling) / (ORDERS - 1)
