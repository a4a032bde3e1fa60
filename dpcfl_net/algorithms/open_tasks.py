"""Open tasks of asynchronous rounds: which free clients get one, and which answers form the next version."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dpcfl_net.algorithms.asynchronous_options import Asynchronous
from dpcfl_net.algorithms.base import Algorithm
from dpcfl_net.core.types import State
from dpcfl_net.federation.asynchronous import Outcome, Participation
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import client_steps
from dpcfl_net.federation.message_encoding import MessageEncoding

JITTER = 0.1  # relative standard deviation of virtual durations


@dataclass(frozen=True)
class Buffer:
    """Ended participations that form a version.

    Attributes:
        outcomes: Outcomes in client order, decoded.
        staleness: Versions that were formed since each of these clients was given its task.
        memory: Open tasks after this version, for `State.memory`.
        figures: Figures for `State.diagnostics`.
    """

    outcomes: list[Outcome]
    staleness: dict[int, int]
    memory: dict[str, Any]
    figures: dict[str, Any]

    @property
    def releases(self) -> dict[int, Mapping[str, np.ndarray]]:
        """Releases of the clients that answered."""
        return {outcome.client: outcome.release for outcome in self.outcomes if outcome.release is not None}


def fill_buffer(
    algorithm: Algorithm, how: Asynchronous, planned: int, state: State, t: int, fed: Federation,
    among: Collection[int] | None = None, used_up: Collection[int] = (),
) -> Buffer:  # fmt: skip
    """Give free clients the present models, and wait until K participations have ended.

    A client is given a task only at the start of a version, from the checkpointed state, and takes part in a version at most
    once. So a coordinator that resumes from the checkpoint sends every open task again with the same bytes. The number of a
    participation continues that of the synchronous rounds, of which each client has used one participation each.

    Args:
        algorithm: The algorithm; its client step `train` takes a model.
        how: Options of asynchronous rounds.
        planned: Largest number of participations of a client.
        state: State after version t - 1; every client has a cluster, which never changes.
        t: Version to form.
        fed: Federation of the clients.
        among: Clients of which the buffer consists, in a version that is formed again; None: the first K that end.
        used_up: Clients that get no further task.

    Returns:
        The buffer.

    Source: Nguyen et al. 2022, Algorithm 1.
    """
    tasks = _OpenTasks(how, state, t, fed)
    for client in _chosen(how, planned, tasks, fed, used_up):
        tasks.begin(client, t - 1, _duration(how, client, tasks.counts[client] + 1, fed))
    step, encoding = client_steps(algorithm)["train"], MessageEncoding(algorithm)
    models = {i: {"model": tasks.bases[base][state.assignment[i]]} for i, (_, base, _) in tasks.working.items()}
    for client, tensors in encoding.encode_tasks(step, models).items():
        number, _, ends = tasks.working[client]
        fed.submit(Participation(client, number, step.kind, tensors, ends))
    count = min(how.buffer, len(tasks.working)) if among is None else len(among)
    outcomes = [outcome.decoded(partial(encoding.decode_release, step)) for outcome in fed.gather(count, among)]
    staleness = {outcome.client: t - 1 - tasks.working[outcome.client][1] for outcome in outcomes}
    figures: dict[str, Any] = {"participations": tasks.counts}
    if old := [*staleness.values()]:
        figures |= {"staleness (mean)": float(np.mean(old)), "staleness (largest)": max(old)}
    if times := [outcome.at for outcome in outcomes if outcome.at is not None]:
        tasks.time = max(tasks.time, *times)
        figures["virtual time (s)"] = tasks.time
    for outcome in outcomes:
        del tasks.working[outcome.client]
    return Buffer(outcomes, staleness, tasks.memory(), figures)


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


def _chosen(how: Asynchronous, planned: int, tasks: _OpenTasks, fed: Federation, used_up: Collection[int]) -> list[int]:
    """Free clients that get a task: those with the fewest participations first, ties in random order."""
    busy = {*tasks.working, *used_up}
    free = [client for client in fed.clients if client not in busy and tasks.counts[client] < planned]
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
