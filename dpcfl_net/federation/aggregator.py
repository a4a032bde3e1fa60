"""The aggregator's federation: asks the clients of one group and adds their answers for the coordinator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpcfl_net.federation.aggregation import ModelMeans, chosen_row
from dpcfl_net.federation.base import Arrays
from dpcfl_net.federation.call_limits import CallLimits, LauncherLink
from dpcfl_net.federation.capabilities import ClientSide
from dpcfl_net.federation.group_messages import (
    ANSWERED,
    LOST,
    MISSING,
    NOT_ASKED,
    ROW,
    ROWS,
    STATUS,
    SUMMED,
    TOTALS,
    WEIGHT,
    GroupMessages,
    Tensors,
    client_tasks,
    stacked,
)
from dpcfl_net.federation.in_order import window
from dpcfl_net.federation.network import NetworkFederation, Report
from dpcfl_net.transport.endpoint import ServerEndpoint


class AggregatorFederation(NetworkFederation):
    """Federation of one group. It has no state between tasks: after a crash it asks again, and clients send the same bytes.

    Args:
        algorithm: The job's algorithm.
        group: Client ids of the group.
        endpoint: The aggregator's endpoint.
        limits: Timeouts; the coordinator decides on the quorum.
        launcher: Connection to the launcher.
        warn: Receives warnings.
    """

    def __init__(
        self,
        algorithm: ClientSide,
        group: range,
        endpoint: ServerEndpoint,
        limits: CallLimits,
        launcher: LauncherLink,
        warn: Report,
    ) -> None:
        super().__init__(algorithm.protocol, endpoint, limits, launcher, warn)
        self.clients, self._group, self._messages = list(group), group, GroupMessages(algorithm)

    def away(self, t: int) -> list[int]:
        """See `Federation`: those of the group."""
        return [client for client in super().away(t) if client in self._group]

    def idle(self, seconds: float) -> None:
        """Move messages between two tasks.

        Args:
            seconds: Longest duration.
        """
        for event in self.endpoint.poll(seconds):
            self._set_aside(event)

    def answer(self, t: int, task: str, tensors: Arrays) -> Tensors:
        """Run a task of the coordinator on the clients of the group.

        Args:
            t: Round.
            task: Name of the task.
            tensors: Its tensors, which have passed `GroupMessages.check_task`.

        Returns:
            The tensors of the answer.
        """
        step, encoding = self._messages.steps[task.removesuffix(SUMMED)], self._messages.encoding
        tasks, first = client_tasks(self._group, step, tensors), self._group.start
        status = np.full(len(self._group), NOT_ASKED, np.int64)
        status[[client - first for client in tasks]] = MISSING
        self.round, self.needed = t, 0
        limit = window(self.protocol.model.parameters)
        if not task.endswith(SUMMED):
            answers: list[Arrays] = []

            def keep(client: int, release: Arrays) -> None:
                status[client - first] = ANSWERED
                answers.append(release)

            self._exchange(step.kind, tasks, keep, limit)
            return {**stacked(encoding.release_template(step), answers), STATUS: _with_lost(status, first, self.lost)}

        rows = np.full(len(self._group), -1, np.int64)
        empty = np.broadcast_to(np.float32(0), (int(tensors[ROWS]), self.protocol.model.parameters))
        means = ModelMeans(empty, dict(zip(self._group, map(float, tensors[WEIGHT]), strict=True)))

        def add(client: int, tensors_of_client: Arrays) -> None:
            status[client - first] = ANSWERED
            release, assigned = encoding.decode_release(step, tensors_of_client), int(tensors[ROW][client - first])
            row = assigned if assigned >= 0 else chosen_row(release, len(empty))
            if row is not None:
                rows[client - first] = row
                means.add(row, client, release["update"])

        self._exchange(step.kind, tasks, add, limit)
        return {STATUS: _with_lost(status, first, self.lost), ROW: rows, TOTALS: means.sums().totals}


def _with_lost(status: np.ndarray, first: int, lost: Sequence[int]) -> np.ndarray:
    """Mark the clients whose answer a crash lost."""
    status[[client - first for client in lost]] = LOST
    return status
