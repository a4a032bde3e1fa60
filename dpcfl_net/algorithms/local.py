"""Local: every client trains alone; nothing but an empty answer ever leaves it, and its steps are charged all the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dpcfl_net.algorithms.base import Algorithm, full_epochs, on_client
from dpcfl_net.core.protocol import ClientEntry
from dpcfl_net.core.types import Release, State
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.client import Client
from dpcfl_net.privacy.slots import DPSGDSlot, Slot


class Local(Algorithm):
    """E*K local epochs of DP-SGD from the common start, in rounds so that it is compared at the same points."""

    name = "local"
    paper = "'Local' in Malekmohammadi et al., TMLR 2025"
    personal = True

    def plan(self, client: ClientEntry) -> list[Slot]:
        rate, steps = full_epochs(self.protocol.local, client)
        return [DPSGDSlot("train", rate, steps)] * self.protocol.rounds

    def start(self, fed: Federation) -> State:
        nothing = np.empty((0, self.protocol.model.parameters), dtype=np.float32)
        return State(models=nothing, assignment=[None] * len(fed.clients), memory={"phase": "personal"})

    def round(self, state: State, t: int, fed: Federation) -> State:
        fed.call(self.train)
        return state

    def personal_model(self, state: Mapping[str, Any]) -> Any:
        return state.get("model")

    @on_client(bundle=["train"], takes={}, gives={})
    def train(self, me: Client) -> Release:
        me.state["model"] = me.dpsgd("train", me.state["model"] if "model" in me.state else me.initial_model())
        return Release()
