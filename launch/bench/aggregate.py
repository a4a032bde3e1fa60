"""Row aggregate: the mean of all updates against a copy of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dpcfl_net.federation.aggregation import ModelMeans, mean
from dpcfl_net.launch.bench.figures import OURS, Figure, Target
from dpcfl_net.launch.bench.options import Options
from dpcfl_net.launch.bench.sizes import CLIENTS, CNN, RESNET18
from dpcfl_net.launch.bench.timing import interleave, timed


def measure(options: Options) -> list[Figure]:
    """Measure the mean of 21 updates; the copy goes into memory that was written before."""
    return [_case(p, options) for p in ((CNN,) if options.quick else (CNN, RESNET18))]


def _case(p: int, options: Options) -> Figure:
    updates = np.random.default_rng(0).standard_normal((CLIENTS, p), dtype=np.float32)
    copy, by_client = np.zeros_like(updates), dict(enumerate(updates))
    calls = 50 if p == CNN else 1
    ways: dict[str, Callable[[], Any]] = {
        OURS: partial(mean, by_client), "dpcfl, as they come": partial(_as_they_come, by_client),
        "memcpy": partial(np.copyto, copy, updates),
    }  # fmt: skip
    samples = interleave({name: timed(partial(_repeat, run, calls), calls) for name, run in ways.items()}, options.times(7))
    return Figure.of_times(f"21 updates, p={p:,}", "ms", samples, [Target(round(1 / 1.5, 2), "memcpy")])


def _as_they_come(updates: dict[int, np.ndarray]) -> np.ndarray:
    """The new model as the server computes it while updates arrive."""
    means = ModelMeans(np.zeros((1, updates[0].size), np.float32))
    for client, update in updates.items():
        means.add(0, client, update)
    return means.moved()


def _repeat(run: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        run()
