"""Accounting by Renyi divergences: their sum over all mechanisms, and the library's conversion to epsilon."""

from __future__ import annotations

import numpy as np

from dpcfl_net.privacy.accounting.event_counts import MergedEvents

# The default orders of the library and of the papers: finer ones would give other numbers. Integer orders alone are a rough
# but quick bound.
ORDERS = np.array([1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024], dtype=float)
QUICK = np.array([*range(2, 33), 64, 128, 256], dtype=float)


def rdp_epsilon(events: MergedEvents, delta: float, orders: np.ndarray = ORDERS) -> float:
    """Compute epsilon of all mechanisms together by Renyi accounting; a function of its arguments alone.

    Args:
        events: Composed mechanisms. Poisson-sampled releases count under add/remove adjacency, those over samples of fixed size
            under replace-one: the caller must pass only one of these kinds.
        delta: Target delta, in (0, 1).
        orders: Renyi orders above 1, (n,).

    Returns:
        Epsilon, >= 0.

    Source of the conversion: Canonne, Kamath, Steinke 2020, Proposition 12:
    min over a of rdp(a) + log((a - 1) / a) - (log delta + log a) / (a - 1).
    """
    from dp_accounting.rdp import compute_epsilon

    total = np.zeros(len(orders))
    for mechanism in events.mechanisms:
        total = total + mechanism.renyi(orders)
    return float(compute_epsilon(orders, total, delta)[0]) if total.any() else 0.0
