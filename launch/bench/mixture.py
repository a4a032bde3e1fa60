"""Row mixture: the Gaussian mixture of the server against scikit-learn's."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dpcfl_net.clustering import mixture
from dpcfl_net.launch.bench.figures import OURS, Figure, Target
from dpcfl_net.launch.bench.options import Options
from dpcfl_net.launch.bench.sizes import CLIENTS, CNN, MIB, RESNET18
from dpcfl_net.launch.bench.timing import interleave, timed

CLUSTERS, MOST = 4, 7


def measure(options: Options) -> list[Figure]:
    """Measure one fit and a search over 2 to 7 components; scikit-learn uses its default of one start."""
    found = []
    for run in _search(_updates(100), options).values():
        run()  # imports
    for p in (CNN,) if options.quick else (CNN, RESNET18):
        updates = _updates(p)
        least = (15.0, 80.0) if p == RESNET18 else (None, None)
        times = options.times(5) if p == CNN else min(2, options.times(2))
        found += [
            _compare(f"one fit, p={p:,}", _fit, updates, options, times, least[0]),
            _compare(f"search over 2..{MOST}, p={p:,}", _search, updates, options, times, least[1]),
        ]
        found.append(_memory(updates, p))
    return found


def _updates(p: int) -> np.ndarray:
    """Updates of four clusters that overlap, (21, p) float32."""
    draw = np.random.default_rng(0)
    centres = draw.standard_normal((CLUSTERS, p), dtype=np.float32)
    updates = draw.standard_normal((CLIENTS, p), dtype=np.float32)
    updates += 0.5 * centres[np.arange(CLIENTS) % CLUSTERS]
    return updates


def _compare(
    case: str, ways: Callable[[np.ndarray, Options], dict[str, Callable[[], Any]]], updates: np.ndarray, options: Options,
    times: int, least: float | None,
) -> Figure:  # fmt: skip
    samples = interleave({name: timed(run) for name, run in ways(updates, options).items()}, times)
    return Figure.of_times(case, "ms", samples, [] if least is None else [Target(least, "sklearn")])


def _fit(updates: np.ndarray, options: Options) -> dict[str, Callable[[], Any]]:
    peer = {"sklearn": partial(_sklearn, updates, [CLUSTERS])} if options.uses("sklearn") else {}
    return {OURS: lambda: mixture.fit(updates, clusters=CLUSTERS), **peer}


def _search(updates: np.ndarray, options: Options) -> dict[str, Callable[[], Any]]:
    peer = {"sklearn": partial(_sklearn, updates, range(2, MOST + 1))} if options.uses("sklearn") else {}
    return {OURS: lambda: mixture.fit(updates, clusters=None, max_clusters=MOST), **peer}


def _sklearn(updates: np.ndarray, counts: Any) -> None:
    from sklearn.mixture import GaussianMixture

    for count in counts:
        GaussianMixture(count, covariance_type="spherical", init_params="k-means++", random_state=0).fit(updates)


def _memory(updates: np.ndarray, p: int) -> Figure:
    """Peak of memory that a fit allocates beyond the updates; numpy reports its arrays to tracemalloc."""
    tracemalloc.start()
    try:
        mixture.fit(updates, clusters=CLUSTERS)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return Figure.of_values(f"memory of one fit, p={p:,}", "MiB beyond the updates", {OURS: [peak / MIB]}, [Target(100.0)])
