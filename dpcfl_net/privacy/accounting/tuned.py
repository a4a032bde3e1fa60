"""Epsilon of the best of a random number of trials, for a trusted selector that releases no other trial."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.accounting.accountant import check_question, deltas, rounded_up
from dpcfl_net.privacy.accounting.event_counts import EventCounts
from dpcfl_net.privacy.accounting.rdp import ORDERS
from dpcfl_net.privacy.events.base import Event

Law = Literal["geometric", "logarithmic", "poisson"]
LEAST_MEAN, MOST_TRIALS = 1.01, 1e6  # means
SHAPE = {"geometric": 1, "logarithmic": 0}  # eta of the truncated negative binomial distribution
ASSUMES = (
    "a trusted selector draws the number of trials from the law and keeps it secret, runs each trial with fresh noise, and "
    "releases the best one only; a trial is drawn independently of the others, and its score is part of the output that its events "
    "pay for, or comes from public data"
)


@dataclass(frozen=True)
class Trials:
    """Distribution of the number of trials.

    Attributes:
        law: "geometric" (from 1), "logarithmic" (from 1), or "poisson" (from 0: then nothing is chosen).
        mean: Its mean, at least 1; at least 1.01 for the first two.
    """

    law: Law
    mean: float

    def __post_init__(self) -> None:
        if self.law not in get_args(Law):
            raise ValueError(f"law must be {', '.join(get_args(Law)[:-1])} or {get_args(Law)[-1]}, got {self.law!r}")
        if isinstance(self.mean, bool) or not isinstance(self.mean, (int, float)) or not 1 <= self.mean <= MOST_TRIALS:
            raise ValueError(f"mean must be a number from 1 to {MOST_TRIALS:,.0f}, got {self.mean!r}")
        if self.law != "poisson" and self.mean < LEAST_MEAN:
            raise ValueError(f"mean must be at least {LEAST_MEAN} for law {self.law}, got {self.mean!r}")

    @property
    def gamma(self) -> float | None:
        """Parameter gamma in (0, 1) of geometric and logarithmic: P[K=k] is proportional to (1-gamma)^k, or to that over k."""
        if self.law == "poisson":
            return None
        if self.law == "geometric":
            return 1 / self.mean
        from scipy.optimize import brentq

        # With u = log(1/gamma) the mean is expm1(u) / u, which grows with u.
        return math.exp(-float(brentq(lambda u: math.expm1(u) / u - self.mean, 1e-9, 50.0, xtol=1e-14)))


def tuned_epsilon(events: Iterable[Event], delta: float, trials: Trials, adjacency: Adjacency = "zero-out") -> float:
    """Compute epsilon of the best of a random number of trials, each with the given events.

    It holds for a trusted selector under the conditions of `ASSUMES`. A server that sees every trial needs their composition.

    Args:
        events: Mechanisms of one trial.
        delta: Target delta, in (0, 1).
        trials: Distribution of the number of trials.
        adjacency: "zero-out" or "replace-one".

    Returns:
        Epsilon, rounded up to seven digits; inf if an event has no guarantee.

    Raises:
        ValueError: If an argument is out of range, or an event has no Renyi bound under this adjacency.

    Source: Papernot and Steinke 2022, Theorem 2 (eta 1 and 0) and Theorem 6 (Poisson). Conversion: Canonne, Kamath, Steinke 2020.
    """
    from dp_accounting.rdp import compute_epsilon

    check_question(delta, adjacency, "rdp")
    listed = list(events)
    merged = EventCounts().add(listed).checked(adjacency, "rdp")
    if merged.unprotected:
        return math.inf
    one = sum((mechanism.renyi(ORDERS) for mechanism in merged.mechanisms), np.zeros(len(ORDERS)))
    if not one.any():
        return 0.0
    added = _poisson(listed, trials.mean, adjacency) if trials.gamma is None else _negative_binomial(one, trials)
    bound = one + added + math.log(trials.mean) / (ORDERS - 1)
    bound = np.minimum.accumulate(bound[::-1])[::-1]  # Renyi divergences grow with the order
    return rounded_up(float(compute_epsilon(ORDERS, bound, delta)[0]))


def _negative_binomial(one: np.ndarray, trials: Trials) -> float:
    """(1 + eta) min over orders of (1 - 1/order) rdp + log(1/gamma) / order; the same at every order of the result."""
    assert trials.gamma is not None
    return (1 + SHAPE[trials.law]) * float(np.min((1 - 1 / ORDERS) * one - math.log(trials.gamma) / ORDERS))


def _poisson(events: list[Event], mean: float, adjacency: Adjacency) -> np.ndarray:
    """The mean times delta of one trial at epsilon log(1 + 1/(order - 1)), (orders,)."""
    return mean * deltas(events, np.log1p(1 / (ORDERS - 1)).tolist(), adjacency)
