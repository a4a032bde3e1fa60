"""Cluster recovery against the true clusters, and summaries of test accuracy (computed by the observer)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np


def recovered(true: Sequence[int], found: Sequence[int | None]) -> bool:
    """Return True if the clusters found equal the true clusters up to their names.

    Args:
        true: True cluster of each client, (n,).
        found: Cluster found for each client, (n,); None: no cluster, which counts as not recovered.
    """
    return None not in found and _groups(true) == _groups(found)


def minority_recovered(true: Sequence[int], found: Sequence[int | None]) -> bool | None:
    """Return True if the smallest true cluster (`minority`) is exactly one of the clusters found; None if there is no minority.

    Args:
        true: True cluster of each client, (n,).
        found: Cluster found for each client, (n,); None: no cluster.
    """
    if (smallest := minority(true)) is None:
        return None
    return frozenset(np.flatnonzero(np.asarray(true) == smallest).tolist()) in _groups(found)


def minority(true: Sequence[int]) -> int | None:
    """Return the smallest true cluster; None if several are smallest or there is only one."""
    counted = sorted((count, cluster) for cluster, count in Counter(true).items())
    return counted[0][1] if len(counted) > 1 and counted[0][0] < counted[1][0] else None


def adjusted_rand_index(true: Sequence[int], found: Sequence[int | None]) -> float:
    """Compute the adjusted Rand index: 1 for equal partitions, 0 expected by chance.

    Args:
        true: True cluster of each client, (n,).
        found: Cluster found for each client, (n,); a client without a cluster (None) counts as a cluster with one member.

    Source: Hubert and Arabie 1985. By hand, with scikit-learn's arithmetic: its import costs the observer .7 to 1.5 s per run.
    """
    named = [("found", name) if name is not None else ("alone", client) for client, name in enumerate(found)]
    rows, columns = (np.unique(numbers, return_inverse=True)[1] for numbers in (true, _numbered(named)))
    table = np.zeros((rows.max(initial=-1) + 1, columns.max(initial=-1) + 1), np.int64)
    np.add.at(table, (rows, columns), 1)
    n, both = len(named), int((table**2).sum())
    only_true, only_found = (int((table.sum(axis) ** 2).sum()) - both for axis in (1, 0))
    together, apart = both - n, n * n - both - only_true - only_found
    if only_true == only_found == 0:
        return 1.0
    disagreements = (together + only_found) * (only_found + apart) + (together + only_true) * (only_true + apart)
    return 2.0 * (together * apart - only_found * only_true) / disagreements


def _numbered(names: Sequence[object]) -> list[int]:
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


def assignment_accuracy(true: Sequence[int], found: Sequence[int | None]) -> float:
    """Compute the fraction of clients in the right cluster under the best one-to-one naming; None counts as wrong.

    Args:
        true: True cluster of each client, (n,).
        found: Cluster found for each client, (n,).
    """
    names = best_names(true, found)
    return float(np.mean([names.get(name) == own for own, name in zip(true, found, strict=True)])) if true else 0.0


def best_names(true: Sequence[int], found: Sequence[int | None]) -> dict[int | None, int]:
    """Map found clusters to true clusters, one to one, so that most clients are right.

    Args:
        true: True cluster of each client, (n,).
        found: Cluster found for each client, (n,); clients without a cluster (None) are ignored.

    Returns:
        True cluster by found cluster.
    """
    from scipy.optimize import linear_sum_assignment

    placed = [i for i, name in enumerate(found) if name is not None]
    if not placed:
        return {}
    rows, columns = list(dict.fromkeys(true[i] for i in placed)), list(dict.fromkeys(found[i] for i in placed))
    table = np.zeros((len(rows), len(columns)), np.int64)
    for i in placed:
        table[rows.index(true[i]), columns.index(found[i])] += 1
    return {columns[j]: rows[i] for i, j in zip(*linear_sum_assignment(table, maximize=True), strict=True)}


def accuracy_summary(by_client: Sequence[float], true: Sequence[int]) -> dict[str, float | list[float] | None]:
    """Summarise the test accuracy of one round.

    Args:
        by_client: Test accuracy of each client, (n,), 0 to 1.
        true: True cluster of each client, (n,).

    Returns:
        `accuracy_mean`, `accuracy_minority` (mean of the smallest cluster; None without a minority), `accuracy_worst`,
        `accuracy_p10` (10th percentile), `accuracy_disparity` (maximum minus minimum), `accuracy_by_cluster` (means in order of
        cluster number) and `accuracy_by_client`.
    """
    values, clusters, smallest = np.asarray(by_client, np.float64), np.asarray(true), minority(true)
    return {
        "accuracy_mean": float(values.mean()),
        "accuracy_minority": None if smallest is None else float(values[clusters == smallest].mean()),
        "accuracy_worst": float(values.min()),
        "accuracy_p10": float(np.percentile(values, 10)),
        "accuracy_disparity": float(np.ptp(values)),
        "accuracy_by_cluster": [float(values[clusters == name].mean()) for name in np.unique(clusters)],
        "accuracy_by_client": [float(value) for value in values],
    }


def _groups(names: Sequence[int | None]) -> set[frozenset[int]]:
    members: dict[int, set[int]] = {}
    for client, name in enumerate(names):
        if name is not None:
            members.setdefault(name, set()).add(client)
    return {frozenset(group) for group in members.values()}
