"""Row round: a training round of 21 clients with 200 records each, against Flower, pfl and a plain loop."""

from __future__ import annotations

from functools import partial
from typing import Any

from dpcfl_net.launch.bench import runs
from dpcfl_net.launch.bench.figures import OURS, Figure, Target
from dpcfl_net.launch.bench.options import Options
from dpcfl_net.launch.bench.peers import process
from dpcfl_net.launch.bench.sizes import CLIENTS, CNN
from dpcfl_net.launch.bench.timing import Sample, interleave

RECORDS, ROUNDS = 200, 10
LOCAL = {"epochs": 1, "batch_size": 32, "lr": 0.01}
SGD = {"name": "dp-fedavg", "sampling_rate": 1.0}
CLIENT_LEVEL = {"epsilon": 5.0, "delta": 1e-4, "unit": "client", "trust": "trusted-server", "adjacency": "replace-one"}
EACH = {"evaluate_every": 1, "transcript": "off"}


def measure(options: Options) -> list[Figure]:
    """Measure plain SGD at the clients with every framework, and R-DPCFL with the evaluation of each round."""
    clients, rounds = (3, 6) if options.quick else (CLIENTS, ROUNDS)
    ways = {OURS: partial(_ours, clients, rounds, SGD, privacy=CLIENT_LEVEL)}
    if not options.quick:
        ways["dpcfl, in-process"] = partial(
            _ours, clients, rounds, SGD, privacy=CLIENT_LEVEL, runtime={"federation": "in-process"}
        )
    ways["plain loop"] = partial(process.run, "plain_loop", clients, rounds)
    if options.uses("flower"):
        ways["flower"] = partial(process.run, "flower", "train", CNN, clients, rounds)
    if options.uses("pfl"):
        ways["pfl"] = partial(process.run, "apple_pfl", clients, rounds)
    targets = Target(round(1 / 0.7, 2), "flower"), Target(round(1 / 0.6, 2), "pfl")
    found = [Figure.of_times("plain SGD", "ms per round", interleave(ways, options.times(3)), targets)]
    if not options.quick:
        robust = partial(_ours, clients, rounds, {"name": "r-dpcfl"}, output=EACH, test_per_client=50)
        found.append(Figure.of_times("R-DPCFL with evaluation", "ms per round", interleave({OURS: robust}, options.times(3))))
    return found


def _ours(clients: int, rounds: int, algorithm: dict[str, Any], test_per_client: int = 1, **sections: Any) -> Sample:
    data = {
        "dataset": runs.DATA["cnn"], "clients": [clients], "shift": "none", "train_per_client": RECORDS,
        "test_per_client": test_per_client,
    }  # fmt: skip
    return runs.run(runs.config("cnn", clients, rounds, algorithm, data=data, local=LOCAL, **sections)).round
