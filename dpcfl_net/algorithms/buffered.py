"""Asynchronous rounds with a buffer (FedBuff): the server forms a version as soon as K participations have ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dpcfl_net.algorithms.asynchronous_options import Asynchronous, MayBeAsynchronous, asynchronous_of
from dpcfl_net.algorithms.open_tasks import Buffer, fill_buffer
from dpcfl_net.algorithms.shared_steps import FromModel
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.types import State
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting

ORDER_SHOWS = (
    "order of arrival: it decides which updates the server adds to which model, so the models of an asynchronous run also depend on "
    "the durations of tasks (fix: local.pace: constant with local.deadline_s)"
)

WITHOUT_ANSWERS = (
    "a participation without an answer fills a place of its buffer and counts as zeros; the sum of a cluster is divided by the "
    "expected number of its clients in a full buffer as always"
)


class Buffered(FromModel):
    """Algorithm that can run asynchronously after the round in which its clusters are frozen.

    Source: Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation", Algorithm 1.
    """

    Options = MayBeAsynchronous

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        able, how = super().capabilities_for(options, setting), asynchronous_of(options)
        if how is None:
            return able
        first, caveats = cls.most_synchronous(options, setting), able.caveats
        releases = setting.clients * first + how.buffer * (setting.rounds - first)
        caveats = caveats if setting.local.deadline_s is not None else (*caveats, ORDER_SHOWS)
        return replace(able, asynchronous=True, expected_releases=float(releases), caveats=caveats)

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        problems, how = super().problems(options, setting), asynchronous_of(options)
        return problems if how is None else problems + how.problems(setting, cls.most_synchronous(options, setting))

    @classmethod
    def most_synchronous(cls, options: Any, setting: Setting) -> int:
        """Return the largest number of rounds until clusters are frozen; these rounds are always synchronous.

        Args:
            options: Validated options.
            setting: Public facts of the run.
        """
        return 0

    @property
    def asynchronous(self) -> Asynchronous | None:
        """Options of the rounds with frozen clusters; None: they are synchronous."""
        return asynchronous_of(self.options)

    @property
    def participations(self) -> int:
        """Largest number of participations of a client over the whole run; a synchronous round is one."""
        how, rounds = self.asynchronous, self.setting.rounds
        if how is None:
            return rounds
        return how.planned(self.setting.clients, rounds, self.most_synchronous(self.options, self.setting))

    def participations_from(self, client: ClientEntry, first: int) -> int:
        """Count the participations in a client's plan from number `first` on.

        Args:
            client: The client's roster entry.
            first: Number of a participation; in synchronous rounds, the round.
        """
        return client.rounds_there(first, self.participations)

    def buffered_round(self, state: State, t: int, fed: Federation) -> State:
        """Wait until K participations have ended, and form version t; see `fill_buffer`.

        Args:
            state: State after version t - 1; every client has a cluster, which never changes.
            t: Version to form.
            fed: Federation of the clients.

        Returns:
            The state after version t.

        Source: Nguyen et al. 2022, Algorithm 1, with the buffer's mean taken over the public expected number of each cluster.
        """
        how = self.asynchronous
        assert how is not None
        buffer = fill_buffer(self, how, self.participations, state, t, fed)
        moved = _moved(how, state, buffer)
        return State(moved, state.assignment, state.memory | buffer.memory, state.diagnostics | buffer.figures)


def also_without_answers(without_clients: str, options: Any) -> str:
    """Add to a sentence on missing clients in synchronous rounds what the asynchronous ones do, if the job has any."""
    if asynchronous_of(options) is None:
        return without_clients
    return f"{without_clients}; in asynchronous rounds {WITHOUT_ANSWERS}"


def _moved(how: Asynchronous, state: State, buffer: Buffer) -> np.ndarray:
    """Add each cluster's weighted updates, divided by the number that a full buffer holds of it on average."""
    totals = np.zeros(state.models.shape, dtype=np.float64)
    for client, release in buffer.releases.items():
        if weight := how.weight(buffer.staleness[client]):
            totals[state.assignment[client]] += weight * release["update"].astype(np.float64)
    moved = state.models.copy()
    for cluster, total in enumerate(totals):
        if members := state.assignment.count(cluster):
            share = how.buffer * members / len(state.assignment)
            moved[cluster] += (how.server_lr * total / share).astype(np.float32)
    return moved
