"""Local: every client trains alone and releases no tensor; its steps are charged as in other algorithms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dpcfl_net.algorithms.base import Algorithm, full_epochs, on_client
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.types import Release, State
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.federation.client import Client
from dpcfl_net.privacy.slots import DPSGDSlot, Slot

WITHOUT_CLIENTS = "a client without a task does not train in that round; other clients are not affected"

STAY = "personal models, which stay with their clients: no client sends a model or an update"


class Local(Algorithm):
    """E K local epochs of DP-SGD from the common initial model, in rounds for comparison with other algorithms.

    Source: "Local" in Malekmohammadi et al., TMLR 2025.
    """

    name = "local"
    paper = "'Local' in Malekmohammadi et al., TMLR 2025"

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        return replace(
            super().capabilities_for(options, setting), personal=True, covers=(STAY,), without_clients=WITHOUT_CLIENTS
        )

    def plan(self, client: ClientEntry) -> list[Slot]:
        return [DPSGDSlot("train", *full_epochs(self.protocol.local, client))] * client.rounds_there(1, self.protocol.rounds)

    def start(self, fed: Federation) -> State:
        nothing = np.empty((0, self.protocol.model.parameters), dtype=np.float32)
        return State(models=nothing, assignment=[None] * len(fed.clients), diagnostics={"phase": "personal"})

    def round(self, state: State, t: int, fed: Federation) -> State:
        fed.call(self.train)
        return state

    @on_client(charges=["train"], takes={}, gives={})
    def train(self, me: Client) -> Release:
        """Run one round of DP-SGD on the personal model.

        Args:
            me: The client's data, mechanisms and state.
        """
        me.state["model"] = me.dpsgd("train", me.state["model"] if "model" in me.state else me.initial_model())
        return Release()
