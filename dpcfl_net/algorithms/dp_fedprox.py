"""DP-FedProx: DP-FedAvg with FedProx (Li et al., "Federated optimization in heterogeneous networks", MLSys 2020) at clients."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.base import MODEL, RAW_UPDATE, on_client
from dpcfl_net.algorithms.one_model import OneModel, SampledOrBuffered
from dpcfl_net.core.types import Release
from dpcfl_net.federation.client import Client


class DPFedProx(OneModel):
    """DP-FedAvg with (mu / 2) ||theta - theta_server||^2 added to every client's loss.

    Source: Li et al. 2020, equation 2.
    """

    name = "dp-fedprox"
    paper = "Li et al., MLSys 2020, equation 2; 'DP-FedProx' in Yang, Hu, Kim, Li"

    class Options(SampledOrBuffered):
        mu: float = Field(default=0.1, ge=0, le=1e6, description="mu: weight of the proximal term; 0: dp-fedavg")

    @on_client(charges=["raw"], takes={"model": MODEL}, gives={"update": RAW_UPDATE})
    def train(self, me: Client, model: np.ndarray) -> Release:
        """Run local epochs of plain SGD with the proximal term, centred at the server's model.

        Args:
            me: The client's data and mechanisms.
            model: (p,) float32.
        """
        return Release(update=me.sgd("raw", model, proximal=(self.options.mu, model)) - model)
