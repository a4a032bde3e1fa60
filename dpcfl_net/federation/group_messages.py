"""Messages between the coordinator and an aggregator: one task and one answer for a whole group of clients.

Names that start with a dot cannot be those of a step's tensors, which are names of arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from dpcfl_net.core.errors import Refused
from dpcfl_net.core.tensors import DTYPES, Memory, memory_of, norm
from dpcfl_net.core.types import ClientStep
from dpcfl_net.federation.aggregation import PartialSums
from dpcfl_net.federation.capabilities import ClientSide, client_steps
from dpcfl_net.federation.in_order import Arrays
from dpcfl_net.federation.message_encoding import MessageEncoding
from dpcfl_net.federation.release_check import check_release
from dpcfl_net.transport.messages import Template, TensorTemplate

SUMMED = "_summed"  # end of the name of a task whose answer holds sums
OF = ".of"  # end of the name of the tensor that says which row of a table a client gets
ASKED, STATUS, ROW, WEIGHT, ROWS = ".asked", ".status", ".row", ".weight", ".rows"
TOTALS = ".totals"
NOT_ASKED, ANSWERED, LOST, MISSING = range(4)  # status of a client
ROUNDING = 1e-9  # of a sum in float64, relative to the norms of its terms
Tensors = dict[str, np.ndarray]


class Summing(NamedTuple):
    """Rows and weights by which the updates of a task are added.

    Attributes:
        rows: Row of each client's model; -1: the row that the client chooses.
        weights: Weight of each client.
        models: Number of models M.
        bounds: Largest L2 norm of each client's update; a client that is not named has none.
    """

    rows: Mapping[int, int]
    weights: Mapping[int, float]
    models: int
    bounds: Mapping[int, float] = MappingProxyType({})


def group_task(group: range, tasks: Mapping[int, Arrays], summing: Summing | None) -> Tensors:
    """Combine the tasks of a group's clients; an array that many clients get is sent once.

    Args:
        group: Client ids of the group.
        tasks: Client to its encoded task, at least one.
        summing: How updates are added; None: the answers are passed on.

    Returns:
        The tensors of the group's task.
    """
    found: Tensors = {ASKED: np.array([client in tasks for client in group], np.int64)}
    for name in next(iter(tasks.values())):
        table: dict[Memory, int] = {}
        different: list[np.ndarray] = []
        chosen = np.zeros(len(group), np.int64)
        for client, tensors in tasks.items():
            array = tensors[name]
            key = memory_of(array)
            if key not in table:
                table[key] = len(different)
                different.append(array)
            chosen[client - group.start] = table[key]
        found |= {name: np.stack(different), name + OF: chosen}
    if summing is not None:
        found |= {
            ROW: np.array([summing.rows.get(client, -1) for client in group], np.int64),
            WEIGHT: np.array([summing.weights.get(client, 1.0) for client in group]),
            ROWS: np.array(summing.models, np.int64),
        }
    return found


def client_tasks(group: range, step: ClientStep, tensors: Arrays) -> dict[int, Tensors]:
    """Split a group's task, the inverse of `group_task`.

    Args:
        group: Client ids of the group.
        step: The client step.
        tensors: The group's task, which has passed `GroupMessages.check_task`.

    Returns:
        The encoded task of each client that is asked.
    """
    asked = [k for k in range(len(group)) if tensors[ASKED][k]]
    return {group[k]: {name: tensors[name][tensors[name + OF][k]] for name in step.takes} for k in asked}


def read_sums(group: range, answer: Arrays, summing: Summing) -> tuple[dict[int, int], PartialSums]:
    """Read the sums of an answer; the number of updates and their weights follow from the clients that answered.

    Args:
        group: Client ids of the group.
        answer: The tensors of the answer, which has passed `check_answer`.
        summing: Rows and weights of the task.

    Returns:
        The row of each client whose update was added, and the sums.
    """
    chosen = zip(group, answer[STATUS].tolist(), answer[ROW].tolist(), strict=True)
    rows = {client: summing.rows.get(client, row) for client, status, row in chosen if status == ANSWERED}
    added = {client: row for client, row in rows.items() if row >= 0}
    sums = PartialSums(np.zeros(summing.models, np.int64), np.zeros(summing.models), answer[TOTALS])
    for client, row in added.items():
        sums.counts[row] += 1
        sums.weights[row] += summing.weights.get(client, 1.0)
    return added, sums


def beyond_bounds(group: range, answer: Arrays, summing: Summing) -> str:
    """Say which sum is longer than updates within their bounds can make it; empty if none is.

    Args:
        group: Client ids of the group.
        answer: As for `read_sums`.
        summing: Rows, weights and bounds of the task.
    """
    added, sums = read_sums(group, answer, summing)
    bounds = np.zeros(summing.models)
    for client, row in added.items():
        bounds[row] += summing.weights.get(client, 1.0) * summing.bounds.get(client, np.inf)
    for row in sorted(set(added.values())):
        with np.errstate(over="ignore"):
            length = norm(sums.totals[row])
        if length > bounds[row] * (1 + ROUNDING):
            return f"its sum for model {row} has norm {length:.3g}, over the bound {bounds[row]:.3g} of its clients"
    return ""


class GroupMessages:
    """Templates and checks of the messages of groups.

    Args:
        algorithm: The job's algorithm.
    """

    def __init__(self, algorithm: ClientSide) -> None:
        self.steps, self.encoding, self._algorithm = client_steps(algorithm), MessageEncoding(algorithm), algorithm
        self._parameters = algorithm.protocol.model.parameters
        self._most = max(algorithm.capabilities.max_models, algorithm.capabilities.published_models)
        self._groups = [entry.clients for entry in algorithm.protocol.aggregators]
        self._largest = max(map(len, self._groups))

    def step(self, task: str) -> ClientStep | None:
        """Return the client step of a group's task; None for an unknown name."""
        return self.steps.get(task.removesuffix(SUMMED))

    def task_template(self, group: range, task: str) -> Template | None:
        """Return the tensors of a group's task; None for an unknown name.

        Args:
            group: Client ids of the group.
            task: Name of the task.
        """
        step, each = self.step(task), (len(group),)
        if step is None or (task.endswith(SUMMED) and "update" not in step.gives):
            return None
        found = _tables(self.encoding.task_template(step), 1, len(group))
        found |= {name + OF: TensorTemplate("i8", each) for name in step.takes}
        found[ASKED] = TensorTemplate("i8", each)
        if task.endswith(SUMMED):
            found |= {ROW: TensorTemplate("i8", each), WEIGHT: TensorTemplate("f8", each), ROWS: TensorTemplate("i8")}
        return found

    def check_task(self, task: str, tensors: Arrays) -> None:
        """Refuse a group's task that names a row that it does not hold, or none for a client that does not choose one.

        Args:
            task: Name of the task.
            tensors: Its tensors, which fit their template.
        """
        step = self.step(task)
        assert step is not None
        named = [(name + OF, 0, len(tensors[name])) for name in step.takes]
        if task.endswith(SUMMED):
            if not 1 <= int(tensors[ROWS]) <= self._most:
                raise Refused("group", f"{ROWS} is {int(tensors[ROWS])}, out of range")
            if "choice" not in step.gives and (tensors[ROW][tensors[ASKED] != 0] < 0).any():
                raise Refused("group", f"{ROW} leaves the choice of a model to clients, which do not choose in {step.kind}")
            named.append((ROW, -1, int(tensors[ROWS])))
        for name, least, end in named:
            if not ((least <= tensors[name]) & (tensors[name] < end)).all():
                raise Refused("group", f"{name} is out of range")

    def answer_template(self, task: str) -> Template:
        """Return the tensors of a group's answer.

        Args:
            task: Name of the task, as the coordinator sent it.
        """
        step, each, most = self.step(task), ((1, self._largest),), (1, self._most)
        assert step is not None
        found = {STATUS: TensorTemplate("i8", each)}
        if not task.endswith(SUMMED):
            return found | _tables(self.encoding.release_template(step), 0, self._largest)
        return found | {
            ROW: TensorTemplate("i8", each),
            TOTALS: TensorTemplate("f8", (most, self._parameters)),
        }

    def check_answer(self, number: int, task: str, tensors: Arrays) -> None:
        """Refuse a group's answer whose tensors do not agree with each other or with the group, or with a release that is refused.

        Args:
            number: Number of the aggregator.
            task: Name of the task.
            tensors: Its tensors, which fit their template.

        Raises:
            Refused: "group", or as `check_release`.
        """
        status, step = tensors[STATUS], self.step(task)
        assert step is not None
        wrong = len(status) != len(self._groups[number]) or not ((status >= NOT_ASKED) & (status <= MISSING)).all()
        if task.endswith(SUMMED):
            wrong = wrong or len(tensors[ROW]) != len(status)
            wrong = wrong or not ((tensors[ROW] >= -1) & (tensors[ROW] < len(tensors[TOTALS]))).all()
        else:
            answers = int((status == ANSWERED).sum())
            wrong = wrong or any(len(tensors[name]) != answers for name in self.encoding.release_template(step))
        if wrong:
            raise Refused("group", f"the answer of aggregator {number} does not fit its group")
        if not task.endswith(SUMMED):
            clients = [client for client, one in zip(self._groups[number], status.tolist(), strict=True) if one == ANSWERED]
            for k, client in enumerate(clients):
                release = {name: tensors[name][k] for name in tensors.keys() - {STATUS}}
                check_release(self._algorithm, step, client, release)


def stacked(template: Template, answers: Sequence[Arrays]) -> Tensors:
    """Stack the encoded releases of the clients that answered, in client order.

    Args:
        template: Tensors of a release.
        answers: The releases; may be empty.
    """
    if answers:
        return {name: np.stack([answer[name] for answer in answers]) for name in template}
    sizes = {name: tuple(side if isinstance(side, int) else side[0] for side in one.shape) for name, one in template.items()}
    return {name: np.zeros((0, *sizes[name]), DTYPES[one.dtype]) for name, one in template.items()}


def _tables(template: Template, least: int, most: int) -> dict[str, TensorTemplate]:
    """Tensors of one client as tables with a row for each of several clients."""
    return {name: replace(one, shape=((least, most), *one.shape)) for name, one in template.items()}
