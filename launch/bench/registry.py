"""The rows of `dpcfl bench`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from dpcfl_net.launch.bench.figures import Result
from dpcfl_net.launch.bench.options import Options


@dataclass(frozen=True)
class Row:
    """One benchmark; its module has a function `measure(options)` that returns figures.

    Attributes:
        title: What it measures.
        peers: Other software that it may compare with, names of `options.PEERS`.
    """

    title: str
    peers: tuple[str, ...] = ()


ROWS = {
    "dpsgd": Row("step of DP-SGD, CNN of 28,938 parameters, one thread", ("opacus",)),
    "resnet": Row("step of DP-SGD, ResNet-18 with GroupNorm of 11,181,642 parameters, one thread", ("opacus",)),
    "epoch": Row("Poisson epoch of DP-SGD, CNN, batch 32, one thread, with loaders", ("opacus",)),
    "start": Row("start of a run of 21 workers, and of the quickstart without caches"),
    "clients": Row("round in which clients return the model, by number of clients, 28,938 parameters"),
    "curves": Row("round of four clients, by number of parameters, of records, and of rounds"),
    "tree": Row("round in which clients return the model, with aggregators, and bytes at the coordinator"),
    "noop": Row("round in which 21 clients return the model", ("flower",)),
    "round": Row("round of 21 clients with 200 records each, CNN", ("flower", "pfl")),
    "mixture": Row("Gaussian mixture over 21 updates", ("sklearn",)),
    "aggregate": Row("mean of 21 updates"),
    "wire": Row("one message with one tensor, from process to process, without encryption", ("grpc",)),
    "secure": Row("secure sum, clients and server in one process, without training and messages"),
    "accounting": Row("privacy accounting without cached results", ("opacus",)),
}


def measure(name: str, options: Options) -> Result:
    """Measure a row.

    Args:
        name: A name of `ROWS`.
        options: How to measure.
    """
    row = ROWS[name]
    module = importlib.import_module(f"dpcfl_net.launch.bench.{name}")
    skipped = {peer: refusal for peer in row.peers if (refusal := options.refusal(peer))}
    return Result(name, row.title, tuple(module.measure(options)), skipped)
