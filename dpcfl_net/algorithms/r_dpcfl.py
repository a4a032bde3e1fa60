"""R-DPCFL (Malekmohammadi, Taik, Farnadi, "Differentially Private Clustered Federated Learning", TMLR 2025, Algorithm 1)."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.base import MODEL, Options, Setting, on_client
from dpcfl_net.algorithms.shared_steps import Choosing, Selection
from dpcfl_net.clustering import mixture
from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.protocol import ClientEntry
from dpcfl_net.core.types import Release, State
from dpcfl_net.federation.aggregation import add_by_cluster
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.client import Client
from dpcfl_net.privacy.slots import DPSGDSlot, Slot, given

PICTURE = (
    "coordinates", "posteriors", "labels", "centres", "deviations", "candidates", "scores", "mss", "mss_plain", "mpo", "clusters",
)  # fmt: skip


class Clustering(Options):
    """How the first round's updates are clustered."""

    space: Literal["spectral", "pca2", "full", "sklearn"] = Field(default="spectral", description="where the mixture is fitted")


class RDPCFL(Choosing):
    """Full-batch first round, a mixture on its updates, soft rounds, a window of private choices, then frozen clusters."""

    name = "r-dpcfl"
    paper = "Malekmohammadi, Taik, Farnadi, TMLR 2025, Algorithm 1"

    class Options(Options):
        clusters: int | Literal["auto"] = Field(default="auto", description="M, or auto: chosen by effective separation")
        max_clusters: int = Field(default=8, ge=2, le=64, description="largest M that auto considers")
        clustering: Clustering = Field(default=Clustering(), description="the mixture")
        selection: Selection = Field(default=Selection(), description="the window of private choices")
        warm_start: bool = Field(default=False, description="start cluster models from the posterior-weighted first updates")

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        if options.clusters == "auto":
            return []
        if not 1 <= options.clusters <= setting.clients:
            return [f"algorithm.clusters is {options.clusters}: must be 1 to the number of clients, {setting.clients}, or auto"]
        return []

    @property
    def max_models(self) -> int:
        return self.options.max_clusters if self.options.clusters == "auto" else self.options.clusters

    @property
    def window(self) -> int:
        return max(1, int(self.options.selection.rounds_fraction * self.protocol.rounds))

    def plan(self, client: ClientEntry) -> list[Slot]:
        """K full-batch steps, (E-1) rounds of K ceil(N/b) steps, and the window's selections: all solved for one z."""
        count = 0 if self.options.clusters == 1 else self.window
        selections = self.selections(count, self.options.selection.budget_fraction)
        train = self.training(client, self.protocol.rounds - 1)
        return [DPSGDSlot("first", 1.0, self.protocol.local.epochs), *train, *selections]

    # ---- server half

    @property
    def weights(self) -> dict[int, float] | None:
        """How clients weigh within a cluster: all alike."""
        return None

    @property
    def noise_deviation(self) -> float | None:
        """That of the noise in each coordinate of a first update, lr c z sqrt(K) / N, which everybody knows; None if clients differ."""
        local = self.protocol.local
        found = {
            local.lr * local.clip * given(entry.noise_multiplier) * math.sqrt(local.epochs) / entry.records
            for entry in self.protocol.roster
        }
        return found.pop() if len(found) == 1 else None

    def last_choice(self, soft_until: int) -> int:
        """The last round in which clients choose, when soft clustering ends with round E_c."""
        return soft_until + self.window

    def choices(self, fed: Federation, models: np.ndarray, assignment: dict[int, Any]) -> Any:
        """A round of private choices."""
        return self.choose(fed, models, assignment)

    def start(self, fed: Federation) -> State:
        return State(models=fed.initial_model()[None], assignment=[None] * len(fed.clients), memory={"phase": "first"})

    def round(self, state: State, t: int, fed: Federation) -> State:
        if t == 1:
            return self.cluster(state, fed)
        soft_until, phase = int(state.memory["soft_until"]), "frozen"  # E_c
        assignment: dict[int, Any] = dict(zip(fed.clients, state.assignment, strict=True))
        if len(state.models) == 1:
            phase = "single"
        elif t <= soft_until:
            phase = "soft"
            draw = fed.rng("soft assignment")  # R(i) ~ Categorical(pi_i)
            assignment = {
                i: int(draw.choice(len(pi), p=pi)) for i, pi in zip(fed.clients, state.memory["posteriors"], strict=True)
            }
        elif t <= self.last_choice(soft_until):
            phase = "window"
        if phase == "window":
            assignment, updates = self.choices(fed, state.models, assignment)
        else:
            updates = self.train_each(fed, state.models, assignment)
        models = add_by_cluster(state.models, assignment, updates, self.weights)
        return State(models, [assignment[i] for i in fed.clients], {**state.memory, "phase": phase})

    def cluster(self, state: State, fed: Federation) -> State:
        """Round 1: a spherical mixture on the n full-batch updates; every model starts at theta_init."""
        theta = state.models[0]
        updates = fed.call(self.first_round_update, common={"model": theta}).column("update")
        clusters = None if self.options.clusters == "auto" else self.options.clusters
        if clusters is not None and len(updates) < clusters:
            if set(fed.missing) - set(fed.lost):
                raise RunFailed(f"{len(updates)} clients answered the first round, too few for {clusters} clusters")
            clusters = max(1, len(updates))  # a crash cost the other answers for good: fewer clusters, or no run at all
        stacked = np.stack([*updates.values()] or [np.zeros_like(theta)])
        fit = mixture.fit(
            stacked,
            clusters=clusters,
            max_clusters=self.options.max_clusters,
            space=self.options.clustering.space,
            seed=fed.seed("mixture"),
            noise_deviation=self.noise_deviation,
        )
        found = fit.clusters
        rows = {i: fit.posteriors[k] for k, i in enumerate(updates)}
        posteriors = np.stack([rows.get(i, np.full(found, 1 / found)) for i in fed.clients])  # who is missing knows nothing
        models = np.repeat(theta[None], found, axis=0)
        if self.options.warm_start:
            weights = fit.posteriors / np.maximum(fit.posteriors.sum(axis=0), 1e-12)
            models = models + (weights.T @ stacked).astype(np.float32)
        memory = {
            "phase": "first",
            "posteriors": posteriors,
            "soft_until": max(1, int((1 - fit.mpo) * self.protocol.rounds / 2)),  # E_c
            "mss": float(fit.mss),
            "mss_plain": float(fit.mss_plain),
            "mpo": float(fit.mpo),
            "picture": {name: np.asarray(getattr(fit, name)) for name in PICTURE},
        }
        return State(models, [int(row.argmax()) for row in posteriors], memory)

    def describe(self, state: State) -> dict[str, Any]:
        return {key: state.memory.get(key) for key in ("phase", "mss", "mss_plain", "mpo")}

    def first_round(self, state: State) -> dict[str, Any] | None:
        return state.memory.get("picture")

    # ---- client half

    @on_client(bundle=["first"], takes={"model": MODEL}, gives={"update": MODEL})
    def first_round_update(self, me: Client, model: np.ndarray) -> Release:
        """K full-batch noisy steps: the least noise per coordinate that z allows (R, section 4)."""
        return Release(update=me.dpsgd("first", model) - model)
