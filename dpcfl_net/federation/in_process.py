"""Federation in one process: clients run one after the other behind the same gates and ledgers, without sockets."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from dpcfl_net.core.errors import Refused
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.tensors import finite, unpack
from dpcfl_net.core.types import Answer, Task
from dpcfl_net.federation.asynchronous import Outcome, Participation
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.client_host import ClientHost
from dpcfl_net.federation.in_order import Take
from dpcfl_net.federation.release_check import ReleaseCheck


class InProcessFederation(Federation):
    """Federation that calls each client's gate directly; a refused task counts as missing, as over the network.

    Args:
        protocol: The signed protocol.
        hosts: Client runtimes by client id.
        quorum: Fraction of the asked clients that must answer.
        check: Raises Refused for a release that the server rejects, as `release_check` returns it; None: any norm is accepted.
    """

    def __init__(
        self,
        protocol: Protocol,
        hosts: Mapping[int, ClientHost],
        *,
        quorum: float = 1.0,
        check: ReleaseCheck | None = None,
    ) -> None:
        super().__init__(protocol, quorum=quorum)
        self.hosts, self._check = hosts, check
        self._open: dict[int, Participation] = {}

    def _submit(self, work: Participation) -> None:
        """See `Federation`."""
        self._open.setdefault(work.client, work)

    def _next_outcome(self, among: Collection[int] | None) -> Outcome:
        """Compute the open task that ends first by its virtual time; of equal times the one of the first client."""
        awaited = (work for work in self._open.values() if among is None or work.client in among)
        work = min(awaited, key=lambda work: (work.ends, work.client))
        answer = self._answer(work.client, Task(work.participation, work.kind, dict(work.tensors)))
        del self._open[work.client]
        release = unpack(answer.release) if answer.status == "release" else None
        if release is not None and (problem := self._problem(work.client, work.kind, release)):
            self.reasons[work.client], release = problem, None
        return Outcome(work.client, release, answer.status == "lost", work.ends)

    def _exchange(self, kind: str, tasks: Mapping[int, dict[str, np.ndarray]], take: Take, window: int | None) -> None:
        self.lost, self.refused = [], []
        for client in sorted(tasks):
            answer = self._answer(client, Task(self.round, kind, tasks[client]))
            if answer.status == "release":
                release = unpack(answer.release)
                if problem := self._problem(client, kind, release):  # missing, as over the network
                    self.reasons[client] = problem
                else:
                    take(client, release)
            elif answer.status == "lost":
                self.lost.append(client)
            else:
                self.refused.append(client)
                self.reasons[client] = f"{answer.status} {answer.code}: {answer.reason}"

    def _answer(self, client: int, task: Task) -> Answer:
        return self.hosts[client].answer(task)

    def _problem(self, client: int, kind: str, release: dict[str, np.ndarray]) -> str:
        """Say why the server refuses a release, in the words of the wire; empty if it does not."""
        bad = next((name for name, array in release.items() if not finite(array)), None)
        if bad is not None:
            return f"non-finite: tensor {bad} holds a NaN or an infinity"
        try:
            if self._check is not None:
                self._check(client, kind, release)
        except Refused as refusal:
            return f"{refusal.code}: {refusal.reason}"
        return ""
