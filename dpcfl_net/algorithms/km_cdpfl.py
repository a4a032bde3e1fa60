"""KM-CDPFL: myopic clustering of every round's updates by k-means (RC-DPFL's baseline, after Werner et al. 2023)."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.base import Options, Setting
from dpcfl_net.algorithms.shared_steps import FromModel, too_many_clusters
from dpcfl_net.core.protocol import ClientEntry
from dpcfl_net.core.types import State
from dpcfl_net.federation.aggregation import mean
from dpcfl_net.federation.base import Federation
from dpcfl_net.privacy.slots import Slot


class KMCDPFL(FromModel):
    """A model theta_i for each client at the server; each moves by the mean delta of its client's k-means cluster.

    Models of clients that were always put together stay equal; those that were not never meet again.
    """

    name = "km-cdpfl"
    paper = "Malekmohammadi et al., RC-DPFL (earlier version), section 5; Werner et al. 2023"
    model_per_client = True

    class Options(Options):
        clusters: int = Field(ge=1, le=64, examples=[4], description="M, the centres of k-means")

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        return too_many_clusters(options.clusters, setting.clients)

    @property
    def published_models(self) -> int:
        return len(self.clients)

    def plan(self, client: ClientEntry) -> list[Slot]:
        return [*self.training(client, self.protocol.rounds)]

    def start(self, fed: Federation) -> State:
        models = np.repeat(fed.initial_model()[None], len(fed.clients), axis=0)
        return State(models, [None] * len(fed.clients), {"phase": "myopic"})

    def round(self, state: State, t: int, fed: Federation) -> State:
        row = {i: k for k, i in enumerate(fed.clients)}
        updates = self.train_each(fed, state.models, row)
        cluster = self.cluster(updates, fed.seed("k-means")) if updates else {}
        models = state.models.copy()
        for m in set(cluster.values()):
            members = {i: delta for i, delta in updates.items() if cluster[i] == m}
            models[[row[i] for i in members]] += mean(members)
        return State(models, [cluster.get(i, a) for i, a in zip(fed.clients, state.assignment, strict=True)], state.memory)

    def cluster(self, updates: dict[int, np.ndarray], seed: int) -> dict[int, int]:
        """k-means of the round's deltas: client -> 0..M-1 (fewer if fewer clients answered)."""
        from sklearn.cluster import KMeans

        points = np.stack([*updates.values()]).astype(np.float64)
        labels = KMeans(min(self.options.clusters, len(points)), n_init=10, random_state=seed).fit_predict(points)
        return {i: int(label) for i, label in zip(updates, labels, strict=True)}
