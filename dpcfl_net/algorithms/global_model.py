"""Global: one model for all clients, to which the server adds the mean of their DP-SGD updates (DP-FedAvg at sample level)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dpcfl_net.algorithms.asynchronous_options import asynchronous_of
from dpcfl_net.algorithms.buffered import WITHOUT_ANSWERS
from dpcfl_net.algorithms.noise_weights import WeighedByNoise
from dpcfl_net.algorithms.secure_clusters import SecureClusters, also_without_survivors
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.types import State
from dpcfl_net.federation.aggregation import ModelMeans
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.privacy.slots import Slot

WITHOUT_CLIENTS = "the mean is over the clients that answered; without any answer the model stays"


class Global(WeighedByNoise, SecureClusters):
    """DP-FedAvg at sample level: all clients train from the model, and the server adds the mean of their updates.

    Source: McMahan et al. 2017, with equal weights and the local step of Abadi et al. 2016.
    """

    name = "global"
    paper = "McMahan et al. 2017 with the local step of Abadi et al. 2016; 'Global' in Malekmohammadi et al., TMLR 2025"

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        said = WITHOUT_CLIENTS if asynchronous_of(options) is None else WITHOUT_ANSWERS
        return replace(
            super().capabilities_for(options, setting),
            summed_rounds=setting.rounds,
            without_clients=also_without_survivors(said, setting),
        )

    def start(self, fed: Federation) -> State:
        return State(models=fed.initial_model()[None], assignment=[0] * len(fed.clients))

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
