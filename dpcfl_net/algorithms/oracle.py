"""O-DPCFL: DPFedAvg inside the true clusters, which the operator writes into the signed job in plain sight."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpcfl_net.algorithms.base import MODEL, Algorithm, full_epochs, on_client
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.client import Client
from dpcfl_net.federation.combine import add_by_cluster
from dpcfl_net.job import ClientEntry
from dpcfl_net.types import DPSGDSlot, Release, Slot, State


class Oracle(Algorithm):
    """The upper bound of every clustered method: R(i) is the true cluster from round 1."""

    name = "oracle"
    paper = "O-DPCFL in Malekmohammadi et al., TMLR 2025"
    uses_oracle = True

    def plan(self, client: ClientEntry) -> list[Slot]:
        rate, steps = full_epochs(self.protocol.local, client)
        return [DPSGDSlot("train", rate, steps)] * self.protocol.rounds

    def start(self, fed: Federation) -> State:
        truth: Any = self.protocol.oracle
        return State(np.repeat(fed.initial_model()[None], max(truth) + 1, axis=0), list(truth), {"phase": "fixed"})

    def round(self, state: State, t: int, fed: Federation) -> State:
        cluster = dict(zip(fed.clients, [c or 0 for c in state.assignment], strict=True))
        updates = fed.call(self.train, each={i: {"model": state.models[cluster[i]]} for i in fed.clients}).column("update")
        return State(add_by_cluster(state.models, cluster, updates), state.assignment, state.memory)

    @on_client(bundle=["train"], takes={"model": MODEL}, gives={"update": MODEL})
    def train(self, me: Client, model: np.ndarray) -> Release:
        return Release(update=me.dpsgd("train", model) - model)
