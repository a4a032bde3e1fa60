"""Prediction of a run's time and memory from its work, the host's measured costs, and a measured step of the job's model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpcfl_net.core.protocol import Protocol
from dpcfl_net.data.partition import open_client
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.cost_estimate import estimate, evaluation_interval
from dpcfl_net.experiment.host_costs import HostCosts
from dpcfl_net.experiment.job_files import Job, client_slice
from dpcfl_net.experiment.tree_cost import SUM_BYTES, TreeWork
from dpcfl_net.federation.secure.stages import STAGES, answer_interval_s
from dpcfl_net.privacy.slots import DPSGDSlot, given
from dpcfl_net.training.memory import IDLE_S, MOST_KEPT

_UPDATE_BYTES = 4  # of a coordinate of an update that the server holds until its round ends
REST_BYTES = 2.5  # of a parameter in a worker at rest, measured on ResNet-18
_PASSED_ON_BYTES = 2 * _UPDATE_BYTES  # of an update that an aggregator passes on, and of its copy in the message


@dataclass(frozen=True)
class StepCost:
    """Measured cost of computing on the first client's records.

    Attributes:
        step_s: Processor seconds of a local step at the usual batch size, in a task of as many steps as the job's.
        record_s: Processor seconds of evaluating one record.
        step_bytes: Memory that a step takes beyond a worker at rest; 0 where the system does not tell it.
        evaluation_bytes: The same for an evaluation.
    """

    step_s: float
    record_s: float
    step_bytes: float
    evaluation_bytes: float


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of a run.

    Attributes:
        cpu_s: Processor seconds of all processes.
        wall_s: Elapsed seconds on idle cores.
        memory: Peak of the memory of all processes, in bytes; shared pages count once.
        aggregator_memory: Memory of all aggregators, which is a part of it.
    """

    cpu_s: float
    wall_s: float
    memory: float
    aggregator_memory: float = 0.0


def predict(job: Job, config: Config, host: HostCosts, step: StepCost, slots: int, workers: int) -> Prediction:
    """Predict the cost of a run.

    Args:
        job: The job.
        config: Its configuration.
        host: Costs of the host.
        step: Cost of a step of the job.
        slots: Workers that compute at a time.
        workers: Worker processes at a time; 0: the run is in one process.
    """
    work, rounds, p = estimate(job.protocol), job.protocol.rounds, job.protocol.model.parameters
    clients, tasks = work["clients"], work["tasks"]
    every = evaluation_interval(job, config.data.root, config.output.evaluate_every)
    evaluations = -(-rounds // every) * (clients * (config.data.test_per_client or 0) + config.data.central_evaluations)
    compute = work["batches"] * step.step_s + (work["scored"] + evaluations) * step.record_s
    tree = work["tree"] if workers else TreeWork()
    moved = (work["bytes_up"] + work["bytes_down"] + work["group_bytes_up"] + work["group_bytes_down"]) * host.byte_s
    live = min(clients, config.runtime.max_live_workers)
    starts = workers if live == clients or workers < live else workers + tasks * (1 - live / clients)
    start_s = host.start_s + starts * host.worker_s if workers else host.start_s
    start_s += tree.aggregators * host.aggregator_s
    overhead, waits = rounds * host.round_s + tasks * host.task_s, rounds * host.round_wall_s + tasks * host.task_wall_s
    if tree.aggregators:
        overhead += rounds * tree.aggregators * host.aggregator_round_s
        waits += rounds * host.aggregator_wall_s
    held = tree.held if tree.aggregators else _UPDATE_BYTES * work["releases"] / rounds
    memory = host.run_bytes + p * (host.server_parameter_bytes + held) + step.evaluation_bytes
    memory += _workers_memory(job, host, step, slots, workers, (compute + moved) / max(1, tasks))
    of_aggregators = _aggregator_memory(tree, host, p)
    deadlines = rounds * _least_round_s(job.protocol)
    return Prediction(
        start_s + overhead + moved + compute,
        host.start_wall_s + starts * host.worker_s / slots + waits + max(deadlines, (moved + compute) / slots),
        memory + of_aggregators,
        of_aggregators,
    )


def _workers_memory(job: Job, host: HostCosts, step: StepCost, slots: int, workers: int, task_s: float) -> float:
    """Bytes of workers at rest, of those that compute, and of those that keep freed memory since they have not been idle for long."""
    p, computing = job.protocol.model.parameters, min(slots, workers or 1)
    lately = max(0.0, min(workers - computing, computing * IDLE_S / task_s if task_s else workers))
    at_rest = workers * (host.worker_bytes + p * REST_BYTES)
    at_work = p * max(0.0, host.worker_parameter_bytes - REST_BYTES)
    return at_rest + computing * (at_work + step.step_bytes) + lately * min(at_work + step.step_bytes, MOST_KEPT)


def _aggregator_memory(tree: TreeWork, host: HostCosts, p: int) -> float:
    """Bytes of all aggregators at their largest: while updates wait, while they send sums, or while they pass updates on."""
    sums = tree.aggregators * tree.models
    waiting = SUM_BYTES * sums + host.aggregator_update_bytes * tree.waiting
    largest = max(waiting, host.aggregator_parameter_bytes * sums, _PASSED_ON_BYTES * tree.passed_on)
    return tree.aggregators * host.aggregator_bytes + p * largest


def _least_round_s(protocol: Protocol) -> float:
    """Seconds before which a round cannot end, since answers wait for their deadlines."""
    stages = STAGES if protocol.privacy.secure else ()
    return (protocol.local.deadline_s or 0.0) + sum(answer_interval_s(protocol, kind) or 0.0 for kind in stages)


def idle_memory(host: HostCosts, workers: int, aggregators: int = 0) -> float:
    """Return the memory of a run's processes without models, in bytes."""
    return host.run_bytes + workers * host.worker_bytes + aggregators * host.aggregator_bytes


def measure_step(job: Job, root: str | None, most_steps: int = 8) -> StepCost:
    """Measure local steps and an evaluation on the first client's records; the results are discarded.

    Args:
        job: The job.
        root: Folder of the data sets.
        most_steps: Largest number of steps to run at a time. A task of the job may have fewer: its first step then counts more.

    Raises:
        ConfigError: As `open_client`.
        DataMissing: As `open_client`.
    """
    import torch

    from dpcfl_net.federation.engine import Engine

    torch.set_num_threads(1)
    work = estimate(job.protocol)
    task, steps = _local_steps(job, root, min(most_steps, max(1, round(work["steps"] / max(1.0, work["tasks"])))))
    task()  # loads code and chooses kernels
    step_bytes, step_s = _peak(task), _seconds(task) / steps
    settings, piece = client_slice(job, job.protocol.roster[0].id, root)
    part: Literal["test", "train"] = "test" if len(piece.test_rows) else "train"
    data, evaluator = open_client(settings, piece, root, part), Engine.of(job.protocol).evaluator
    theta = np.zeros(job.protocol.model.parameters, dtype=np.float32)

    def evaluate() -> None:
        evaluator.accuracy_and_loss(theta, data)

    evaluate()
    evaluation_bytes, evaluation_s = _peak(evaluate), _seconds(evaluate)
    return StepCost(step_s, evaluation_s / len(data), step_bytes, evaluation_bytes)


def _local_steps(job: Job, root: str | None, steps: int) -> tuple[Callable[[], Any], int]:
    """Return a function that runs local steps as a worker does in a task, and their number."""
    from dpcfl_net.federation.client_host import room_of
    from dpcfl_net.federation.engine import Engine

    theta = np.zeros(job.protocol.model.parameters, dtype=np.float32)
    entry, local = job.protocol.roster[0], job.protocol.local
    settings, piece = client_slice(job, entry.id, root)
    if job.algorithm.capabilities.plain_sgd:
        one_epoch = job.protocol.model_copy(update={"local": local.model_copy(update={"epochs": 1})})
        engine, few = Engine.of(one_epoch), replace(piece, train_rows=piece.train_rows[: steps * local.batch_size])
        data = open_client(settings, few, root)
        return lambda: engine.sgd.train(theta, data, np.random.default_rng()), -(-len(data) // local.batch_size)
    trainer, data = Engine.of(job.protocol).trainer, open_client(settings, piece, root)
    slot = DPSGDSlot("timing", min(1.0, local.batch_size / entry.records), steps)
    z = given(entry.noise_multiplier)
    room = room_of(job.protocol, entry.id, job.algorithm.plan(entry), slot)
    return lambda: trainer.train(theta, data, slot, z, os.urandom(32), room=room), steps


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def _peak(run: Callable[[], Any]) -> float:
    """Peak of this process's memory while `run` runs, beyond that of an idle one; 0 where Linux's /proc does not tell it."""
    from dpcfl_net.training import memory

    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    memory.give_back_all()
    try:
        reset.write_text("5")  # the peak starts again from here
    except OSError:
        return 0.0
    before = _status(status, "VmRSS")
    run()
    return max(0.0, _status(status, "VmHWM") - before)


def _status(status: Path, field: str) -> float:
    return 1024.0 * next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(f"{field}:"))
