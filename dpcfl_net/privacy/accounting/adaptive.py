"""Runs whose plans may depend on the releases of earlier runs: a Renyi filter of one order, which the budget fixes.

Joint composition holds for plans that were fixed before the first run. It is not enough that all plans so far stay below epsilon at
delta together: who chooses the next plan may have seen the privacy loss so far, and take a plan with a heavy tail after a small
loss, and one without after a large loss. Delta then exceeds that of either pair (1.8 times in a test). Renyi divergences of one order
add up for any choices, if the order and the limit are fixed before the first run.

The record book holds a budget (E, D) as follows. Runs with equal plans are composed jointly at (1 - s) D. The first plan is chosen
before any release, so the largest number of such runs that fits E is fixed then, and those that happen are a part of them. Runs with
different plans go through the filter at s D, with the order of E and s D. Proof of (E, D): sum max(P(t) - e^E Q(t), 0) over all transcripts t of a
record's runs under both data sets. Transcripts with equal plans keep their probabilities if the person who chooses stops instead of
choosing another plan: they add at most (1 - s) D. Transcripts with different plans keep theirs if that person stops before the filter is
exceeded: they add at most s D. A single run may use all of D: if it needs more than (1 - s) D, no second run fits.

Source: Feldman and Zrnic 2021, "Individual privacy accounting via a Renyi filter"; conversion: Canonne, Kamath, Steinke 2020.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.accounting.event_counts import EventCounts
from dpcfl_net.privacy.accounting.rdp import ORDERS
from dpcfl_net.privacy.events.base import Event


def order_for(epsilon: float, delta: float) -> float:
    """Choose the order of a filter, from the budget alone: the one that leaves most room for Gaussian releases.

    Args:
        epsilon: Epsilon of the budget.
        delta: Delta for runs with different plans.

    Returns:
        Order above 1.
    """
    return float(ORDERS[np.argmax((epsilon - _conversion(ORDERS, delta)) / ORDERS)])


def filtered_epsilon(events: Iterable[Event], delta: float, order: float, adjacency: Adjacency = "zero-out") -> float:
    """Compute epsilon of adaptively chosen mechanisms by one Renyi order.

    Args:
        events: All mechanisms so far.
        delta: Target delta, in (0, 1).
        order: Renyi order above 1, fixed before the first mechanism.
        adjacency: "zero-out" or "replace-one".

    Returns:
        Epsilon, >= 0; inf if an event has no guarantee. Within the budget if it is at most the epsilon for which the order was fixed.

    Raises:
        ValueError: If the order is out of range, or an event has no Renyi bound under this adjacency.
    """
    if isinstance(order, bool) or not isinstance(order, (int, float)) or not 1 < order <= ORDERS[-1]:
        raise ValueError(f"order must be above 1 and at most {ORDERS[-1]:g}, got {order!r}")
    merged = EventCounts().add(events).checked(adjacency, "rdp")
    if merged.unprotected:
        return math.inf
    orders = np.array([float(order)])
    spent = sum((mechanism.renyi(orders) for mechanism in merged.mechanisms), np.zeros(1))
    return max(float((spent + _conversion(orders, delta))[0]), 0.0)


def _conversion(orders: np.ndarray, delta: float) -> np.ndarray:
    """Epsilon at `delta` of a Renyi divergence of 0."""
    return np.asarray(np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1))
