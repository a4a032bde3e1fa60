"""Membership scores across rounds: likelihood ratio of a client's update against the other clients' (FedMIA), ROC curves, and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

REFERENCES = 3  # fewest other clients from which mean and variance of a round are estimated
LEAST_VARIANCE = 1e-12  # of scores of order 1; equal scores of all other clients
RESAMPLES = 2000
LARGEST_EXPONENT = 700.0  # e^709.8 is the largest float
RATES = (0.1, 0.01, 0.001)  # false positive rates of the table
ALARM = 0.05  # largest probability that `above_limit` lists any rate by chance


def log_tail(target: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Compute the one-tailed log-likelihood ratio of one round.

    The other clients do not hold the record, so their scores of it show the distribution of a score without the record. It is
    taken as Gaussian for each record; the result is the logarithm of its cumulative distribution at the target's score.

    Args:
        target: Scores of n records under the target's update, (n,); members have larger ones.
        others: Scores under the updates of k other clients, (k, n), k at least REFERENCES.

    Returns:
        (n,), at most 0; a member's is near 0.

    Raises:
        ValueError: If there are fewer than REFERENCES other clients.
    """
    from scipy.stats import norm

    if len(others) < REFERENCES:
        raise ValueError(f"scores of {len(others)} other clients: must be at least {REFERENCES}")
    deviation = np.sqrt(others.var(axis=0, ddof=1) + LEAST_VARIANCE)
    tail: np.ndarray = norm.logcdf((target - others.mean(axis=0)) / deviation)
    return tail


@dataclass(frozen=True, eq=False)
class Scored:
    """Scores of one client's candidate records, larger for likely members.

    Attributes:
        client: Number of the client.
        members: Scores of records in the client's training data, (n,).
        others: Scores of records that no client trained on, (m,).
    """

    client: int
    members: np.ndarray
    others: np.ndarray


@dataclass(frozen=True)
class Rate:
    """True positive rate at the threshold of one false positive rate.

    Attributes:
        asked: Largest false positive rate allowed.
        false: Measured false positive rate, at most `asked`.
        true: True positive rate at the same threshold.
        low: Lower end of its 95 % interval.
        high: Upper end.
    """

    asked: float
    false: float
    true: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """Result of the attack on all clients.

    Attributes:
        auc: Probability that a member's score exceeds a non-member's; ties count half.
        low: Lower end of its 95 % interval.
        high: Upper end.
        rates: One for each of RATES that the number of non-members can show.
        false: False positive rates of the ROC curve.
        true: True positive rates of the ROC curve.
    """

    auc: float
    low: float
    high: float
    rates: tuple[Rate, ...]
    false: tuple[float, ...]
    true: tuple[float, ...]


def curve(scored: list[Scored]) -> Curve:
    """Compute AUC and true positive rates over all clients.

    Intervals resample whole clients (bootstrap), since the scores of one client's records share its noise. Their percentiles are
    expanded to the width of a t interval: percentiles of 2.5 and 97.5 % cover too little with few clients.

    Source: Hesterberg 2015, What Teachers Should Know About the Bootstrap, section 3.3 (expanded percentile interval).

    Args:
        scored: Scores of each attacked client, at least one.
    """
    rng = np.random.default_rng(0)
    drawn = [rng.integers(len(scored), size=len(scored)) for _ in range(RESAMPLES)]
    members, others = _pooled(scored)
    shown = _shown(scored)
    again = [_pooled([scored[k] for k in draw]) for draw in drawn]
    low, high = _interval([auc(*pair) for pair in again], len(scored))
    rates = []
    for rate in shown:
        false, true = at_rate(members, others, rate)
        low_true, high_true = _interval([at_rate(*pair, rate)[1] for pair in again], len(scored))
        rates.append(Rate(rate, false, true, low_true, high_true))
    thresholds = np.concatenate([[np.inf], np.quantile(np.concatenate([members, others]), np.linspace(1, 0, 201))])
    false_rates, true_rates = ([float((side >= at).mean()) for at in thresholds] for side in (others, members))
    return Curve(auc(members, others), low, high, tuple(rates), tuple(false_rates), tuple(true_rates))


def auc(members: np.ndarray, others: np.ndarray) -> float:
    """Compute the area under the ROC curve.

    Args:
        members: Scores of members, (n,).
        others: Scores of non-members, (m,).
    """
    from scipy.stats import rankdata

    ranks = rankdata(np.concatenate([members, others]))[: len(members)]
    return float((ranks.sum() / len(members) - (len(members) + 1) / 2) / len(others))


def at_rate(members: np.ndarray, others: np.ndarray, rate: float) -> tuple[float, float]:
    """Find the lowest threshold whose false positive rate is at most `rate`.

    Args:
        members: Scores of members, (n,).
        others: Scores of non-members, (m,).
        rate: Largest false positive rate.

    Returns:
        False and true positive rate of "score above the threshold".
    """
    threshold = _threshold(others, rate)
    return float((others > threshold).mean()), float((members > threshold).mean())


def _threshold(others: np.ndarray, rate: float) -> float:
    return float(np.sort(others)[::-1][min(math.floor(rate * len(others)), len(others) - 1)])


def _shown(scored: list[Scored]) -> list[float]:
    """Those of RATES that the number of non-members can show."""
    return [rate for rate in RATES if rate * sum(len(each.others) for each in scored) >= 1]


def most_true_positives(false: float, epsilon: float, delta: float) -> float:
    """Bound the true positive rate of any test under (epsilon, delta)-DP.

    Args:
        false: False positive rate.
        epsilon: Epsilon; inf gives 1.
        delta: Delta.

    Source: Kairouz, Oh, Viswanath 2015 (hypothesis-testing region of differential privacy).
    """
    if math.isinf(epsilon):
        return 1.0
    factor = math.exp(min(epsilon, LARGEST_EXPONENT))
    return float(min(1.0, factor * false + delta, 1 - (1 - delta - false) / factor))


def above_limit(scored: list[Scored], epsilon: float, delta: float) -> list[float]:
    """List the false positive rates at which an attack found more than (epsilon, delta)-DP allows.

    Under (epsilon, delta)-DP a client's true and false positive rate at a threshold that does not depend on it have expectations with
    E[1 - true + e^epsilon false] >= 1 - delta. The threshold is that of the clients before. Records of one client may share all of its
    noise, so each client counts as one observation between 0 and 1 + e^epsilon: the probability that their mean is so small is at most
    exp(-n KL), by the Chernoff bound of Hoeffding 1963, Theorem 1, which holds for martingales.

    Args:
        scored: Scores of each attacked client. The clients are taken as independent, nothing is assumed of the records of one.
        epsilon: Epsilon; inf allows everything.
        delta: Delta.

    Returns:
        Rates of RATES; any with a probability of at most ALARM if (epsilon, delta)-DP holds.
    """
    shown = _shown(scored)
    return [rate for rate in shown if _chance(scored, rate, epsilon, delta) < ALARM / len(shown)]


def least_clients(scored: list[Scored], epsilon: float, delta: float) -> float:
    """Compute the number of clients below which `above_limit` lists no rate, also if the attack makes no error; inf for epsilon inf.

    Args:
        scored: Scores of each attacked client.
        epsilon: Epsilon.
        delta: Delta.
    """
    if math.isinf(epsilon):
        return math.inf
    within = math.log1p(-_least_errors(epsilon, delta))
    return 1 + math.ceil(math.log(ALARM / max(1, len(_shown(scored)))) / within)  # the first one gives a threshold only


def _chance(scored: list[Scored], rate: float, epsilon: float, delta: float) -> float:
    """Bound the probability of so few errors as at the thresholds of a false positive rate under (epsilon, delta)-DP."""
    if math.isinf(epsilon):
        return 1.0
    factor, before, errors = math.exp(min(epsilon, LARGEST_EXPONENT)), np.empty(0), []
    for each in scored:
        if rate * len(before) >= 1:
            threshold = _threshold(before, rate)
            missed, false = (each.members <= threshold).mean(), (each.others > threshold).mean()
            errors.append((missed + factor * false) / (1 + factor))
        before = np.concatenate([before, each.others])
    least, found = _least_errors(epsilon, delta), float(np.mean(errors)) if errors else 1.0
    if found >= least:
        return 1.0
    divergence = (1 - found) * (math.log1p(-found) - math.log1p(-least))
    divergence += found * math.log(found / least) if found else 0.0
    return math.exp(-len(errors) * divergence)


def _least_errors(epsilon: float, delta: float) -> float:
    """Least expectation of (1 - true + e^epsilon false) / (1 + e^epsilon)."""
    return (1 - delta) / (1 + math.exp(min(epsilon, LARGEST_EXPONENT)))


def _pooled(scored: list[Scored]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([each.members for each in scored]), np.concatenate([each.others for each in scored])


def _interval(values: list[float], clients: int) -> tuple[float, float]:
    """Interval of a figure from its values in resamples of `clients` clients; one client says nothing about others."""
    from scipy.stats import norm, t

    if clients == 1:
        return 0.0, 1.0
    tail = float(norm.cdf(-math.sqrt(clients / (clients - 1)) * t.ppf(0.975, clients - 1)))
    low, high = np.quantile(values, (tail, 1 - tail))
    return float(low), float(high)
