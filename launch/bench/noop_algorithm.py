"""An algorithm whose clients return the model that they get: a round is messages, debits and aggregation only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dpcfl_net.algorithms.base import MODEL, RAW_UPDATE, Algorithm, on_client
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.types import Release, State
from dpcfl_net.federation.aggregation import ModelMeans
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.federation.client import Client
from dpcfl_net.privacy.slots import Slot, UnprotectedSlot

NAME = "dpcfl_net.launch.bench.noop_algorithm:NoOp"
REASON = "a benchmark: clients return the model that they get, and read no record"


class NoOp(Algorithm):
    """FedAvg without training: the server adds the answers as they come, as `dp-fedavg` does."""

    name = "no-op"
    paper = "a benchmark, not an algorithm"

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        return replace(super().capabilities_for(options, setting), summed_rounds=setting.rounds)

    def plan(self, client: ClientEntry) -> list[Slot]:
        return [UnprotectedSlot("return", REASON)] * self.protocol.rounds

    def start(self, fed: Federation) -> State:
        return State(models=fed.initial_model()[None], assignment=[0] * len(fed.clients))

    def round(self, state: State, t: int, fed: Federation) -> State:
        means = ModelMeans(np.zeros_like(state.models))  # their mean is the new model
        fed.add_up(self.give_back, means, dict.fromkeys(fed.clients, 0), common={"model": state.models[0]})
        return State(means.moved(), state.assignment)

    @on_client(charges=["return"], takes={"model": MODEL}, gives={"update": RAW_UPDATE})
    def give_back(self, me: Client, model: np.ndarray) -> Release:
        """Return the model; the mechanism without a guarantee is declared, as the gate demands."""
        me._without_guarantee("return")
        return Release(update=model)
