"""O-DPCFL: DPFedAvg inside the true clusters, which the operator writes into the signed job in plain sight."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpcfl_net.algorithms.shared_steps import FromModel
from dpcfl_net.core.protocol import ClientEntry
from dpcfl_net.core.types import State
from dpcfl_net.federation.aggregation import add_by_cluster
from dpcfl_net.federation.base import Federation
from dpcfl_net.privacy.slots import Slot


class Oracle(FromModel):
    """The upper bound of every clustered method: R(i) is the true cluster from round 1."""

    name = "oracle"
    paper = "O-DPCFL in Malekmohammadi et al., TMLR 2025"
    uses_oracle = True

    @property
    def published_models(self) -> int:
        return max(self.truth) + 1

    @property
    def truth(self) -> list[int]:
        """The true cluster of each client in client order."""
        truth: Any = self.protocol.oracle
        return list(truth)

    def plan(self, client: ClientEntry) -> list[Slot]:
        return [*self.training(client, self.protocol.rounds)]

    def start(self, fed: Federation) -> State:
        models = np.repeat(fed.initial_model()[None], self.published_models, axis=0)
        return State(models, [*self.truth], {"phase": "fixed"})

    def round(self, state: State, t: int, fed: Federation) -> State:
        cluster = dict(zip(fed.clients, self.truth, strict=True))
        updates = self.train_each(fed, state.models, cluster)
        return State(add_by_cluster(state.models, cluster, updates), state.assignment, state.memory)
