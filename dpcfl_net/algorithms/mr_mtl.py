"""MR-MTL (Liu, Hu, Wu, Smith, "On privacy and personalization in cross-silo federated learning", 2022, Algorithm A1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.base import MODEL, Algorithm, Options, Setting, full_epochs, on_client
from dpcfl_net.core.protocol import ClientEntry
from dpcfl_net.core.types import Release, State
from dpcfl_net.federation.aggregation import add_mean
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.client import Client
from dpcfl_net.privacy.slots import DPSGDSlot, Slot


class MRMTL(Algorithm):
    """Every client keeps a model of its own, pulled towards the mean of all by lambda (theta_i - mean).

    The pull is added after clipping and noise: it does not look at data, so it is free, and clipping cannot eat it.
    (Written as a term of the loss it has no effect under Opacus, whose optimiser overwrites the gradient with the sum of
    the clipped per-record gradients, in which the term is not.)
    """

    name = "mr-mtl"
    paper = "Liu, Hu, Wu, Smith 2022, Algorithm A1"
    personal = True

    class Options(Options):
        lam: float = Field(default=0.1, ge=0, le=1e6, description="lambda of the pull to the mean; 0 is Local")

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        if options.lam * setting.local.lr < 2:
            return []
        return [f"algorithm.lam is {options.lam}: times local.lr it must be below 2, or the pull overshoots without end"]

    def plan(self, client: ClientEntry) -> list[Slot]:
        return [DPSGDSlot("train", *full_epochs(self.protocol.local, client))] * self.protocol.rounds

    def start(self, fed: Federation) -> State:
        return State(fed.initial_model()[None], [None] * len(fed.clients), {"phase": "personal"})

    def round(self, state: State, t: int, fed: Federation) -> State:
        updates = fed.call(self.train, common={"mean": state.models[0]}).column("update")
        records = {entry.id: float(entry.records) for entry in self.protocol.roster}
        return State(add_mean(state.models, updates, records), state.assignment, state.memory)

    def personal_model(self, state: Mapping[str, Any]) -> Any:
        return state.get("model")

    def max_update_norm(self, client: ClientEntry) -> float:
        """Longer than by noise and clipped sums alone: the pull, too, moves theta_i, by what it is away from the mean.

        With r = (1 - lr lambda)^S left of its distance D from the mean after S steps, whose noise and sums alone are at most
        B long, a round moves theta_i by at most B + (1 - r) D, and D grows by at most 2 B a round.
        """
        _, steps = full_epochs(self.protocol.local, client)
        left = (1 - self.protocol.local.lr * self.options.lam) ** steps
        return super().max_update_norm(client) * (1 + 2 * self.protocol.rounds * (1 - left))

    @on_client(bundle=["train"], takes={"mean": MODEL}, gives={"update": MODEL})
    def train(self, me: Client, mean: np.ndarray) -> Release:
        """A round from the own model, which is never reset to the mean."""
        theta = me.state["model"] if "model" in me.state else me.initial_model()
        me.state["model"] = me.dpsgd("train", theta, proximal=(self.options.lam, mean))
        return Release(update=me.state["model"] - theta)
