"""Secure sums on the server: runs the stages of a round over a federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpcfl_net.core.types import ClientStep
from dpcfl_net.federation.base import Arrays, Federation
from dpcfl_net.federation.capabilities import ClientSide
from dpcfl_net.federation.message_encoding import MessageEncoding
from dpcfl_net.federation.secure.client_side import context_of
from dpcfl_net.federation.secure.job_terms import Identities, terms_of
from dpcfl_net.federation.secure.server_stages import Aborted, ServerRound
from dpcfl_net.federation.secure.stages import KEYS, SHARES, SURVIVORS, UNMASK
from dpcfl_net.privacy.secure_sum import SumCode

Group = tuple[int, ...]
Tasks = dict[int, dict[str, np.ndarray]]


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
    """A stage in the form in which `Federation.stream` takes a client step."""

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
    return _Sums(fed, step, work).run()


class _Sums:
    """The groups of one round; a group that is aborted is left out of later stages."""

    def __init__(self, fed: Federation, step: Any, work: Mapping[Group, Arrays]) -> None:
        self._fed, self._step, self._work = fed, step, work
        self._algorithm: ClientSide = step.__self__
        self._codes: dict[Group, SumCode] = {}
        self._open: dict[Group, ServerRound] = {}
        self._results: dict[Group, SecureSum] = {}
        for group in work:
            code = self._algorithm.secure_code(len(group))
            if code is None:
                self._results[group] = SecureSum((), aborted=f"no secure sum of {len(group)} clients is possible in this job")
                continue
            self._codes[group] = code
            self._open[group] = ServerRound(terms_of(fed.protocol, group), fed.round, Identities(fed.protocol), code.d)

    def run(self) -> dict[Group, SecureSum]:
        stages: list[tuple[Any, Callable[[ServerRound], Tasks], Callable[..., bool]]] = [
            (KEYS, ServerRound.keys_tasks, ServerRound.add_keys),
            (SHARES, ServerRound.shares_tasks, ServerRound.add_boxes),
            (self._step, ServerRound.masked_tasks, ServerRound.add_masked),
            (SURVIVORS, ServerRound.survivors_tasks, ServerRound.add_signature),
            (UNMASK, ServerRound.unmask_tasks, ServerRound.add_shares),
        ]
        for step, tasks, take in stages:
            self._exchange(step, tasks, take)
        self._each(self._finish)
        return {group: self._results[group] for group in self._work}

    def _exchange(self, step: Any, tasks: Callable[[ServerRound], Tasks], take: Callable[..., bool]) -> None:
        """Run one stage of all groups that are not aborted; a group with too few answers before it is aborted here."""
        asked: Tasks = {}
        self._each(lambda group, server: asked.update(tasks(server)))
        if not asked:
            return
        servers = {client: server for group, server in self._open.items() for client in group}
        later = step is not KEYS  # a refusal is final: the client has answered this round with another list of clients
        if isinstance(step, ClientStep):
            step = _Stage(step, self._algorithm)
        else:
            own = {client: self._work[group] for group in self._open for client in group}
            asked = {client: {**own[client], **task} for client, task in asked.items()}

        def pass_on(client: int, release: Arrays) -> None:
            take(servers[client], client, release)

        self._fed.stream(step, pass_on, each=asked, refusals_count=later)

    def _each(self, act: Callable[[Group, ServerRound], None]) -> None:
        for group, server in list(self._open.items()):
            try:
                act(group, server)
            except Aborted as why:
                del self._open[group]
                self._results[group] = SecureSum((), aborted=str(why))

    def _finish(self, group: Group, server: ServerRound) -> None:
        encoding = MessageEncoding(self._algorithm)
        sent = encoding.encode_tasks(self._step.client_step, {group[0]: dict(self._work[group])})[group[0]]
        total = self._codes[group].decode(server.unmask(context_of(sent)))
        self._results[group] = SecureSum(server.survivors, total)
