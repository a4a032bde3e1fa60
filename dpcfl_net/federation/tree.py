"""The coordinator's federation of a job with aggregators: one task and one answer per group of clients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.roster import ClientEntry, Roster
from dpcfl_net.federation.aggregation import ModelMeans
from dpcfl_net.federation.base import Arrays, Federation
from dpcfl_net.federation.call_arguments import step_of
from dpcfl_net.federation.call_limits import CallLimits, LauncherLink
from dpcfl_net.federation.capabilities import ClientSide
from dpcfl_net.federation.group_messages import (
    ANSWERED,
    LOST,
    NOT_ASKED,
    STATUS,
    SUMMED,
    TOTALS,
    GroupMessages,
    Summing,
    beyond_bounds,
    group_task,
    read_sums,
)
from dpcfl_net.federation.in_order import Take
from dpcfl_net.federation.message_encoding import MessageEncoding
from dpcfl_net.federation.network import NetworkFederation, Report
from dpcfl_net.federation.round_counts import answers_needed
from dpcfl_net.transport.endpoint import ServerEndpoint


class GroupCalls(NetworkFederation):
    """Delivers tasks to aggregators, which take the place of clients; args as `NetworkFederation`."""

    peers = "aggregators"

    def exchange(self, t: int, task: str, tasks: Mapping[int, dict[str, np.ndarray]], take: Take) -> None:
        """Send tasks and pass the answers on in the order of the aggregators.

        Args:
            t: Round.
            task: Name of the task.
            tasks: Number of an aggregator to its tensors.
            take: Receives number and answer.
        """
        self.round, self.needed, self.reasons = t, 0, {}
        self._exchange(task, tasks, take, None)


class TreeFederation(Federation):
    """Federation whose clients connect to aggregators. The quorum counts clients; a round below it fails without a pause.

    Args:
        algorithm: The job's algorithm.
        endpoint: The coordinator's endpoint, whose clients are the aggregators by number.
        limits: Quorum and timeouts.
        launcher: Connection to the launcher, which names lost aggregators.
        warn: Receives warnings.
    """

    def __init__(
        self, algorithm: ClientSide, endpoint: ServerEndpoint, limits: CallLimits, launcher: LauncherLink, warn: Report
    ) -> None:
        protocol = algorithm.protocol
        super().__init__(protocol, quorum=limits.quorum)
        self._groups = [entry.clients for entry in protocol.aggregators]
        # An aggregator waits for its clients as long as the coordinator would, and answers then.
        # Below 1 the quorum counts clients, and groups may differ in size.
        calls = CallLimits(float(limits.quorum == 1), 2 * limits.timeout_s, 2 * limits.join_timeout_s)
        self._warn = warn
        peers = _aggregators(protocol)
        self._calls = GroupCalls(peers, endpoint, calls, launcher, warn=lambda text: warn(_of_aggregators(text)))

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent so far."""
        return self._calls.traffic

    @property
    def live(self) -> int:
        """Number of clients whose aggregator is connected."""
        return sum(len(self._groups[number]) for number in self._calls.endpoint.ready)

    def join(self, t: int = 1) -> None:
        """Wait for the aggregators, which connect when their clients have; see `NetworkFederation.join`."""
        try:
            self._calls.join(t)
        except RunFailed as failure:
            raise RunFailed(_of_aggregators(str(failure))) from None
        expected, needed = len(self.clients), answers_needed(self.quorum, len(self.clients))
        if t <= self.protocol.rounds and self.live < needed:
            raise RunFailed(
                f"the aggregators of {self.live} of {expected} clients have joined, the quorum is {needed} (runtime.quorum is "
                f"{self.quorum:g})"
            )

    def goodbye(self) -> None:
        """Send goodbyes until all aggregators have left."""
        self._calls.goodbye()

    def add_up(
        self,
        method: Any,
        means: ModelMeans,
        rows: Mapping[int, int] | None = None,
        *,
        common: Arrays | None = None,
        each: Mapping[int, Arrays] | None = None,
    ) -> dict[int, int]:
        """See `Federation`: aggregators send sums."""
        self._require_sums(method, rows, each)
        step = step_of(method)
        encoding = MessageEncoding(method.__self__)
        tasks = self._begin(common, each, None)
        most = step.gives["update"].max_norm
        bounds = {} if most is None else {i: most(method.__self__, self.protocol.client(i)) for i in tasks}
        summing = Summing(rows or {}, means.weights or {}, len(means.models), bounds)
        added: dict[int, int] = {}
        answered: list[int] = []

        def take(group: range, answer: Arrays) -> None:
            answered.extend(client for k, client in enumerate(group) if answer[STATUS][k] == ANSWERED)
            rows_of_group, sums = read_sums(group, answer, summing)
            added.update(rows_of_group)
            means.merge(sums)

        self._ask(step.kind + SUMMED, encoding.encode_tasks(step, tasks), summing, take)
        self._end(list(tasks), answered)
        return added

    def _exchange(self, kind: str, tasks: Mapping[int, dict[str, np.ndarray]], take: Take, window: int | None) -> None:
        def take_each(group: range, answer: Arrays) -> None:
            names = answer.keys() - {STATUS}
            clients = [client for k, client in enumerate(group) if answer[STATUS][k] == ANSWERED]
            for k, client in enumerate(clients):
                take(client, {name: answer[name][k] for name in names})

        self._ask(kind, tasks, None, take_each)

    def _ask(
        self,
        task: str,
        tasks: Mapping[int, dict[str, np.ndarray]],
        summing: Summing | None,
        take: Callable[[range, Arrays], None],
    ) -> None:
        """Send each aggregator the tasks of its clients, and pass the answers on in their order; sets `lost` and `reasons`.

        The clients of an aggregator whose answer breaks a rule are missing from the call.
        """
        parts = {k: {client: tasks[client] for client in group if client in tasks} for k, group in enumerate(self._groups)}
        self.lost = []
        refused: dict[int, str] = {}

        def note_and_take(number: int, answer: Arrays) -> None:
            group = self._groups[number]
            if problem := _problem(group, answer, parts[number], summing):
                refused[number] = problem
                self._warn(f"aggregator {number} is out of round {self.round}: {problem}")
                return
            self.lost += [client for k, client in enumerate(group) if answer[STATUS][k] == LOST]
            take(group, answer)

        messages = {k: group_task(self._groups[k], part, summing) for k, part in parts.items() if part}
        self._calls.exchange(self.round, task, messages, note_and_take)
        for number, reason in (self._calls.reasons | refused).items():
            self.reasons |= dict.fromkeys(parts[number], f"aggregator {number}: {reason}")


def _problem(group: range, answer: Arrays, asked: Collection[int], summing: Summing | None) -> str:
    """Say why an aggregator's answer does not fit what it was asked; empty if it does."""
    if {client for k, client in enumerate(group) if answer[STATUS][k] != NOT_ASKED} != set(asked):
        return "it answered for other clients than those that were asked"
    if summing is not None and len(answer[TOTALS]) != summing.models:
        return f"it sent sums for {len(answer[TOTALS])} models of {summing.models}"
    return "" if summing is None else beyond_bounds(group, answer, summing)


def tree_endpoint_arguments(algorithm: ClientSide) -> dict[str, Any]:
    """Return the arguments of the coordinator's endpoint that concern its peers, the aggregators.

    Args:
        algorithm: The job's algorithm.
    """
    messages = GroupMessages(algorithm)
    return {
        "clients": {k: entry.public_key for k, entry in enumerate(algorithm.protocol.aggregators)},
        "result_template": messages.answer_template,
        "check": messages.check_answer,
    }


def _of_aggregators(text: str) -> str:
    """Name aggregators in a text of `NetworkFederation` about its peers."""
    return text.replace("client", "aggregator")


def _aggregators(protocol: Protocol) -> Protocol:
    """Return the protocol with the aggregators as its roster, for `NetworkFederation`."""
    roster = Roster.of(
        ClientEntry(id=k, public_key=entry.public_key, records=1, noise_multiplier=None)
        for k, entry in enumerate(protocol.aggregators)
    )
    return protocol.model_copy(update={"roster": roster, "aggregators": []})
