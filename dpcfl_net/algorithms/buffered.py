"""Asynchronous rounds with a buffer (FedBuff): the server forms a version as soon as K participations have ended."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from dpcfl_net.algorithms.base import Options
from dpcfl_net.algorithms.shared_steps import FromModel
from dpcfl_net.core.protocol import ClientEntry
from dpcfl_net.core.types import State
from dpcfl_net.federation.asynchronous import Outcome, Participation, gather
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting, client_steps
from dpcfl_net.federation.message_encoding import MessageEncoding

ORDER_SHOWS = (
    "order of arrival: it decides which updates the server adds to which model, so the models of an asynchronous run also depend on "
    "the durations of tasks (fix: local.pace: constant with local.deadline_s)"
)
JITTER = 0.1  # relative standard deviation of virtual durations


class Asynchronous(Options):
    """Options of asynchronous rounds; `rounds` of the configuration counts the server's versions."""

    buffer: int = Field(ge=1, description="K: participations that end before the server forms its next model version")
    participations: int | None = Field(
        default=None, ge=1,
        description="most participations of a client, its privacy plan; null: enough to fill all buffers without the slowest K - 1 clients",
    )  # fmt: skip
    concurrency: int | None = Field(default=None, ge=1, description="most clients at work at once; null: all")
    staleness: float = Field(
        default=0.5, ge=0, le=10, description="a: an update that is s versions old has the weight (1 + s)^-a"
    )
    max_staleness: int | None = Field(default=None, ge=0, description="older updates are not used; null: all are used")
    server_lr: float = Field(default=1.0, gt=0, le=1e6, description="learning rate of the server for the weighted mean update")
    durations: list[float] | None = Field(
        default=None,
        description="runs in one process: mean virtual seconds of a participation, by client; null: 1 s each",
    )

    def planned(self, clients: int, rounds: int, synchronous: int = 0) -> int:
        """Return the largest number of participations of a client.

        Args:
            clients: Number of clients.
            rounds: Versions of the run.
            synchronous: Largest number of versions that synchronous rounds form.
        """
        if self.participations is not None:
            return self.participations
        return min(rounds, synchronous + ceil(self.buffer * (rounds - synchronous) / max(1, clients - self.buffer + 1)))

    def problems(self, setting: Setting, synchronous: int = 0) -> list[str]:
        """List the problems of these options in a setting; see `Algorithm.problems`.

        Args:
            setting: The setting.
            synchronous: Largest number of versions that synchronous rounds form.
        """
        n, rounds, name = setting.clients, setting.rounds, "algorithm.asynchronous"
        if self.buffer > n:
            return [f"{name}.buffer is {self.buffer}: must be at most the number of clients, {n}"]
        problems, most = [], self.planned(n, rounds, synchronous)
        # With fewer synchronous rounds the buffers take more participations, but each client has as many more left for them.
        least = synchronous + ceil(self.buffer * (rounds - synchronous) / n)
        if not least <= most <= rounds:
            first = f"up to {synchronous} rounds are synchronous and the other " if synchronous else ""
            why = f"since {first}{rounds - synchronous} rounds take {self.buffer} participations each, a client at most one of them"
            problems.append(f"{name}.participations is {most}: must be {least} to {rounds}, {why}")
        if self.concurrency is not None and not self.buffer <= self.concurrency <= n:
            problems.append(f"{name}.concurrency is {self.concurrency}: must be from the buffer, {self.buffer}, to {n} clients")
        if self.durations is not None and (len(self.durations) != n or min(self.durations) <= 0):
            problems.append(f"{name}.durations is {self.durations}: must be {n} numbers above 0, one for each client")
        return problems


class MayBeAsynchronous(Options):
    """Options of an algorithm that can run asynchronously."""

    added: ClassVar[tuple[str, ...]] = (
        "asynchronous",
    )  # omitted when unset so that the hash of jobs without them is unchanged
    asynchronous: Asynchronous | None = Field(
        default=None, description="rounds that do not wait for slow clients (docs/asynchronous.md); null: synchronous rounds"
    )

    @model_serializer(mode="wrap")
    def _without_unset(self, standard: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in standard(self).items() if key not in self.added or value is not None}


def _how(options: Any) -> Asynchronous | None:
    """Return the asynchronous options; a class derived from `Buffered` may have options without them."""
    return getattr(options, "asynchronous", None)


class Buffered(FromModel):
    """Algorithm that can run asynchronously after the round in which its clusters are frozen.

    Source: Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation", Algorithm 1.
    """

    Options = MayBeAsynchronous

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        able, how = super().capabilities_for(options, setting), _how(options)
        if how is None:
            return able
        first, caveats = cls.most_synchronous(options, setting), able.caveats
        releases = setting.clients * first + how.buffer * (setting.rounds - first)
        caveats = caveats if setting.local.deadline_s is not None else (*caveats, ORDER_SHOWS)
        return replace(able, asynchronous=True, expected_releases=float(releases), caveats=caveats)

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        problems, how = super().problems(options, setting), _how(options)
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
        return _how(self.options)

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
        """Give free clients the present models, wait until K participations have ended, and form version t.

        A client is given a task only at the start of a version, from the checkpointed state, and takes part in a version at most
        once. So a coordinator that resumes from the checkpoint sends every open task again with the same bytes. The number of a
        participation continues that of the synchronous rounds, of which each client has used one participation each.

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
        tasks = _OpenTasks(how, state, t, fed)
        for client in _chosen(how, self.participations, tasks, fed):
            tasks.begin(client, t - 1, _duration(how, client, tasks.counts[client] + 1, fed))
        step, encoding = client_steps(self)["train"], MessageEncoding(self)
        models = {i: {"model": tasks.bases[base][state.assignment[i]]} for i, (_, base, _) in tasks.working.items()}
        for client, tensors in encoding.encode_tasks(step, models).items():
            number, _, ends = tasks.working[client]
            fed.submit(Participation(client, number, step.kind, tensors, ends))
        outcomes = [
            replace(outcome, release=None if outcome.release is None else encoding.decode_release(step, outcome.release))
            for outcome in gather(fed, min(how.buffer, len(tasks.working)))
        ]
        staleness = {outcome.client: t - 1 - tasks.working[outcome.client][1] for outcome in outcomes}
        figures = {"participations": tasks.counts, "staleness (mean)": float(np.mean([*staleness.values()])),
                   "staleness (largest)": max(staleness.values())}  # fmt: skip
        if times := [outcome.at for outcome in outcomes if outcome.at is not None]:
            tasks.time = max(tasks.time, *times)
            figures["virtual time (s)"] = tasks.time
        for outcome in outcomes:
            del tasks.working[outcome.client]
        moved = _moved(how, state, outcomes, staleness)
        return State(moved, state.assignment, state.memory | tasks.memory(), state.diagnostics | figures)


class _OpenTasks:
    """Open tasks, participations so far, and the versions that clients train from; kept in `State.memory`.

    `working` maps a client to (participation, base version, virtual end).
    """

    def __init__(self, how: Asynchronous, state: State, t: int, fed: Federation) -> None:
        kept = state.memory
        self.counts: list[int] = [*kept.get("participations", [t - 1] * len(fed.clients))]
        self.working = {
            int(client): (int(n), int(base), float(ends)) for client, (n, base, ends) in kept.get("working", {}).items()
        }
        self.bases = {int(base): models for base, models in kept.get("bases", {}).items()}
        self.time = float(kept["time"]) if "time" in kept else _synchronous_time(how, t - 1, fed)
        self._models = state.models

    def begin(self, client: int, base: int, duration: float) -> None:
        self.counts[client] += 1
        self.bases[base] = self._models
        self.working[client] = (self.counts[client], base, self.time + duration)

    def memory(self) -> dict[str, Any]:
        """Return the state to keep; versions that no open task needs are left out."""
        needed = {base for _, base, _ in self.working.values()}
        return {
            "participations": self.counts,
            "working": {str(client): list(work) for client, work in self.working.items()},
            "bases": {str(base): models for base, models in self.bases.items() if base in needed},
            "time": self.time,
        }


def _chosen(how: Asynchronous, planned: int, tasks: _OpenTasks, fed: Federation) -> list[int]:
    """Free clients that get a task: those with the fewest participations first, ties in random order."""
    free = [client for client in fed.clients if client not in tasks.working and tasks.counts[client] < planned]
    order = fed.rng("participations").permutation(len(fed.clients))
    free.sort(key=lambda client: (tasks.counts[client], order[client]))
    return sorted(free[: max(0, (how.concurrency or len(fed.clients)) - len(tasks.working))])


def _duration(how: Asynchronous, client: int, number: int, fed: Federation) -> float:
    """Virtual duration of a participation: public, and the same in a resumed run."""
    mean = 1.0 if how.durations is None else how.durations[client]
    draw = fed.rng(f"duration {client} {number}").standard_normal()
    return mean * float(np.exp(JITTER * draw))


def _synchronous_time(how: Asynchronous, rounds: int, fed: Federation) -> float:
    """Virtual duration of the synchronous rounds before the first buffer: each takes as long as its slowest client."""
    draws = fed.rng("durations of synchronous rounds").standard_normal((rounds, len(fed.clients)))
    means = np.ones(len(fed.clients)) if how.durations is None else np.asarray(how.durations)
    return float((means * np.exp(JITTER * draws)).max(axis=1).sum())


def _moved(how: Asynchronous, state: State, outcomes: list[Outcome], staleness: dict[int, int]) -> np.ndarray:
    """Add each cluster's weighted updates, divided by the number that a full buffer holds of it on average."""
    totals = np.zeros(state.models.shape, dtype=np.float64)
    for outcome in outcomes:
        s, cluster = staleness[outcome.client], state.assignment[outcome.client]
        if outcome.release is not None and (how.max_staleness is None or s <= how.max_staleness):
            totals[cluster] += (1 + s) ** -how.staleness * outcome.release["update"].astype(np.float64)
    moved = state.models.copy()
    for cluster, total in enumerate(totals):
        if members := state.assignment.count(cluster):
            share = how.buffer * members / len(state.assignment)
            moved[cluster] += (how.server_lr * total / share).astype(np.float32)
    return moved
