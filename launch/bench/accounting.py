"""Row accounting: one epsilon, and the noise for a target, without any cached result."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

from dpcfl_net.launch.bench.figures import OURS, Figure
from dpcfl_net.launch.bench.options import Options
from dpcfl_net.launch.bench.timing import interleave, timed
from dpcfl_net.privacy.accounting import accountant
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian

RATE, DELTA, EPSILON, NOISE = 32 / 1000, 1e-5, 5.0, 1.0


def measure(options: Options) -> list[Figure]:
    """Measure DP-SGD of 40 rounds of 32 steps on 1,000 records in batches of 32; Opacus with its PRV accountant."""
    steps = 32 if options.quick else 32 * 40
    _epsilon(NOISE, 1)  # imports
    if options.uses("opacus"):
        _opacus_epsilon(1)
    return [
        _case(f"one epsilon, {steps} steps", options, lambda nth: _epsilon(NOISE + nth, steps), lambda: _opacus_epsilon(steps)),
        _case(
            f"noise for epsilon 5, {steps} steps",
            options,
            lambda nth: _noise(EPSILON + nth, steps),
            lambda: _opacus_noise(steps),
        ),
    ]


def _case(case: str, options: Options, ours: Callable[[float], Any], opacus: Callable[[], Any]) -> Figure:
    counter = itertools.count(1)
    # A slightly different question each time: results of equal ones are cached.
    ways: dict[str, Callable[[], Any]] = {OURS: lambda: ours(next(counter) * 1e-4)}
    if options.uses("opacus"):
        ways["opacus"] = opacus
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = interleave({name: timed(run) for name, run in ways.items()}, options.times(3))
    return Figure.of_times(case, "s", samples, scale=1.0)


def _epsilon(noise: float, steps: int) -> float:
    return accountant.epsilon([SampledGaussian(noise, RATE, steps)], DELTA)


def _noise(epsilon: float, steps: int) -> Any:
    return accountant.calibrate(lambda z: [SampledGaussian(z, RATE, steps)], epsilon, DELTA)


def _opacus_epsilon(steps: int) -> float:
    from opacus.accountants import PRVAccountant

    prv = PRVAccountant()
    prv.history = [(NOISE, RATE, steps)]
    return float(prv.get_epsilon(DELTA))


def _opacus_noise(steps: int) -> float:
    from opacus.accountants.utils import get_noise_multiplier

    return float(
        get_noise_multiplier(target_epsilon=EPSILON, target_delta=DELTA, sample_rate=RATE, steps=steps, accountant="prv")
    )
