"""Measures the costs of this host: a few small runs, from whose differences follow the costs of starts, rounds, tasks, bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.host_costs import HostCosts, processor
from dpcfl_net.experiment.tree_cost import SUM_BYTES
from dpcfl_net.launch import new_run
from dpcfl_net.launch.bench import runs
from dpcfl_net.launch.bench.processes import dpcfl_with_memory
from dpcfl_net.launch.bench.sizes import CNN, WIDE
from dpcfl_net.transport.keys import AGGREGATOR

FEW, MANY = 2, 10
AGGREGATORS = 2
ROUNDS = 40


def wide(input_shape: tuple[int, ...], classes: int) -> Any:
    """Model of 4,009,990 parameters for images of 1x28x28, whose steps are cheap."""
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(784, 5044), nn.ReLU(), nn.Linear(5044, classes))


def measure() -> HostCosts:
    """Measure this host; takes a minute."""
    _trained(FEW)  # loads the libraries of the parents of all processes, which live on
    trained, more = _trained(FEW), _trained(MANY)  # workers that have computed are larger, and an observer that has evaluated
    few, many = (runs.noop("cnn", clients, ROUNDS) for clients in (FEW, MANY))
    large = runs.noop("wide", FEW, 6)
    tree = runs.noop("cnn", MANY, ROUNDS, aggregators=AGGREGATORS)
    large_trees = [runs.noop("wide", clients, 6, aggregators=AGGREGATORS) for clients in (FEW, MANY)]
    (start_s, start_wall_s), launcher = _whole_run(trained)
    size = 8 * (WIDE - CNN)  # of a model and an update
    between = MANY - FEW
    task_s = max(0.0, (many.round.cpu - few.round.cpu) / between)
    task_wall_s = max(0.0, (many.round.wall - few.round.wall) / between)
    byte_s = max(0.0, (large.round.cpu - few.round.cpu) / FEW / size)
    worker_s = max(0.0, (more.started - trained.started + many.started - few.started) / (2 * between))
    by_parameter = max(0.0, (large.private["worker"] - few.private["worker"]) / (WIDE - CNN))
    alone, grouped = ((one.private[AGGREGATOR] - tree.private[AGGREGATOR]) / (WIDE - CNN) for one in large_trees)
    hop_s = byte_s * (tree.bytes_up + tree.bytes_down)
    workers = FEW * (large.private["worker"] - few.private["worker"])
    beyond = large.total - few.total - workers
    return HostCosts(
        processor=processor(),
        start_s=max(0.0, start_s - FEW * worker_s),
        start_wall_s=start_wall_s,
        worker_s=worker_s,
        round_s=max(0.0, few.round.cpu - FEW * task_s),
        round_wall_s=max(0.0, few.round.wall - FEW * task_wall_s),
        task_s=task_s,
        task_wall_s=task_wall_s,
        byte_s=byte_s,
        run_bytes=max(0.0, trained.total + launcher - FEW * trained.private["worker"]),
        worker_bytes=trained.private["worker"],
        worker_parameter_bytes=by_parameter,
        server_parameter_bytes=max(0.0, beyond / (WIDE - CNN) - 4 * FEW),
        aggregator_s=max(0.0, (tree.started - many.started) / AGGREGATORS),
        aggregator_round_s=max(0.0, (tree.round.cpu - many.round.cpu - hop_s) / AGGREGATORS),
        aggregator_wall_s=max(0.0, tree.round.wall - many.round.wall),
        aggregator_bytes=tree.private[AGGREGATOR],
        aggregator_parameter_bytes=max(0.0, alone),
        aggregator_update_bytes=max(0.0, (grouped - SUM_BYTES) * AGGREGATORS / MANY),  # of the clients of a group
    )


def _trained(clients: int) -> runs.Cost:
    """Rounds of DP-SGD on one record a client, each with an evaluation."""
    output = {"transcript": "off", "evaluate_every": 1}
    return runs.run(runs.config("cnn", clients, 10, {"name": "global"}, output=output))


def _whole_run(trained: runs.Cost) -> tuple[tuple[float, float], float]:
    """Processor and wall seconds of a whole `dpcfl run` of few clients without its rounds, and private memory of its launcher in bytes."""
    config = runs.config("cnn", FEW, 2, {"name": "global"})
    with tempfile.TemporaryDirectory(prefix="dpcfl-bench-") as name:
        new_run.write_config(Path(name), config)
        found, launcher = dpcfl_with_memory("run", RunFolder(name).config, "--out", Path(name) / "runs")
    spent = found.cpu - config.rounds * trained.round.cpu, found.wall - config.rounds * trained.round.wall
    return (max(0.0, spent[0]), max(0.0, spent[1])), launcher
