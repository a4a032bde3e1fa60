"""Clustering methods under random rebalancing: how a client finds its cluster, and what it trains."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from dpcfl_net.federation.client import Client


class IFCA:
    """IFCA (Ghosh, Chung, Yin, Ramchandran, NeurIPS 2020): the cluster of least training loss; its model is trained."""

    stateful: ClassVar[bool] = False
    shared: ClassVar[int] = 0  # models besides the k of the clusters, which every client trains; they come first

    def assign(self, me: Client, models: np.ndarray) -> int:
        """s = argmin_j F(theta_j)."""
        return me.lowest_loss("raw", models)

    def train(self, me: Client, models: np.ndarray, label: int) -> np.ndarray:
        """The update of the cluster's model, (p,)."""
        return me.sgd("raw", models[label]) - models[label]


class FeSEM(IFCA):
    """FeSEM (Long et al., World Wide Web 2023): the cluster whose model is nearest to the client's own last model."""

    stateful = True

    def assign(self, me: Client, models: np.ndarray) -> int:
        """s = argmin_j ||theta_i - theta_j||^2; a client without a model trains one from the common start first."""
        if "model" not in me.state:
            me.state["model"] = me.sgd("raw", me.initial_model())
        return int(np.argmin([np.sum((me.state["model"] - model).astype(np.float64) ** 2) for model in models]))

    def train(self, me: Client, models: np.ndarray, label: int) -> np.ndarray:
        me.state["model"] = me.sgd("raw", models[label])
        return me.state["model"] - models[label]


class FedCAM(IFCA):
    """FedCAM (Ma, Long, Zhou, Jiang, Zhang 2023): a prediction is the global model's plus the cluster's, trained in turn."""

    shared = 1

    def assign(self, me: Client, models: np.ndarray) -> int:
        """s = argmin_j F(theta_global + theta_j), as functions."""
        return int(np.argmin(me.losses("raw", models[1:], base_model=models[0])))

    def train(self, me: Client, models: np.ndarray, label: int) -> np.ndarray:
        """Updates of the global and of the cluster's model, (2p,): one vector, clipped as one."""
        common, own = models[0], models[1 + label]
        trained = me.sgd("raw", common, base_model=own)
        return np.concatenate([trained - common, me.sgd("raw", own, base_model=trained) - own])


BASES: dict[str, type[IFCA]] = {"ifca": IFCA, "fesem": FeSEM, "fedcam": FedCAM}
