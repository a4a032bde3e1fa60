"""DP-FedPer: FedPer (Arivazhagan et al., "Federated learning with personalization layers", 2019) with DP-FedAvg's round."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from dpcfl_net.algorithms.base import MODEL, any_norm, on_client
from dpcfl_net.algorithms.client_level import OneModel
from dpcfl_net.core.protocol import ModelTemplate
from dpcfl_net.core.types import Release, TensorSpec
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.federation.client import Client

BODY = TensorSpec("f4", ("body",), max_norm=any_norm)


class DPFedPer(OneModel):
    """The body is shared and averaged; each client keeps the last layer, its head, which never leaves it.

    A head is trained in earlier rounds, if the client was drawn then: only Poisson sampling hides whether it was.
    """

    name = "dp-fedper"
    paper = "Arivazhagan et al. 2019, Algorithm 2; 'DP-FedPer' in Yang, Hu, Kim, Li"

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        return replace(
            super().capabilities_for(options, setting), personal=True, holds_state=True, sides={"body": cls.update_size}
        )

    @staticmethod
    def update_size(model: ModelTemplate) -> int:
        """Number of parameters of the body: all but weight and bias of the last layer."""
        return model.parameters - sum(math.prod(shape) for _, shape in model.layout[-2:])

    @on_client(charges=["raw"], takes={"model": MODEL}, gives={"update": BODY})
    def train(self, me: Client, model: np.ndarray) -> Release:
        """Train the server's body under the client's head (at first the server's head); release the body's change."""
        body = self.update_size(self.protocol.model)
        start = model.copy()
        if "model" in me.state:
            start[body:] = me.state["model"][body:]
        me.state["model"] = me.sgd("raw", start)
        return Release(update=(me.state["model"] - start)[:body])
