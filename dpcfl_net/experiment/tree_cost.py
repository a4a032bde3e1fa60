"""Work of aggregators: bytes between them and the coordinator, and what each side holds, from the protocol alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dpcfl_net.algorithms.base import Algorithm
from dpcfl_net.federation.in_order import window
from dpcfl_net.federation.message_encoding import MessageEncoding
from dpcfl_net.privacy.slots import SelectionSlot, UnprotectedSlot

SUM_BYTES, UPDATE_BYTES = 8, 4  # of a coordinate of a sum, float64, and of an update, float32
NUMBER_BYTES = 8  # of an entry of the lists with a number for each client
# Lists beside models and updates: which clients are asked, and which row of the task each gets; with sums also row and weight.
LISTS_DOWN, SUMMED_LISTS_DOWN = 2, 4
LISTS_UP, SUMMED_LISTS_UP = 1, 2  # who answered; with sums also the row that each update was added to


@dataclass(frozen=True)
class TreeWork:
    """Expected messages between the aggregators and the coordinator; zeros without aggregators.

    Attributes:
        aggregators: Number of aggregators h.
        models: Models M of a sum.
        bytes_up: Bytes to the coordinator over the whole run.
        bytes_down: Bytes from the coordinator over the whole run.
        held: Bytes per parameter that the coordinator receives in the round with most of them, and holds.
        waiting: Updates that wait in all aggregators together at most, in units of float32.
        passed_on: Updates that all aggregators together pass on in one round, in units of float32.
    """

    aggregators: int = 0
    models: int = 0
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    held: float = 0.0
    waiting: float = 0.0
    passed_on: float = 0.0


def tree_work(algorithm: Algorithm, updates: float, exact: int) -> TreeWork:
    """Estimate the work of a job's aggregators if all clients answer.

    In a summed round (`Capabilities.summed_rounds`) an aggregator sends M sums, in other rounds the updates of its clients.
    A model that several clients of a group get is sent once; the models of frozen clusters are taken as drawn uniformly.

    Args:
        algorithm: The job's algorithm.
        updates: Updates that clients send over the whole run.
        exact: How many of them are float32 where others are compressed; the server needs each of these.
    """
    protocol, able = algorithm.protocol, algorithm.capabilities
    groups = [entry.clients for entry in protocol.aggregators]
    if not groups:
        return TreeWork()
    p, n, rounds, encoding = protocol.model.parameters, len(protocol.roster), protocol.rounds, MessageEncoding(algorithm)
    summed, passed_on = able.summed_rounds, max(0.0, updates - able.summed_rounds * n)
    sums = len(groups) * max(1, able.published_models)
    of_model, of_update = (encoding.model_bytes(p), encoding.update_bytes(p)) if updates else (0, 0)
    trained = updates / n  # rounds
    choices = min(trained, _choices(algorithm))
    up = summed * float(sums * SUM_BYTES * p + SUMMED_LISTS_UP * NUMBER_BYTES * n)
    up += (rounds - summed) * LISTS_UP * NUMBER_BYTES * n + of_update * (passed_on - exact) + UPDATE_BYTES * p * exact
    different = sum(_models_of(algorithm, group) for group in groups)
    down = of_model * ((trained - choices) * different + choices * len(groups) * max(1, able.max_models))
    down += NUMBER_BYTES * n * (summed * SUMMED_LISTS_DOWN + (rounds - summed) * LISTS_DOWN)
    size = of_update / (UPDATE_BYTES * p)
    return TreeWork(
        aggregators=len(groups),
        models=max(1, able.published_models) if summed else 0,
        bytes_up=up,
        bytes_down=down,
        held=max(UPDATE_BYTES * n if passed_on else 0, SUM_BYTES * sums if summed else 0),
        waiting=size * sum(min(len(group), window(p)) for group in groups),
        passed_on=size * n if passed_on else 0,
    )


def _models_of(algorithm: Algorithm, group: Iterable[int]) -> float:
    """Expected number of different models that the clients of a group train from."""
    able, clients = algorithm.capabilities, list(group)
    if able.model_per_client:
        return len(clients)
    if (oracle := algorithm.protocol.oracle) is not None:
        return len({oracle[client] for client in clients})
    m = max(1, able.published_models)
    return m * (1.0 - (1.0 - 1.0 / m) ** len(clients))


def _choices(algorithm: Algorithm) -> int:
    """Rounds in which clients choose among all models."""
    plan = algorithm.plan(algorithm.protocol.roster[0])
    return sum(isinstance(slot, SelectionSlot | UnprotectedSlot) for slot in plan)
