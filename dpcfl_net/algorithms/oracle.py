"""O-DPCFL: DP-FedAvg within the true clusters, which the operator writes into the signed job, where the server reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dpcfl_net.algorithms.noise_weights import WeighedByNoise
from dpcfl_net.algorithms.secure_clusters import SecureClusters
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.types import State
from dpcfl_net.federation.aggregation import ModelMeans
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.privacy.slots import Slot

WITHOUT_CLIENTS = "the mean of a cluster is over its clients that answered; a cluster without an answer keeps its model"


class Oracle(WeighedByNoise, SecureClusters):
    """Upper bound of clustered methods: R(i) is the true cluster from round 1.

    Source: O-DPCFL in Malekmohammadi et al., TMLR 2025.
    """

    name = "oracle"
    paper = "O-DPCFL in Malekmohammadi et al., TMLR 2025"

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        return replace(
            super().capabilities_for(options, setting), uses_oracle=True, published_models=setting.true_clusters,
            summed_rounds=setting.rounds, without_clients=WITHOUT_CLIENTS,
        )  # fmt: skip

    def start(self, fed: Federation) -> State:
        assert self.protocol.oracle is not None
        models = np.repeat(fed.initial_model()[None], self.setting.true_clusters, axis=0)
        return State(models, [*self.protocol.oracle], diagnostics={"phase": "fixed"})

    def plan(self, client: ClientEntry) -> list[Slot]:
        count = self.participations_from(client, 1)
        return self.secure_slots(client, count) if self.secure else [*self.training(client, count)]

    def round(self, state: State, t: int, fed: Federation) -> State:
        if self.asynchronous is not None:
            return self.buffered_round(state, t, fed)
        if self.secure:
            return self.secure_step(state, state.assignment, fed)
        means = ModelMeans(state.models, self.weights)
        self.stream_each(fed, means, state.assignment)
        return replace(state, models=means.moved())
