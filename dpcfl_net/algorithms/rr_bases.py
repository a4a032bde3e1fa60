"""Base methods of RR-Cluster: how a client chooses its cluster and which models it trains."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from dpcfl_net.federation.client import Client


class IFCA:
    """IFCA: a client chooses the cluster of least training loss and trains its model.

    Args:
        slot: Slot of the release that pays for what is computed.

    Attributes:
        stateful: True if clients keep a state between rounds.
        shared: Number of models that every client trains; they come before the k models of the clusters.

    Source: Ghosh, Chung, Yin, Ramchandran, NeurIPS 2020.
    """

    stateful: ClassVar[bool] = False
    shared: ClassVar[int] = 0

    def __init__(self, slot: str = "raw") -> None:
        self.slot = slot

    def assign(self, me: Client, models: np.ndarray) -> int:
        """Choose the cluster of the lowest score, s = argmin_j F(theta_j).

        Args:
            me: The client's data, mechanisms and state.
            models: (shared + k, p) float32.

        Returns:
            The cluster, 0 to k - 1.
        """
        return int(np.argmin(self.scores(me, models)))

    def scores(self, me: Client, models: np.ndarray) -> np.ndarray:
        """Score the model of every cluster, the chosen one lowest: F(theta_j).

        Args:
            me: The client's data, mechanisms and state.
            models: (shared + k, p) float32.

        Returns:
            Scores, (k,) float64; here mean losses.
        """
        return me.losses(self.slot, models)

    def train(self, me: Client, models: np.ndarray, label: int) -> np.ndarray:
        """Train the models of a cluster.

        Args:
            me: The client's data, mechanisms and state.
            models: (shared + k, p) float32.
            label: The cluster.

        Returns:
            The update, ((shared + 1) * p,) float32.
        """
        return me.sgd(self.slot, models[label]) - models[label]


class FeSEM(IFCA):
    """FeSEM: a client chooses the cluster whose model is nearest to its own last model.

    Source: Long et al., World Wide Web 2023.
    """

    stateful = True

    def scores(self, me: Client, models: np.ndarray) -> np.ndarray:
        """Compute ||theta_i - theta_j||^2; a client without a model first trains one from the initial parameters."""
        if "model" not in me.state:
            me.state["model"] = me.sgd(self.slot, me.initial_model())
        return me.distances(self.slot, me.state["model"], models)

    def train(self, me: Client, models: np.ndarray, label: int) -> np.ndarray:
        me.state["model"] = me.sgd(self.slot, models[label])
        return me.state["model"] - models[label]


class FedCAM(IFCA):
    """FedCAM: outputs of the global model and of the cluster's model are added; the two are trained one after the other.

    Source: Ma, Long, Zhou, Jiang, Zhang 2023.
    """

    shared = 1

    def scores(self, me: Client, models: np.ndarray) -> np.ndarray:
        """Compute F(theta_global + theta_j), where + adds the outputs."""
        return me.losses(self.slot, models[1:], base_model=models[0])

    def train(self, me: Client, models: np.ndarray, label: int) -> np.ndarray:
        """Train the global model and the cluster's model; the updates form one vector, (2p,), which is clipped as one."""
        common, own = models[0], models[1 + label]
        trained = me.sgd(self.slot, common, base_model=own)
        return np.concatenate([trained - common, me.sgd(self.slot, own, base_model=trained) - own])


BASES: dict[str, type[IFCA]] = {"ifca": IFCA, "fesem": FeSEM, "fedcam": FedCAM, "oracle": IFCA}
