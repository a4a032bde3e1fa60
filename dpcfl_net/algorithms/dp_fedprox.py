"""DP-FedProx: DP-FedAvg with FedProx (Li et al., "Federated optimization in heterogeneous networks", MLSys 2020) at clients."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.one_model import OneModel, SampledOrBuffered
from dpcfl_net.federation.client import Client


class DPFedProx(OneModel):
    """DP-FedAvg with (mu / 2) ||theta - theta_server||^2 added to every client's loss.

    Source: Li et al. 2020, equation 2.
    """

    name = "dp-fedprox"
    paper = "Li et al., MLSys 2020, equation 2; 'DP-FedProx' in Yang, Hu, Kim, Li"

    class Options(SampledOrBuffered):
        mu: float = Field(default=0.1, ge=0, le=1e6, description="mu: weight of the proximal term; 0: dp-fedavg")

    def update(self, me: Client, slot: str, model: np.ndarray) -> np.ndarray:
        """Run local epochs of plain SGD with the proximal term, centred at the server's model; see `OneModel.update`."""
        return me.sgd(slot, model, proximal=(self.options.mu, model)) - model
