"""Row epoch: a Poisson epoch of DP-SGD on the CNN, with the data loaders of Opacus and torch."""

from __future__ import annotations

from dpcfl_net.launch.bench import dpsgd_ways
from dpcfl_net.launch.bench.figures import Figure, Target
from dpcfl_net.launch.bench.options import Options
from dpcfl_net.launch.bench.timing import interleave, timed

BATCH = 32


def measure(options: Options) -> list[Figure]:
    """Measure an epoch of expected batches of 32, in one thread."""
    with dpsgd_ways.one_thread():
        data = dpsgd_ways.Records("cnn", 256 if options.quick else 8000)
        ways = dpsgd_ways.epochs(data, BATCH, options)
        dpsgd_ways.dpcfl(data, BATCH)(2)
        samples = interleave({name: timed(run) for name, run in ways.items()}, options.times(5))
    return [Figure.of_times(f"{len(data):,} records", "ms per epoch", samples, [Target(1.8, "opacus")])]
