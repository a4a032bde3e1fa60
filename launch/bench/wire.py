"""Row wire: one message with one tensor between two processes of this machine."""

from __future__ import annotations

from functools import partial

from dpcfl_net.launch.bench.figures import OURS, Figure, Target
from dpcfl_net.launch.bench.options import Options
from dpcfl_net.launch.bench.peers import process
from dpcfl_net.launch.bench.sizes import CNN, RESNET18
from dpcfl_net.launch.bench.timing import interleave

MESSAGES = {CNN: 5000, RESNET18: 20}
# Header and frame alone, as measured; dpcfl also hashes and checks.
TARGETS = (Target(1.0, "msgpack"), Target(1.0, "pickle"), Target(1.0, "grpc"))


def measure(options: Options) -> list[Figure]:
    """Measure messages of 116 KB and 44.7 MB: dpcfl with hash and checks, bare frames, msgpack, pickle and gRPC."""
    peers = ("frames", "msgpack", "pickle", *(["grpc"] if options.uses("grpc") else []))
    ways = (OURS, "pickle") if options.quick else (OURS, *peers)
    found = []
    for p in (CNN,) if options.quick else (CNN, RESNET18):
        count = 20 if options.quick else MESSAGES[p]
        samples = interleave({way: partial(process.run, "wire", way, p, count) for way in ways}, options.times(3))
        found.append(Figure.of_times(f"{4 * p:,} bytes", "ms per message", samples, TARGETS))
    return found
