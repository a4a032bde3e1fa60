"""R-DPCFL (Malekmohammadi, Taik, Farnadi, "Differentially Private Clustered Federated Learning", TMLR 2025, Algorithm 1)."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.base import INDEX, MODEL, MODELS, Algorithm, Setting, full_epochs, on_client
from dpcfl_net.algorithms.base import Options as BaseOptions
from dpcfl_net.clustering import mixture
from dpcfl_net.errors import RunFailed
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.client import Client
from dpcfl_net.federation.combine import add_by_cluster
from dpcfl_net.job import ClientEntry
from dpcfl_net.types import DPSGDSlot, Release, SelectionSlot, Slot, State

PICTURE = (
    "coordinates", "posteriors", "labels", "centres", "deviations", "candidates", "scores", "mss", "mss_plain", "mpo", "clusters",
)  # fmt: skip


class Clustering(BaseOptions):
    """How the first round's updates are clustered."""

    space: Literal["spectral", "pca2", "full", "sklearn"] = Field(default="spectral", description="where the mixture is fitted")


class Selection(BaseOptions):
    """How clients choose their cluster in the window after soft clustering."""

    rounds_fraction: float = Field(default=0.1, gt=0, le=0.5, description="window: max(1, floor(this * rounds)) rounds")
    budget_fraction: float = Field(default=0.03, gt=0, lt=1, description="epsilon of one selection, as a fraction of the total")


class RDPCFL(Algorithm):
    """Full-batch first round, a mixture on its updates, soft rounds, a window of private choices, then frozen clusters."""

    name = "r-dpcfl"
    paper = "Malekmohammadi, Taik, Farnadi, TMLR 2025, Algorithm 1"

    class Options(BaseOptions):
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
        rate, steps = full_epochs(self.protocol.local, client)
        privacy = self.protocol.privacy
        per_selection = self.options.selection.budget_fraction * privacy.epsilon
        eta = per_selection if privacy.adjacency == "zero-out" else per_selection / 2
        train = [DPSGDSlot("train", rate, steps)] * (self.protocol.rounds - 1)
        selections = [] if self.options.clusters == 1 else [SelectionSlot("select", eta)] * self.window
        return [DPSGDSlot("first", 1.0, self.protocol.local.epochs), *train, *selections]

    # ---- server half

    def start(self, fed: Federation) -> State:
        return State(models=fed.initial_model()[None], assignment=[None] * len(fed.clients), memory={"phase": "first"})

    def round(self, state: State, t: int, fed: Federation) -> State:
        if t == 1:
            return self.cluster(state, fed)
        soft_until, phase = int(state.memory["soft_until"]), "frozen"  # E_c
        assignment = dict(zip(fed.clients, state.assignment, strict=True))
        if len(state.models) == 1:
            phase = "single"
        elif t <= soft_until:
            phase = "soft"
            draw = fed.rng("soft assignment")  # R(i) ~ Categorical(pi_i)
            assignment = {
                i: int(draw.choice(len(pi), p=pi)) for i, pi in zip(fed.clients, state.memory["posteriors"], strict=True)
            }
        elif t <= soft_until + self.window:
            phase = "window"
        if phase == "window":
            results = fed.call(self.select_and_train, common={"models": state.models})
            choices = {i: int(m) for i, m in results.column("choice").items()}
            chosen = {i: m for i, m in choices.items() if 0 <= m < len(state.models)}  # a hostile client may name any
            assignment |= chosen
            updates = {i: results[i]["update"] for i in chosen}
        else:
            updates = fed.call(self.train, each={i: {"model": state.models[assignment[i]]} for i in fed.clients}).column(
                "update"
            )
        models = add_by_cluster(state.models, assignment, updates)
        return State(models, [assignment[i] for i in fed.clients], {**state.memory, "phase": phase})

    def cluster(self, state: State, fed: Federation) -> State:
        """Round 1: a spherical mixture on the n full-batch updates; every model starts at theta_init."""
        theta = state.models[0]
        updates = fed.call(self.first_round_update, common={"model": theta}).column("update")
        clusters = None if self.options.clusters == "auto" else self.options.clusters
        if clusters is not None and clusters > len(updates):
            raise RunFailed(f"{len(updates)} clients answered the first round, too few for {clusters} clusters")
        stacked = np.stack(list(updates.values()))
        fit = mixture.fit(
            stacked,
            clusters=clusters,
            max_clusters=self.options.max_clusters,
            space=self.options.clustering.space,
            seed=fed.seed("mixture"),
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

    @on_client(bundle=["train"], takes={"model": MODEL}, gives={"update": MODEL})
    def train(self, me: Client, model: np.ndarray) -> Release:
        return Release(update=me.dpsgd("train", model) - model)

    @on_client(bundle=["select", "train"], takes={"models": MODELS}, gives={"choice": INDEX, "update": MODEL})
    def select_and_train(self, me: Client, models: np.ndarray) -> Release:
        """Choose by the exponential mechanism on counts of correctly classified own records, then train from there."""
        choice = me.select("select", models)
        return Release(choice=np.int64(choice), update=me.dpsgd("train", models[choice]) - models[choice])
