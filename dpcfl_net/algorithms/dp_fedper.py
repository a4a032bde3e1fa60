"""DP-FedPer: FedPer (Arivazhagan et al., "Federated learning with personalization layers", 2019) with DP-FedAvg's round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpcfl_net.algorithms.base import MODEL, on_client
from dpcfl_net.algorithms.client_level import OneModel
from dpcfl_net.core.types import Release, TensorSpec
from dpcfl_net.federation.client import Client

BODY = TensorSpec("f4", ("body",))


class DPFedPer(OneModel):
    """The body is shared and averaged; each client keeps the last layer, its head, which never leaves it.

    A head is trained in earlier rounds, if the client was drawn then: only Poisson sampling hides whether it was.
    """

    name = "dp-fedper"
    paper = "Arivazhagan et al. 2019, Algorithm 2; 'DP-FedPer' in Yang, Hu, Kim, Li"
    personal = True
    stateful = True

    @property
    def update_size(self) -> int:
        head = sum(math.prod(shape) for _, shape in self.protocol.model.layout[-2:])  # weight and bias of the last layer
        return self.protocol.model.parameters - head

    @property
    def dims(self) -> dict[str, int | tuple[int, int]]:
        return {**super().dims, "body": self.update_size}

    def personal_model(self, state: Mapping[str, Any]) -> Any:
        return state.get("model")

    @on_client(bundle=["raw"], takes={"model": MODEL}, gives={"update": BODY})
    def train(self, me: Client, model: np.ndarray) -> Release:
        """The server's body under the own head (the first time, the server's head), trained together; the body's change."""
        body = self.update_size
        start = model.copy()
        if "model" in me.state:
            start[body:] = me.state["model"][body:]
        me.state["model"] = me.sgd("raw", start)
        return Release(update=(me.state["model"] - start)[:body])
