"""Renyi accounting: the library's divergences of sampled Gaussians, the tight ones of selections, its conversion to epsilon."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np

from dpcfl_net.privacy.accounting.event_counts import Charges

# The default orders of the library and of the papers: finer ones would give other numbers. Integer ones alone are a rough but
# quick bound.
ORDERS = np.array([1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024], dtype=float)
QUICK = np.array([*range(2, 33), 64, 128, 256], dtype=float)
# The logarithms that the library sums are off by less than this per release and order; at tiny rates its sums fall below zero,
# which its conversion takes for a perfect guarantee.
_ROUNDING = 2e-14


def rdp_epsilon(charges: Charges, delta: float, orders: np.ndarray = ORDERS) -> float:
    """Epsilon at `delta` of all charges together; a function of its arguments alone.

    Poisson-sampled releases count under add/remove adjacency, those over samples of fixed size under replace-one: the caller
    sees to it that only one of the kinds is there.

    Source of the conversion: Canonne, Kamath, Steinke 2020, Proposition 12:
    min over a of rdp(a) + log((a - 1) / a) - (log delta + log a) / (a - 1).
    """
    from dp_accounting.rdp import compute_epsilon

    total = charges.precision * orders / 2
    for noise, rate, steps in charges.poisson:
        total = total + steps * _gaussian(noise, rate, tuple(orders))
    for noise, size, population, steps in charges.fixed:
        total = total + steps * _fixed_size(noise, size, population, tuple(orders))
    for extent, count in charges.selections:
        total = total + count * _selection(extent, tuple(orders))
    return float(compute_epsilon(orders, total, delta)[0]) if total.any() else 0.0


@lru_cache(maxsize=64)
def _gaussian(noise: float, rate: float, orders: tuple[float, ...]) -> np.ndarray:
    return sampled_gaussian(noise, rate, np.array(orders))


@lru_cache(maxsize=64)
def _fixed_size(noise: float, size: int, population: int, orders: tuple[float, ...]) -> np.ndarray:
    return fixed_size_gaussian(noise, size, population, np.array(orders))


@lru_cache(maxsize=64)
def _selection(extent: float, orders: tuple[float, ...]) -> np.ndarray:
    return selection(extent, np.array(orders))


def sampled_gaussian(noise_multiplier: float, rate: float, orders: np.ndarray = ORDERS) -> np.ndarray:
    """Renyi divergences (len(orders),) of one Poisson-sampled Gaussian release under add/remove adjacency; never too small.

    Source: Mironov, Talwar, Zhang 2019. Rate 1 is the plain Gaussian mechanism, a / (2 z^2). The library's series for a
    fractional order takes every term as positive, so it may be high, or not converge and give inf. (a - 1) times the
    divergence is convex in a and 0 at 1: the chord between the whole orders around a fractional one also bounds it.
    """
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    released = dp_accounting.GaussianDpEvent(noise_multiplier)
    if rate == 1:
        return np.asarray(RdpAccountant(orders).compose(released).rdp)
    whole = np.union1d(np.floor(orders), np.ceil(orders))
    needed = np.union1d(whole[whole > 1], orders)
    with _quiet():
        divergences = RdpAccountant(needed).compose(dp_accounting.PoissonSampledDpEvent(rate, released)).rdp
    moments = np.concatenate(([0.0], (needed - 1) * divergences))
    integer = np.concatenate(([True], needed % 1 == 0))
    points = np.concatenate(([1.0], needed))
    chords = np.interp(orders, points[integer], moments[integer]) / (orders - 1)
    return np.maximum(np.minimum(divergences[np.searchsorted(needed, orders)], chords), 0.0) + _ROUNDING


def fixed_size_gaussian(noise_multiplier: float, size: int, population: int, orders: np.ndarray = ORDERS) -> np.ndarray:
    """Renyi divergences (len(orders),) of a release over `size` of `population` without replacement, replace-one adjacency.

    Source: Wang, Balle, Kasiviswanathan 2019, Theorem 27, as the library has it; an upper bound, and not a tight one.
    """
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    released = dp_accounting.GaussianDpEvent(noise_multiplier)
    sampled = dp_accounting.SampledWithoutReplacementDpEvent(population, size, released)
    accountant = RdpAccountant(orders, dp_accounting.NeighboringRelation.REPLACE_ONE)
    return np.asarray(accountant.compose(sampled).rdp) + _ROUNDING


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back the library's warnings of orders that do not converge: they are bounded otherwise."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def selection(epsilon: float, orders: np.ndarray = ORDERS) -> np.ndarray:
    """Renyi divergences (len(orders),) of one selection of range `epsilon`, which the library does not have.

    The largest of log(w e^{at} + (1 - w) e^{a(t - E)}) / (a - 1), w = (1 - e^{t-E}) / (e^t - e^{t-E}), over 0 < t < E,
    never above min(a E^2 / 8, E). Source: Dong, Durfee, Rogers 2020 (the extreme pairs); Bun, Steinke 2016 (the bound).
    """
    low, high = np.zeros_like(orders), np.full_like(orders, epsilon)
    for _ in range(2):
        t = low + (high - low) * np.linspace(0, 1, 1001)[:, None]
        values = _two_point_divergence(t, epsilon, orders)
        best = t[np.argmax(values, axis=0), np.arange(len(orders))]
        width = (high - low) / 1000
        low, high = np.maximum(best - width, 0.0), np.minimum(best + width, epsilon)
    # The divergence of a narrow range drowns in the rounding of its logarithms, and the bound is what is left.
    rounding = 2e-15 * (1 + orders * epsilon) / (orders - 1)
    return np.minimum(np.max(values, axis=0) + rounding, np.minimum(orders * epsilon**2 / 8, epsilon))


def _two_point_divergence(t: np.ndarray, epsilon: float, orders: np.ndarray) -> np.ndarray:
    """Divergences of the pair whose losses are t (n, len(orders)) and t - epsilon."""
    # w and 1 - w are quotients without cancellation or overflow: at t = 0 and t = epsilon they are exactly 0 and 1.
    scale = np.expm1(-epsilon)
    with np.errstate(divide="ignore"):
        rising = np.log(np.expm1(t - epsilon) / scale) + (orders - 1) * t
        falling = np.log(np.expm1(-t) / scale) + orders * (t - epsilon)
    return np.logaddexp(rising, falling) / (orders - 1)
