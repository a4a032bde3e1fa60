"""Work of a run before it starts: steps, records, tasks and bytes, from the protocol alone."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from dpcfl_net.algorithms.base import Algorithm, algorithm_of
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.tensors import DTYPES
from dpcfl_net.core.types import ClientStep
from dpcfl_net.experiment.job_files import Job, client_slice
from dpcfl_net.experiment.secure_cost import secure_work
from dpcfl_net.experiment.tree_cost import tree_work
from dpcfl_net.federation.capabilities import client_steps, tensor_sides, update_tensor
from dpcfl_net.federation.message_encoding import MessageEncoding
from dpcfl_net.federation.secure.stages import STAGES
from dpcfl_net.privacy.slots import DPSGDSlot, SecureSlot, SelectionSlot, UnprotectedSlot
from dpcfl_net.transport.messages import Template, resolve

EVALUATION_SHARE = 0.1  # of the passes of training, for evaluate_every: auto
TRAINING_PASSES = 3


def estimate(protocol: Protocol) -> dict[str, Any]:
    """Estimate the work of a run from the protocol alone.

    Args:
        protocol: The job's protocol.

    Returns:
        `clients`, `parameters`, `steps`, `batches` (steps in units of the usual batch), `records` (processed in all), `scored`
        (records that clients evaluate to select a model), `releases`, `tasks` (more than releases with secure sums, and where
        clients also send sums, losses or labels), `bytes_up` and `bytes_down` (to and from the server), `group_bytes_up` and
        `group_bytes_down` (between clients and aggregators; 0 without), and `tree`, the `TreeWork`.
    """
    algorithm, p, n = algorithm_of(protocol), protocol.model.parameters, len(protocol.roster)
    able = algorithm.capabilities
    asked, secure = able.expected_releases, secure_work(algorithm)
    local = _plain_sgd(algorithm) if able.plain_sgd else _dpsgd(algorithm)
    given_back = [spec for step in client_steps(algorithm).values() for spec in step.gives.values()]
    sends = any(isinstance(side, str) for spec in given_back for side in spec.shape)  # a whole model or a part of it
    encoding = MessageEncoding(algorithm)
    releases = asked if sends else 0.0
    exact = _exact_updates(algorithm) if encoding.update_bytes(p) != 4 * p else 0
    updates, other = releases - secure.releases, _other_tasks(algorithm, encoding)
    up = round(
        encoding.update_bytes(_update_size(algorithm)) * (updates - exact) + 4 * p * exact + secure.bytes_up + other.bytes_up
    )
    down = round(encoding.model_bytes(p) * (releases + local.models_down) + secure.bytes_down + other.bytes_down)
    tree = tree_work(algorithm, updates, exact)
    return {
        "clients": n,
        "parameters": p,
        "steps": local.steps,
        "batches": local.batches,
        "records": local.records,
        "scored": local.scored,
        "releases": asked,
        "tasks": asked + secure.tasks + other.tasks,
        "bytes_up": round(tree.bytes_up + other.bytes_up) if tree.aggregators else up,
        "bytes_down": round(tree.bytes_down + other.bytes_down * tree.aggregators / n) if tree.aggregators else down,
        "group_bytes_up": up if tree.aggregators else 0,
        "group_bytes_down": down if tree.aggregators else 0,
        "tree": tree,
    }


@dataclass(frozen=True)
class _LocalWork:
    """Work of all clients over the run.

    Attributes:
        steps: Steps of training.
        batches: Steps in units of the usual batch.
        records: Records that the steps process.
        scored: Records that are evaluated to select a model.
        models_down: Models that clients receive besides the one that they train.
    """

    steps: int
    batches: float
    records: int
    scored: int
    models_down: float


def _plain_sgd(algorithm: Algorithm) -> _LocalWork:
    """Work of clients that run plain SGD."""
    protocol, able = algorithm.protocol, algorithm.capabilities
    trained = able.expected_releases * _secret_coin(algorithm)
    records, n = [entry.records for entry in protocol.roster], len(protocol.roster)
    each = protocol.local.epochs * sum(-(-count // protocol.local.batch_size) for count in records) / n
    steps, seen = round(trained * each), round(trained * protocol.local.epochs * sum(records) / n)
    sent = able.max_models if able.sent_models is None else able.sent_models
    return _LocalWork(steps, float(steps), seen, 0, able.expected_releases * (sent - 1))


def _dpsgd(algorithm: Algorithm) -> _LocalWork:
    """Work of clients that run DP-SGD, from their plans."""
    protocol, able = algorithm.protocol, algorithm.capabilities
    gradient: list[tuple[int, float]] = []  # steps and expected batch of each slot
    names: Counter[str] = Counter()
    chosen: list[int] = []
    for entry in protocol.roster:
        for slot in algorithm.plan(entry):
            if isinstance(slot, DPSGDSlot | SecureSlot):
                gradient.append((1 if isinstance(slot, SecureSlot) else slot.steps, slot.rate * entry.records))
                names[slot.name] += 1
            elif isinstance(slot, SelectionSlot | UnprotectedSlot):
                chosen.append(entry.records)
    # A plan holds every round, though a round may sample clients.
    share = able.expected_releases / max(1.0, _training_tasks(algorithm, names))
    return _LocalWork(
        steps=round(share * sum(count for count, _ in gradient)),
        batches=share * sum(count * max(1.0, batch / protocol.local.batch_size) for count, batch in gradient),
        records=int(share * sum(count * batch for count, batch in gradient)),
        scored=able.max_models * sum(chosen),
        models_down=len(chosen) * (able.max_models - 1),  # for a selection a client gets every model
    )


def _training_tasks(algorithm: Algorithm, slots: Counter[str]) -> float:
    """Count the tasks that fill slots of gradients, given by name; a task that trains two models fills two of them."""
    filled = [slots.keys() & set(step.charges) for step in client_steps(algorithm).values()]
    return sum(count / max((len(names) for names in filled if name in names), default=1) for name, count in slots.items())


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
    tested += client_slice(job, job.protocol.roster[0].id, root)[0].central_evaluations
    rounds = job.protocol.rounds
    trained = TRAINING_PASSES * estimate(job.protocol)["records"] / rounds
    return rounds if not trained else min(rounds, max(1, math.ceil(tested / (EVALUATION_SHARE * trained))))


def is_evaluated(t: int, every: int, rounds: int) -> bool:
    """Return True if the models of a round are evaluated.

    Args:
        t: The round.
        every: Interval of evaluations.
        rounds: Rounds of the job, the last of which is always evaluated.
    """
    return t % every == 0 or t == rounds


def _secret_coin(algorithm: Algorithm) -> float:
    """Fraction of the asked clients that train: all, or those whose secret coin says in."""
    plan = algorithm.plan(algorithm.protocol.roster[0])
    return next((slot.rate for slot in plan if isinstance(slot, SecureSlot)), 1.0)


def _update_size(algorithm: Algorithm) -> int:
    """Count the numbers of an update: of a whole model, of a part of it, or of several models."""
    planned = {slot.name for slot in algorithm.plan(algorithm.protocol.roster[0])}
    for step in client_steps(algorithm).values():
        if (name := update_tensor(step)) is not None and planned.issuperset(step.charges):
            return _numbers(resolve({name: step.gives[name]}, tensor_sides(algorithm)))[name]
    return algorithm.protocol.model.parameters


@dataclass(frozen=True)
class _OtherTasks:
    """Tasks of the whole run that give no update but sums, losses or labels, and the bytes of their tensors."""

    tasks: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


def _other_tasks(algorithm: Algorithm, encoding: MessageEncoding) -> _OtherTasks:
    """Count the tasks that give no update from the clients' plans, less those of other steps that share a slot."""
    steps = [step for step in client_steps(algorithm).values() if step.gives and step.kind not in STAGES]
    training = [step for step in steps if any(spec.is_update or spec.dtype == "u4" for spec in step.gives.values())]
    others = [step for step in steps if step not in training]
    if not others:
        return _OtherTasks()
    found = [0, 0, 0]
    plans = [Counter(slot.name for slot in algorithm.plan(entry)) for entry in algorithm.protocol.roster]
    for step in others:
        sharing = [other for other in training if step.charges[0] in other.charges]
        count = sum(max(0, _planned(step, plan) - sum(_planned(other, plan) for other in sharing)) for plan in plans)
        found[0] += count
        found[1] += count * _bytes(encoding.release_template(step))
        found[2] += count * _bytes(encoding.task_template(step))
    return _OtherTasks(*found)


def _planned(step: ClientStep, plan: Counter[str]) -> int:
    """Count the tasks of a step that a plan allows."""
    return min(plan[name] for name in step.charges)


def _numbers(template: Template) -> dict[str, int]:
    """Count the numbers of each tensor, at the largest size that it may have."""
    return {
        name: math.prod(side if isinstance(side, int) else side[1] for side in pinned.shape)
        for name, pinned in template.items()
    }


def _bytes(template: Template) -> int:
    """Count the bytes of all tensors, each at the largest size that it may have."""
    return sum(count * DTYPES[template[name].dtype].itemsize for name, count in _numbers(template).items())


def _exact_updates(algorithm: Algorithm) -> int:
    """Updates over the whole run that are sent as float32 even where updates are compressed."""
    steps = [step for step in client_steps(algorithm).values() if any(spec.exact for spec in step.gives.values())]
    plans = [[slot.name for slot in algorithm.plan(entry)] for entry in algorithm.protocol.roster]
    return sum(plan.count(step.charges[0]) for plan in plans for step in steps)
