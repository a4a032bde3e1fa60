"""Constant pace: every step computes the same number of physical batches, so that time does not reveal the sampled batch size.

A step's batch has Binomial(records, rate) records, with Poisson sampling and with random allocation. It is cut to `room` records,
the same for every step of a client's plan. Let beta bound the probability that any batch of the run is larger. Sampling does not
depend on data, so the outputs M' with cut batches and M without differ by at most beta in total variation, on either of two
adjacent data sets D and D':

    P[M'(D) in S] <= P[M(D) in S] + beta <= e^epsilon P[M(D') in S] + delta' + beta
                  <= e^epsilon P[M'(D') in S] + delta' + (1 + e^epsilon) beta.

So a part of delta is reserved for (1 + e^epsilon) beta (`Protocol.kept_delta`), and the accountant gets the rest as delta'.
beta is chosen for an epsilon of 3 times the target plus 10, so that the same holds for the larger epsilon under replacement of
a record.
"""

from __future__ import annotations

import math

_SMALLEST = -700.0  # logarithm of a probability that a float still holds in full precision


def covered_epsilon(epsilon: float) -> float:
    """Return the largest epsilon that the delta reserved for cut batches covers, where `epsilon` is the target."""
    return 3 * epsilon + 10


def room(records: int, rate: float, steps: int, epsilon: float, kept_delta: float) -> int:
    """Compute how many records a step has room for.

    Args:
        records: The client's number of records N.
        rate: Sampling rate of each step, in (0, 1].
        steps: Sampled steps of the client's whole plan, which share beta.
        epsilon: Target epsilon.
        kept_delta: Part of delta reserved for cut batches.

    Returns:
        The smallest R with P[Binomial(records, rate) > R] <= beta / steps, by `log_tail`; `records` at rate 1.
    """
    # log(1 + e^x) is below x + log 2 for every x >= 0.
    limit = math.log(kept_delta) - covered_epsilon(epsilon) - math.log(2) - math.log(max(steps, 1))
    low, high = math.floor(records * rate), records
    while low < high:  # the tail falls with R
        middle = (low + high) // 2
        if log_tail(middle, records, rate) <= limit:
            high = middle
        else:
            low = middle + 1
    return high


def log_tail(most: int, records: int, rate: float) -> float:
    """Bound the logarithm of P[Binomial(records, rate) > most] from above.

    The exact probability of a large epsilon's tail is below the smallest float: Chernoff's bound, exp(-N KL), replaces it there.

    Args:
        most: Records that a batch may have, below `records`.
        records: Number of records N.
        rate: Sampling rate, in (0, 1).
    """
    from scipy.special import rel_entr
    from scipy.stats import binom

    exact = float(binom.logsf(most, records, rate))
    share = (most + 1) / records
    chernoff = -records * float(rel_entr(share, rate) + rel_entr(1 - share, 1 - rate)) if share > rate else 0.0
    return exact if exact > _SMALLEST else chernoff
