"""Robust-HDP: one model; the server estimates the noise of each update, and weighs clients by its inverse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms import base
from dpcfl_net.algorithms.shared_steps import FromModel
from dpcfl_net.clustering.robust_pca import robust_pca
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.types import State
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.privacy.slots import Slot

WITHOUT_CLIENTS = "noise is estimated and the mean is taken over the clients that answered; without any answer the model stays"


class RobustHDP(FromModel):
    """Weigh each update by the inverse of its noise, which robust PCA of all updates estimates.

    The server does not use the clients' stated epsilon or noise multiplier. So one client that sends an update with less noise than
    the others' gets almost all the weight: the method is robust against wrong statements, not against poison. For weights by
    the noise that the signed job states, see the option `weights: noise` of other algorithms.

    An estimated noise of exactly zero, as of an update of zeros, has no inverse: all updates of that round get equal weights. The diagnostic
    `updates without noise` counts such updates.

    Source: Malekmohammadi, Yu, Cao, "Noise-Aware Algorithm for Heterogeneous Differentially Private Federated Learning", ICML 2024,
    Algorithm 1.
    """

    name = "robust-hdp"
    paper = "Malekmohammadi, Yu, Cao, ICML 2024, Algorithm 1"

    class Options(base.Options):
        piece: int = Field(
            default=200_000, ge=1_000, description="most parameters in one robust PCA; the estimates of the pieces are averaged"
        )

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        return replace(super().capabilities_for(options, setting), without_clients=WITHOUT_CLIENTS)

    def start(self, fed: Federation) -> State:
        return State(models=fed.initial_model()[None], assignment=[0] * len(fed.clients))

    def plan(self, client: ClientEntry) -> list[Slot]:
        return [*self.training(client, client.rounds_there(1, self.protocol.rounds))]

    def round(self, state: State, t: int, fed: Federation) -> State:
        updates = self.train_each(fed, state.models, state.assignment)
        if not updates:
            return state
        columns = np.stack([*updates.values()], axis=1)
        noise = self.noise(columns)
        weights = self.weights(noise)
        shown = {"largest weight": float(weights.max() * len(weights)), "updates without noise": int((noise == 0).sum())}
        model = state.models + (columns @ weights.astype(np.float32))[None]
        return replace(state, models=model, diagnostics=shown)

    def noise(self, updates: np.ndarray) -> np.ndarray:
        """Estimate the noise s_i^2 of each update by robust PCA.

        Args:
            updates: (p, n) float32, a column for each client.

        Returns:
            Estimates, (n,) float64.
        """
        pieces = np.array_split(updates, -(-len(updates) // self.options.piece))
        found: np.ndarray = np.mean([np.square(robust_pca(piece)[1]).sum(axis=0) for piece in pieces], axis=0)
        return found

    @staticmethod
    def weights(noise: np.ndarray) -> np.ndarray:
        """Compute w_i = (1 / s_i^2) / sum_j (1 / s_j^2); equal weights if an s_i^2 is zero.

        Args:
            noise: s_i^2, the estimated noise of each update, (n,) float64.

        Returns:
            Weights, (n,) float64, with sum 1.
        """
        if not noise.all():
            return np.full(len(noise), 1 / len(noise))
        found: np.ndarray = (1 / noise) / (1 / noise).sum()
        return found
