"""Secure sums on the server: runs the stages of a round over a federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpcfl_net.core.types import ClientStep
from dpcfl_net.federation.secure.server_stages import Aborted, ServerRound
from dpcfl_net.federation.secure.stages import KEYS, SHARES, SURVIVORS, UNMASK
from dpcfl_net.federation.secure.job_terms import terms_of

if TYPE_CHECKING:
    from dpcfl_net.federation.base import Arrays, ClientSide, Federation

Group = tuple[int, ...]


@dataclass(frozen=True)
class SecureSum:
    """Result of a secure sum.

    Attributes:
        survivors: Clients whose vectors are in the sum.
        total: The sum, (d,) float64; None if it was aborted.
        aborted: Why it was aborted; empty if it was not.
    """

    survivors: tuple[int, ...]
    total: np.ndarray | None = None
    aborted: str = ""


@dataclass(frozen=True)
class _Stage:
    """A stage in the form in which `Federation.call` takes a client step."""

    client_step: ClientStep
    __self__: ClientSide


def secure_sums(fed: Federation, step: Any, work: Mapping[Group, Arrays]) -> dict[Group, SecureSum]:
    """Add up what the clients of each group send, so that the server learns the sums and nothing else.

    A group with too few answers at a stage is aborted: its clients have paid for what they sent, and its sum is never known.

    Args:
        fed: Federation of the clients.
        step: The algorithm's client step, which takes `MASKING` and gives `MASKED`.
        work: Group to the further tensors of its tasks; no client is in two groups.

    Returns:
        Group to its sum.

    Raises:
        RunFailed: If fewer clients than the quorum answer a stage.

    Source: Bonawitz et al. 2017, figure 4; Bell et al. 2020 for the graph.
    """
    algorithm: ClientSide = step.__self__
    return _Sums(fed, algorithm, work).run(step)


class _Sums:
    """The groups of one round; those that are aborted are left out of later stages."""

    def __init__(self, fed: Federation, algorithm: ClientSide, work: Mapping[Group, Arrays]) -> None:
        self._fed, self._algorithm, self._work = fed, algorithm, work
        self._open = {group: ServerRound(terms_of(fed.protocol, group), fed.round, fed.protocol) for group in work}
        self._results: dict[Group, SecureSum] = {}

    def run(self, step: Any) -> dict[Group, SecureSum]:
        first = {client: {"group": np.array(group, np.int64)} for group in self._open for client in group}
        self._exchange(KEYS, first, ServerRound.add_keys)
        self._stage(SHARES, ServerRound.shares_tasks, ServerRound.add_boxes)
        tasks = self._next(ServerRound.masked_tasks)
        own = {client: self._work[group] for group in self._open for client in group}
        self._exchange(step, {client: {**own[client], **task} for client, task in tasks.items()}, ServerRound.add_masked)
        self._stage(SURVIVORS, ServerRound.survivors_tasks, ServerRound.add_signature)
        self._stage(UNMASK, ServerRound.unmask_tasks, ServerRound.add_shares)
        self._each(self._finish)
        return {group: self._results[group] for group in self._work}

    def _stage(
        self,
        stage: ClientStep,
        tasks: Callable[[ServerRound], dict[int, dict[str, np.ndarray]]],
        take: Callable[[ServerRound, int, Arrays], None],
    ) -> None:
        self._exchange(stage, self._next(tasks), take)

    def _next(self, tasks: Callable[[ServerRound], dict[int, dict[str, np.ndarray]]]) -> dict[int, dict[str, np.ndarray]]:
        """Tasks of all groups that are not aborted; a group with too few answers is aborted here."""
        found: dict[int, dict[str, np.ndarray]] = {}
        self._each(lambda group, server: found.update(tasks(server)))
        return found

    def _exchange(
        self, step: Any, tasks: Mapping[int, Arrays], take: Callable[[ServerRound, int, Arrays], None]
    ) -> None:
        if not tasks:
            return
        servers = {client: server for group, server in self._open.items() for client in group}
        method = _Stage(step, self._algorithm) if isinstance(step, ClientStep) else step
        self._fed.stream(method, lambda client, release: take(servers[client], client, release), each=tasks)

    def _each(self, act: Callable[[Group, ServerRound], None]) -> None:
        for group, server in list(self._open.items()):
            try:
                act(group, server)
            except Aborted as why:
                del self._open[group]
                self._results[group] = SecureSum((), aborted=str(why))

    def _finish(self, group: Group, server: ServerRound) -> None:
        words = server.unmask()
        code = self._algorithm.secure_code(self._fed.protocol.client(group[0]), len(group))
        self._results[group] = SecureSum(server.survivors, code.decode(words))

