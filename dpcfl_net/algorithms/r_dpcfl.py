"""R-DPCFL (Malekmohammadi, Taik, Farnadi, "Differentially Private Clustered Federated Learning", TMLR 2025, Algorithm 1)."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.base import MODEL, UPDATE, Options, on_client
from dpcfl_net.algorithms.shared_steps import Choosing, Selection
from dpcfl_net.clustering import mixture
from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.protocol import ClientEntry
from dpcfl_net.core.types import Assignment, Release, State
from dpcfl_net.federation.aggregation import add_by_cluster
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Setting
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
        valid = options.clusters == "auto" or 1 <= options.clusters <= setting.clients
        must = f"must be 1 to the number of clients, {setting.clients}, or auto"
        return [] if valid else [f"algorithm.clusters is {options.clusters}: {must}"]

    @staticmethod
    def most_clusters(options: Any) -> int:
        return options.max_clusters if options.clusters == "auto" else options.clusters

    def plan(self, client: ClientEntry) -> list[Slot]:
        """Lines 1-3: K full-batch steps, E - 1 rounds of K ceil(N/b) steps, the window's choices; one z pays for all."""
        local, rounds = self.protocol.local, self.protocol.rounds
        return [DPSGDSlot("first", 1.0, local.epochs), *self.training(client, rounds - 1), *self.choice_slots()]

    def choice_slots(self) -> list[Slot]:
        """Slots of the private choices (line 21)."""
        count = 0 if self.options.clusters == 1 else self.window
        return [*self.selections(count, self.options.selection.budget_fraction)]

    def start(self, fed: Federation) -> State:
        return State(fed.initial_model()[None], [None] * len(fed.clients))

    def round(self, state: State, t: int, fed: Federation) -> State:
        """Lines 4-28."""
        if t == 1:
            return self.first_round(state.models[0], fed)
        phase, assignment = self.phase(state, t), state.assignment
        if phase == "soft":
            assignment = self.draw(fed, state.memory["posteriors"])
        if phase == "window":  # lines 19-23
            assignment, updates = self.choices(fed, state.models, assignment)
        else:  # lines 22-23
            updates = self.train_each(fed, state.models, assignment)
        models = add_by_cluster(state.models, assignment, updates, self.weights)  # lines 24-28
        shown = {name: value for name, value in state.diagnostics.items() if name != "first_round"}
        return State(models, assignment, state.memory, {**shown, "phase": phase})

    def first_round(self, theta: np.ndarray, fed: Federation) -> State:
        """Lines 5-14: cluster the clients by a spherical mixture on their full-batch updates."""
        updates = fed.call(self.first_round_update, common={"model": theta}).column("update")  # lines 6-7
        stacked = np.stack([*updates.values()] or [np.zeros_like(theta)])
        fit = self.fit(stacked, len(updates), fed)  # lines 9-11
        uniform = np.full(fit.clusters, 1 / fit.clusters)  # of a client that did not answer
        rows = dict(zip(updates, fit.posteriors, strict=False))
        posteriors = np.stack([rows.get(i, uniform) for i in fed.clients])  # pi_1, ..., pi_n
        soft_until = max(1, int((1 - fit.mpo) * self.protocol.rounds / 2))  # line 12: E_c, section 4.3
        models = np.repeat(theta[None], fit.clusters, axis=0)  # line 13
        if self.options.warm_start:
            weights = fit.posteriors / np.maximum(fit.posteriors.sum(axis=0), 1e-12)
            models = models + (weights.T @ stacked).astype(np.float32)
        shown = {"phase": "first", "MSS": float(fit.mss), "uncorrected MSS": float(fit.mss_plain), "MPO": float(fit.mpo)}
        picture = {name: np.asarray(getattr(fit, name)) for name in PICTURE}
        memory = {"posteriors": posteriors, "soft_until": soft_until}
        return State(models, [int(row.argmax()) for row in posteriors], memory, {**shown, "first_round": picture})

    def fit(self, updates: np.ndarray, answered: int, fed: Federation) -> mixture.MixtureFit:
        """Lines 9-11: the mixture of M components on the updates (n, p), with M chosen if it is unknown."""
        clusters = None if self.options.clusters == "auto" else self.options.clusters
        if clusters is not None and answered < clusters:
            if set(fed.missing) - set(fed.lost):
                raise RunFailed(f"{answered} clients answered the first round, too few for {clusters} clusters")
            clusters = max(1, answered)  # a crash lost the other answers for good: fewer clusters, or no run at all
        return mixture.fit(
            updates, clusters=clusters, max_clusters=self.options.max_clusters, space=self.options.clustering.space,
            seed=fed.seed("mixture"), noise_deviation=self.noise_deviation,
        )  # fmt: skip

    @property
    def noise_deviation(self) -> float | None:
        """Deviation of the noise per coordinate of a first update, lr c z sqrt(K) / N; None if clients differ."""
        local, roster = self.protocol.local, self.protocol.roster
        found = {local.lr * local.clip * given(e.noise_multiplier) * math.sqrt(local.epochs) / e.records for e in roster}
        return found.pop() if len(found) == 1 else None

    @property
    def window(self) -> int:
        """Rounds of private choices; the paper's clients choose in every round after E_c."""
        return max(1, int(self.options.selection.rounds_fraction * self.protocol.rounds))

    def phase(self, state: State, t: int) -> str:
        """Stage of round t > 1: soft clustering to E_c (line 15), then a window of choices (line 18), then frozen clusters."""
        soft_until = int(state.memory["soft_until"])
        if len(state.models) == 1:
            return "single"
        return "soft" if t <= soft_until else "window" if t <= soft_until + self.window else "frozen"

    def draw(self, fed: Federation, posteriors: np.ndarray) -> Assignment:
        """Lines 16-17: R(i) = m with probability pi_i[m]."""
        rng = fed.rng("soft assignment")
        return [int(rng.choice(len(pi), p=pi)) for pi in posteriors]

    @on_client(charges=["first"], takes={"model": MODEL}, gives={"update": UPDATE})
    def first_round_update(self, me: Client, model: np.ndarray) -> Release:
        """Line 7: K full-batch noisy steps, which have the least noise per coordinate that z allows (Lemma 4.1)."""
        return Release(update=me.dpsgd("first", model) - model)

    @property
    def weights(self) -> dict[int, float] | None:
        """Line 26: weights of clients within a cluster; None weighs all alike."""
        return None

    def choices(self, fed: Federation, models: np.ndarray, assignment: Assignment) -> tuple[Assignment, dict[int, np.ndarray]]:
        """Lines 19-23: private choices, and training from the chosen model."""
        return self.choose(fed, models, assignment)
