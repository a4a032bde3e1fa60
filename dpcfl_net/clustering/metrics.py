"""What the observer, who knows the true clusters, measures: recovery of clusters and summaries of accuracy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def recovered(true: Sequence[int], found: Sequence[int | None]) -> bool:
    """Whether every client was put with exactly the clients of its true cluster (names of clusters do not matter)."""
    return None not in found and _groups(true) == _groups(found)


def minority_recovered(true: Sequence[int], found: Sequence[int | None]) -> bool:
    """Whether the smallest true cluster (of equals the one named first, see `minority`) is one found cluster, exactly."""
    small = frozenset(np.flatnonzero(np.asarray(true) == minority(true)).tolist())
    return small in _groups(found)


def minority(true: Sequence[int]) -> int:
    """The smallest true cluster; of equally small ones the lowest number."""
    names, counts = np.unique(np.asarray(true), return_counts=True)
    return int(names[counts.argmin()])


def adjusted_rand_index(true: Sequence[int], found: Sequence[int | None]) -> float:
    """Agreement over pairs of clients, 1 if the same partition, 0 expected by chance (Hubert and Arabie 1985).

    A client without a cluster (None) counts as alone in one of its own.
    """
    table = _table(true, found)
    pairs = _pairs(table).sum()
    rows, columns = _pairs(table.sum(axis=1)).sum(), _pairs(table.sum(axis=0)).sum()
    total = _pairs(table.sum())
    expected = rows * columns / total if total else 0.0
    largest = (rows + columns) / 2
    return 1.0 if largest == expected else float((pairs - expected) / (largest - expected))


def assignment_accuracy(true: Sequence[int], found: Sequence[int | None]) -> float:
    """The share of clients put right under the best one-to-one naming of found clusters; None counts as wrong."""
    names = best_names(true, found)
    return float(np.mean([names.get(name) == own for own, name in zip(true, found, strict=True)])) if true else 0.0


def best_names(true: Sequence[int], found: Sequence[int | None]) -> dict[int | None, int]:
    """Found cluster -> true cluster, one to one, such that most clients are right; who has no cluster (None) names nothing."""
    from scipy.optimize import linear_sum_assignment

    placed = [i for i, name in enumerate(found) if name is not None]
    if not placed:
        return {}
    rows, columns = list(dict.fromkeys(true[i] for i in placed)), list(dict.fromkeys(found[i] for i in placed))
    table = _table([true[i] for i in placed], [found[i] for i in placed])
    return {columns[j]: rows[i] for i, j in zip(*linear_sum_assignment(table, maximize=True), strict=True)}


def accuracy_summary(by_client: Sequence[float], true: Sequence[int]) -> dict[str, float | list[float]]:
    """The `accuracy_*` figures of a round from each client's test accuracy (0..1) and its true cluster.

    mean, worst and 10th percentile over clients, disparity (best client less worst), mean of the minority cluster, mean by
    true cluster (in order of number).
    """
    values, clusters = np.asarray(by_client, np.float64), np.asarray(true)
    return {
        "accuracy_mean": float(values.mean()),
        "accuracy_minority": float(values[clusters == minority(true)].mean()),
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


def _table(true: Sequence[int], found: Sequence[int | None]) -> np.ndarray:
    alone = iter(range(len(found)))
    named = [("found", name) if name is not None else ("alone", next(alone)) for name in found]
    rows = {name: i for i, name in enumerate(dict.fromkeys(true))}
    columns = {name: i for i, name in enumerate(dict.fromkeys(named))}
    table = np.zeros((len(rows), len(columns)), np.int64)
    for row, column in zip(true, named, strict=True):
        table[rows[row], columns[column]] += 1
    return table


def _pairs(count: np.ndarray) -> np.ndarray:
    return count * (count - 1) / 2
