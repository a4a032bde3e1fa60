"""Algorithms whose clients train in steps that are not of the package."""

from __future__ import annotations

import numpy as np

from dpcfl_net.algorithms.base import MODEL, UPDATE, Algorithm, full_epochs, on_client
from dpcfl_net.algorithms.global_model import Global
from dpcfl_net.core.types import Release, State
from dpcfl_net.privacy.slots import DPSGDSlot


class Plain(Algorithm):
    """FedAvg."""

    def plan(self, client):
        return [DPSGDSlot("train", *full_epochs(self.protocol.local, client))] * self.protocol.rounds

    def start(self, fed):
        return State(fed.initial_model()[None], [0] * len(fed.clients))

    def round(self, state, t, fed):
        updates = fed.call(self.train, common={"model": state.models[0]}).column("update")
        return State(state.models + np.mean(list(updates.values()), axis=0), state.assignment)

    @on_client(charges=["train"], takes={"model": MODEL}, gives={"update": UPDATE})
    def train(self, me, model):
        return Release(update=me.dpsgd("train", model) - model)


class Pulled(Global):
    """FedProx."""

    @on_client(charges=["train"], takes={"model": MODEL}, gives={"update": UPDATE})
    def train(self, me, model):
        return Release(update=me.dpsgd("train", model, proximal=(0.5, model)) - model)
