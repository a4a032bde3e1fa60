"""DPMM-CFL: a Dirichlet process mixture of client models, so that the number of clusters is inferred in every round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms import base
from dpcfl_net.algorithms.base import EXACT_UPDATE, MODEL, on_client
from dpcfl_net.algorithms.shared_steps import FromModel
from dpcfl_net.clustering.dirichlet import partition
from dpcfl_net.clustering.gram import centred_gram
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.types import Assignment, Release, State
from dpcfl_net.federation.aggregation import mean
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.federation.client import Client
from dpcfl_net.privacy.slots import DPSGDSlot, Slot, given

MOST_CLIENTS = 300  # a sweep takes n^3 K operations: seconds a round at this number
WITHOUT_CLIENTS = (
    "clusters are inferred in rounds that all clients answer and stay in others; the mean of a cluster is over its clients that "
    "answered; a cluster without an answer keeps its model"
)


class DPMMCFL(FromModel):
    """The server samples clusters of the clients' models in every round, and averages the models of each cluster.

    Source: Jaramillo-Civill, Wu, Closas, "DPMM-CFL: clustered federated learning via Dirichlet process mixture model nonparametric
    clustering", 2025. Only its abstract and summaries of it were at hand. From these: a Dirichlet process prior on the parameters
    of clusters, joint inference of their number and of assignments by split-merge MCMC in every round, one federated
    model for each cluster. Chosen here: Gaussian likelihood and prior with cluster means integrated out, sampling by
    `clustering.dirichlet`, the most probable partition visited, unweighted means. The paper has no privacy. Here clients release
    updates of DP-SGD; all clustering is post-processing, and the known variance of the noise is part of the likelihood. Under
    this noise one round tells too little: by default the evidence of earlier rounds is kept (`evidence: accumulated`), and the first
    round is that of R-DPCFL (`first_round: full-batch`). `evidence: round` and `first_round: training` infer each round alone.
    """

    name = "dpmm-cfl"
    paper = "Jaramillo-Civill, Wu, Closas 2025 (after its abstract)"

    class Options(base.Options):
        concentration: float = Field(
            default=1.0, ge=1e-6, le=1e6, description="of the Dirichlet process; larger: more clusters"
        )
        sweeps: int = Field(default=20, ge=1, le=1_000, description="sweeps of the sampler in each round")
        evidence: Literal["accumulated", "round"] = Field(
            default="accumulated", description="models that show clusters: of all rounds so far, or of this round"
        )
        first_round: Literal["full-batch", "training"] = Field(
            default="full-batch",
            description="full-batch: full-batch steps with little noise, as in R-DPCFL; training: a round like any other",
        )

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        return replace(
            super().capabilities_for(options, setting), published_models=setting.clients, covers=("model updates",),
            without_clients=WITHOUT_CLIENTS,
        )  # fmt: skip

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        problems = []
        if setting.clients > MOST_CLIENTS:
            problems.append(f"algorithm.name is dpmm-cfl with {setting.clients} clients: must be at most {MOST_CLIENTS}")
        if setting.upload.form == "top-k":
            why = "the likelihood has the noise of whole updates, and top-k keeps the coordinates with the largest noise"
            problems.append(f"communication.up.form is 'top-k': must be float32 or int8 for dpmm-cfl, since {why}")
        return problems

    def plan(self, client: ClientEntry) -> list[Slot]:
        exact = self.options.first_round == "full-batch"
        first = [DPSGDSlot("first", 1.0, self.protocol.local.epochs)] if exact and client.is_there(1) else []
        return [*first, *self.training(client, client.rounds_there(2 if exact else 1, self.protocol.rounds))]

    def start(self, fed: Federation) -> State:
        return State(fed.initial_model()[None], [0] * len(fed.clients))

    def round(self, state: State, t: int, fed: Federation) -> State:
        if t == 1 and self.options.first_round == "full-batch":
            updates = fed.call(self.first, common={"model": state.models[0]}).column("update")
        else:
            updates = self.train_each(fed, state.models, state.assignment)
        models = {i: state.models[cluster(state, i)] + updates[i] for i in sorted(updates)}
        if len(models) < len(fed.clients):
            rows = [[i for i in models if state.assignment[i] == k] for k in range(len(state.models))]
            means = [mean({i: models[i] for i in own}) if own else state.models[k] for k, own in enumerate(rows)]
            return replace(state, models=np.stack(means), diagnostics={"phase": "mixture", "clusters": len(means)})
        memory = self.evidence(state, models, t)
        found = partition(
            memory["gram"], int(memory["dimension"]), memory["noise"], concentration=self.options.concentration,
            sweeps=self.options.sweeps, rng=fed.rng("mixture"), start=np.array([cluster(state, i) for i in models]),
        )  # fmt: skip
        assignment: Assignment = [int(label) for label in found.labels]
        means = [mean({i: models[i] for i in models if assignment[i] == k}) for k in range(found.clusters)]
        shown = {"phase": "mixture", "clusters": found.clusters}
        return State(np.stack(means), assignment, memory if self.options.evidence == "accumulated" else {}, shown)

    def evidence(self, state: State, models: dict[int, np.ndarray], t: int) -> dict[str, np.ndarray]:
        """Add the inner products of a round's models, in units of the round's noise, to those of earlier rounds.

        The sum is that of vectors which hold all rounds one after another.

        Args:
            state: State before the round.
            models: The model of every client, (p,).
            t: Round.

        Returns:
            gram, (n, n); dimension; noise of each client in the same units, (n,), its mean over rounds.
        """
        noise = np.array([self.noise_variance(self.protocol.client(i), t) for i in models])
        gram, p = centred_gram([*models.values()]) / noise.mean(), self.protocol.model.parameters
        relative, rounds = noise / noise.mean(), 1
        if state.memory:
            rounds += int(state.memory["dimension"]) // p
            gram = gram + state.memory["gram"]
            relative = state.memory["noise"] + (relative - state.memory["noise"]) / rounds
        return {"gram": gram, "dimension": np.int64(rounds * p), "noise": relative}

    @on_client(charges=["first"], takes={"model": MODEL}, gives={"update": EXACT_UPDATE})
    def first(self, me: Client, model: np.ndarray) -> Release:
        """Run K full-batch noisy steps."""
        return Release(update=me.dpsgd("first", model) - model)

    def noise_variance(self, client: ClientEntry, t: int) -> float:
        """Compute the variance of the DP noise in a coordinate of an update: S (lr c z / b)^2 for S steps of batches of b.

        Args:
            client: The client's roster entry.
            t: Round of the update.
        """
        local = self.protocol.local
        first = t == 1 and self.options.first_round == "full-batch"
        slot = next(slot for slot in self.plan(client) if isinstance(slot, DPSGDSlot) and (slot.name == "first") == first)
        deviation = local.lr * local.clip * given(client.noise_multiplier) / (slot.rate * client.records)
        return slot.steps * deviation**2


def cluster(state: State, client: int) -> int:
    """Return a client's cluster, which every client has in this algorithm.

    Args:
        state: State of the server.
        client: Client id.
    """
    found = state.assignment[client]
    assert found is not None
    return found
