"""DP-FedPer: FedPer (Arivazhagan et al., "Federated learning with personalization layers", 2019) with the round of DP-FedAvg."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np

from dpcfl_net.algorithms.base import MODEL, any_norm, on_client
from dpcfl_net.algorithms.client_level import Sampled
from dpcfl_net.algorithms.one_model import OneModel
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.signed_settings import ModelTemplate
from dpcfl_net.core.types import Release, TensorSpec
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.federation.client import Client

BODY = TensorSpec("f4", ("body",), max_norm=any_norm)


def head(model: ModelTemplate) -> list[tuple[str, list[int]]]:
    """Return name and shape of each parameter of the last layer, the last ones of the layout."""
    layer = model.layout[-1][0].rpartition(".")[0]
    return [*takewhile(lambda one: one[0].rpartition(".")[0] == layer, reversed(model.layout))]


class DPFedPer(OneModel):
    """Shared body, and a personal head: the layer that the model defines last, which stays with each client.

    The head depends on the earlier rounds in which the client was sampled, and only Poisson sampling hides these. A client's figures
    are those of its model after its own epochs in the latest of these rounds: body and head as it trained them, without noise.

    Source: Arivazhagan et al. 2019, Algorithms 1 (client) and 2 (server).
    """

    name = "dp-fedper"
    paper = "Arivazhagan et al. 2019, Algorithms 1 and 2; 'DP-FedPer' in Yang, Hu, Kim, Li"

    class Options(Sampled):
        why_synchronous = "clients report the accuracy of their personal models by round, and a participation is no round"

    def __init__(self, protocol: Protocol) -> None:
        model = protocol.model
        if not self.update_size(model):
            why = "needs a model with two layers or more, since one is never shared"
            raise ConfigError(f"model.name is {model.name!r}: {self.name} {why}")
        if not any(len(shape) > 1 and shape[0] == model.classes for _, shape in head(model)):
            why = (
                f"keeps the layer that the model defines last at each client, and {model.layout[-1][0].rpartition('.')[0]!r} has no weight "
                f"with a row for each of the {model.classes} outputs: define the output layer last"
            )
            raise ConfigError(f"model.name is {model.name!r}: {self.name} {why}")
        super().__init__(protocol)

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        able = super().capabilities_for(options, setting)
        return replace(able, personal=True, holds_state=True, sides={**able.sides, "body": cls.update_size})

    @staticmethod
    def update_size(model: ModelTemplate) -> int:
        """Count the parameters of the body: all except those of the last layer.

        Args:
            model: The job's model.
        """
        return model.parameters - sum(math.prod(shape) for _, shape in head(model))

    @on_client(charges=["raw"], takes={"model": MODEL}, gives={"update": BODY})
    def train(self, me: Client, model: np.ndarray) -> Release:
        """Train from the model and release the raw update of the body; see `OneModel.train`."""
        return Release(update=self.update(me, "raw", model))

    def update(self, me: Client, slot: str, model: np.ndarray) -> np.ndarray:
        """Train the server's body with the client's head (at first the server's head); return the body's update, (body,)."""
        body = self.update_size(self.protocol.model)
        start = model.copy()
        if "model" in me.state:
            start[body:] = me.state["model"][body:]
        me.state["model"] = me.sgd(slot, start)
        updated: np.ndarray = (me.state["model"] - start)[:body]
        return updated
