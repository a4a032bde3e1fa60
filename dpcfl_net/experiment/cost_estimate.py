"""Cost estimate of a run before it starts: steps, records, bytes, memory, and the measured time of a step."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from dpcfl_net.algorithms.base import Algorithm, algorithm_of
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.data.partition import open_client
from dpcfl_net.experiment.job_files import Job, client_slice
from dpcfl_net.federation.capabilities import client_steps
from dpcfl_net.federation.message_encoding import MessageEncoding
from dpcfl_net.privacy.slots import DPSGDSlot, SelectionSlot, UnprotectedSlot, given

# Measured with the small CNN: memory of the shared libraries, and of each further worker.
_SHARED_BYTES, _WORKER_BYTES = 400 << 20, 40 << 20
EVALUATION_SHARE = 0.1  # of the passes of training, for evaluate_every: auto
TRAINING_PASSES = 3


def estimate(protocol: Protocol, live: int | None = None) -> dict[str, Any]:
    """Estimate the cost of a run from the protocol alone.

    Args:
        protocol: The job's protocol.
        live: Maximum number of clients connected at once; None: all.

    Returns:
        `clients`, `parameters`, `steps`, `records` (processed in all), `bytes_up`, `bytes_down`, and `memory` of all processes
        in bytes.
    """
    algorithm, p, n = algorithm_of(protocol), protocol.model.parameters, len(protocol.roster)
    able = algorithm.capabilities
    asked = able.expected_releases
    if able.plain_sgd:
        records = [entry.records for entry in protocol.roster]
        each = protocol.local.epochs * sum(-(-count // protocol.local.batch_size) for count in records) / n
        steps, seen, selections = round(asked * each), round(asked * protocol.local.epochs * sum(records) / n), 0
        models_down = asked * (able.max_models - 1)
    else:
        gradient = [(slot, entry) for entry in protocol.roster for slot in algorithm.plan(entry) if isinstance(slot, DPSGDSlot)]
        share = asked / max(1, len(gradient))  # a plan holds every round, though a round may sample clients
        steps = round(share * sum(slot.steps for slot, _ in gradient))
        seen = int(share * sum(s.steps * s.rate * e.records for s, e in gradient))
        selections = sum(
            isinstance(slot, SelectionSlot | UnprotectedSlot) for entry in protocol.roster for slot in algorithm.plan(entry)
        )
        models_down = selections * (able.max_models - 1)  # for a selection a client gets every model
    given_back = [spec for step in client_steps(algorithm).values() for spec in step.gives.values()]
    sends = any(isinstance(side, str) for spec in given_back for side in spec.shape)  # a whole model or a part of it
    encoding = MessageEncoding(algorithm)
    releases = asked if sends else 0.0
    exact = _exact_updates(algorithm) if encoding.update_bytes(p) != 4 * p else 0
    return {
        "clients": n,
        "parameters": p,
        "steps": steps,
        "records": seen,
        "bytes_up": round(encoding.update_bytes(p) * (releases - exact) + 4 * p * exact),
        "bytes_down": round(encoding.model_bytes(p) * (releases + models_down)),
        "memory": base_memory(min(n, live or n)) + 8 * p * min(n, live or n) + 12 * p * round(asked / protocol.rounds),
    }


def evaluation_interval(job: Job, root: str | None, every: int | Literal["auto"]) -> int:
    """Return the interval of evaluations in rounds.

    "auto" compares passes over records: a round evaluates each test record in one pass, and trains on the expected number of
    records in three (forward, backward to the activations and to the parameters). The interval depends on the signed job and
    the data alone, so that a resumed run evaluates the same rounds.

    Args:
        job: The job.
        root: Folder of the data sets; None: the usual one.
        every: The setting `output.evaluate_every`.

    Returns:
        The setting, or for "auto" the smallest interval at which all evaluations up to any round but the last take at most
        `EVALUATION_SHARE` of the passes of training.
    """
    if every != "auto":
        return every
    tested = sum(len(client_slice(job, entry.id, root)[1].test_rows) for entry in job.protocol.roster)
    rounds = job.protocol.rounds
    trained = TRAINING_PASSES * estimate(job.protocol)["records"] / rounds
    return rounds if not trained else min(rounds, max(1, math.ceil(tested / (EVALUATION_SHARE * trained))))


def _exact_updates(algorithm: Algorithm) -> int:
    """Updates over the whole run that are sent as float32 even where updates are compressed."""
    steps = [step for step in client_steps(algorithm).values() if any(spec.exact for spec in step.gives.values())]
    plans = [[slot.name for slot in algorithm.plan(entry)] for entry in algorithm.protocol.roster]
    return sum(plan.count(step.charges[0]) for plan in plans for step in steps)


def base_memory(workers: int) -> int:
    """Return the memory of a run's processes without models, in bytes."""
    return _SHARED_BYTES + workers * _WORKER_BYTES


def step_seconds(job: Job, root: str | None, steps: int = 8) -> float:
    """Measure the seconds of one local step on the first client's records; the result is discarded.

    Args:
        job: The job.
        root: Folder of the data sets.
        steps: Steps to run.

    Raises:
        ConfigError: As `open_client`.
        DataMissing: As `open_client`.
    """
    import torch

    from dpcfl_net.federation.client import Engine

    torch.set_num_threads(1)
    entry, local = job.protocol.roster[0], job.protocol.local
    settings, piece = client_slice(job, entry.id, root)
    theta = np.zeros(job.protocol.model.parameters, dtype=np.float32)
    if job.algorithm.capabilities.plain_sgd:
        one_epoch = job.protocol.model_copy(update={"local": local.model_copy(update={"epochs": 1})})
        engine, few = Engine.of(one_epoch), replace(piece, train_rows=piece.train_rows[: steps * local.batch_size])
        data = open_client(settings, few, root)
        engine.sgd.train(theta, data, np.random.default_rng())
        start = time.perf_counter()
        engine.sgd.train(theta, data, np.random.default_rng())
        return (time.perf_counter() - start) / -(-len(data) // local.batch_size)
    engine, data = Engine.of(job.protocol), open_client(settings, piece, root)
    z = given(entry.noise_multiplier)
    slot = DPSGDSlot("timing", min(1.0, job.protocol.local.batch_size / entry.records), steps)
    engine.trainer.train(theta, data, slot, z, os.urandom(32))
    start = time.perf_counter()
    engine.trainer.train(theta, data, slot, z, os.urandom(32))
    return (time.perf_counter() - start) / steps
