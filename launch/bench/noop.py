"""Row noop: a round in which 21 clients return the model, against ZeroMQ alone and Flower's simulation."""

from __future__ import annotations

from functools import partial

from dpcfl_net.launch.bench import runs
from dpcfl_net.launch.bench.figures import OURS, Figure, Target
from dpcfl_net.launch.bench.options import Options
from dpcfl_net.launch.bench.peers import process
from dpcfl_net.launch.bench.sizes import CLIENTS, CNN, RESNET18
from dpcfl_net.launch.bench.timing import Sample, interleave

CASES = (("cnn", CNN, 60, 20.0), ("resnet18", RESNET18, 3, 1.5))
UNENCRYPTED = {"transport": {"security": "none"}}


def measure(options: Options) -> list[Figure]:
    """Measure rounds without encryption; beside them without flushes, with CURVE, and in one process, which never flushes."""
    if options.quick:
        return [_case("cnn", CNN, 40, 20.0, options, 3)]
    return [_case(*case, options, CLIENTS) for case in CASES]


def _case(model: str, p: int, rounds: int, least: float, options: Options, clients: int) -> Figure:
    ways = {OURS: partial(_ours, model, clients, rounds, UNENCRYPTED)}
    if not options.quick:
        ways["dpcfl, not durable"] = partial(_ours, model, clients, rounds, {**UNENCRYPTED, "durable": False})
        ways["dpcfl, CURVE"] = partial(_ours, model, clients, rounds, {})
        ways["dpcfl, in-process"] = partial(_ours, model, clients, rounds, {"federation": "in-process"})
    ways["raw zmq"] = partial(process.run, "raw_zmq", p, clients, rounds)
    if options.uses("flower"):
        ways["flower"] = partial(process.run, "flower", "noop", p, clients, min(10, rounds))
    samples = interleave(ways, options.times(3 if p < 10**6 else 2))
    return Figure.of_times(f"{clients} clients, p={p:,}", "ms per round", samples, [Target(least, "flower")])


def _ours(model: str, clients: int, rounds: int, runtime: dict) -> Sample:
    return runs.noop(model, clients, rounds, **runtime).round
