"""Row dpsgd: steps of DP-SGD on the CNN."""

from __future__ import annotations

from functools import partial

from dpcfl_net.launch.bench import dpsgd_ways
from dpcfl_net.launch.bench.figures import Figure, Target
from dpcfl_net.launch.bench.options import Options
from dpcfl_net.launch.bench.timing import enough, interleave, timed

TARGETS = {32: 2.0, 64: 2.0, 256: 2.4}  # on Opacus, by batch size
ON_PLAIN = 1.0


def measure(options: Options) -> list[Figure]:
    """Measure a step at each batch size, in one thread."""
    with dpsgd_ways.one_thread():
        data = dpsgd_ways.Records("cnn", 8000)
        return [_steps(data, batch, options) for batch in ((32,) if options.quick else TARGETS)]


def _steps(data: dpsgd_ways.Records, batch: int, options: Options) -> Figure:
    ways = {**dpsgd_ways.steps(data, batch, options), **dpsgd_ways.variants(data, batch)}
    counts = {name: enough(run, 4, 0.05 if options.quick else 0.4) for name, run in ways.items()}
    samples = interleave(
        {name: timed(partial(run, counts[name]), counts[name]) for name, run in ways.items()}, options.times(7)
    )
    targets = Target(TARGETS[batch], "opacus"), Target(ON_PLAIN, "plain")
    return Figure.of_times(f"batch {batch}", "ms per step", samples, targets)
