"""Row curves: rounds by number of parameters, of records and of rounds; the row clients has the number of clients."""

from __future__ import annotations

from functools import partial

from dpcfl_net.launch.bench import runs
from dpcfl_net.launch.bench.figures import OURS, Figure
from dpcfl_net.launch.bench.options import Options
from dpcfl_net.launch.bench.sizes import CNN, RESNET18, WIDE
from dpcfl_net.launch.bench.timing import Sample, interleave

CLIENTS = 4
PARAMETERS = {"cnn": (CNN, 60), "wide": (WIDE, 10), "resnet18": (RESNET18, 6)}  # model -> size, rounds
RECORDS = (25, 100, 400, 1000)
ROUNDS = (40, 100, 300, 1000)
LOCAL = {"epochs": 1, "batch_size": 25, "lr": 0.1, "clip": 1.0}


def measure(options: Options) -> list[Figure]:
    """Measure rounds in which clients return the model, by parameters and rounds, and rounds of DP-SGD, by records."""
    models = ["cnn"] if options.quick else list(PARAMETERS)
    return [
        *(_case(f"p={PARAMETERS[model][0]:,}", partial(_noop, model, PARAMETERS[model][1]), options) for model in models),
        *(
            _case(f"{records} records, DP-SGD", partial(_trained, records), options)
            for records in RECORDS[: 1 if options.quick else None]
        ),
        *(
            _case(f"{rounds} rounds, p=28,938", partial(_noop, "cnn", rounds), options)
            for rounds in ROUNDS[: 1 if options.quick else None]
        ),
    ]


def _case(name: str, way: partial[Sample], options: Options) -> Figure:
    return Figure.of_times(f"{CLIENTS} clients, {name}", "ms per round", interleave({OURS: way}, options.times(2)))


def _noop(model: str, rounds: int) -> Sample:
    return runs.noop(model, CLIENTS, rounds).round


def _trained(records: int) -> Sample:
    data = {
        "dataset": runs.DATA["cnn"], "clients": [CLIENTS], "shift": "none", "train_per_client": records, "test_per_client": 1,
    }  # fmt: skip
    return runs.run(runs.config("cnn", CLIENTS, 8, {"name": "global"}, data=data, local=LOCAL)).round
