"""KM-CDPFL: myopic clustering of every round's updates by k-means (a baseline of RC-DPFL; Werner et al. 2023)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.base import Options
from dpcfl_net.algorithms.shared_steps import FromModel, too_many_clusters
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.types import State
from dpcfl_net.federation.aggregation import mean
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.privacy.slots import Slot

WITHOUT_CLIENTS = "k-means clusters the updates of the clients that answered; the models of the others stay"


class KMCDPFL(FromModel):
    """A model theta_i for each client at the server, which adds the mean update of the client's k-means cluster.

    Models of clients that always shared a cluster stay equal; models that once differ never become equal again.

    Source: Malekmohammadi et al., RC-DPFL (earlier version), section 5.
    """

    name = "km-cdpfl"
    paper = "Malekmohammadi et al., RC-DPFL (earlier version), section 5; Werner et al. 2023"

    class Options(Options):
        clusters: int = Field(ge=1, le=64, examples=[4], description="M: number of clusters")

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        return replace(
            super().capabilities_for(options, setting), model_per_client=True, published_models=setting.clients,
            without_clients=WITHOUT_CLIENTS,
        )  # fmt: skip

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        return too_many_clusters(options.clusters, setting.clients)

    def plan(self, client: ClientEntry) -> list[Slot]:
        return [*self.training(client, client.rounds_there(1, self.protocol.rounds))]

    def start(self, fed: Federation) -> State:
        models = np.repeat(fed.initial_model()[None], len(fed.clients), axis=0)
        return State(models, [None] * len(fed.clients))

    def round(self, state: State, t: int, fed: Federation) -> State:
        updates = self.train_each(fed, state.models, [*fed.clients])  # row i is client i's
        cluster = self.cluster(updates, fed.seed("k-means")) if updates else {}
        models = state.models.copy()
        for m in set(cluster.values()):
            members = {i: update for i, update in updates.items() if cluster[i] == m}
            models[[*members]] += mean(members)
        assignment = [cluster.get(i, m) for i, m in enumerate(state.assignment)]
        return State(models, assignment, diagnostics={"phase": "myopic"})

    def cluster(self, updates: dict[int, np.ndarray], seed: int) -> dict[int, int]:
        """Cluster the updates of a round by k-means.

        Args:
            updates: Client to its (p,) float32 update.
            seed: Seed of k-means.

        Returns:
            Client to its cluster, 0 to M - 1; fewer clusters if fewer clients answered.
        """
        from sklearn.cluster import KMeans

        points = np.stack([*updates.values()]).astype(np.float64)
        labels = KMeans(min(self.options.clusters, len(points)), n_init=10, random_state=seed).fit_predict(points)
        return {i: int(label) for i, label in zip(updates, labels, strict=True)}
