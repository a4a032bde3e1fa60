"""Client steps that several algorithms share: train from the server's model, or choose one of M models first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.base import INDEX, MODEL, MODELS, UPDATE, Algorithm, Options, full_epochs, on_client
from dpcfl_net.core.protocol import ClientEntry
from dpcfl_net.core.types import Assignment, Release
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.federation.client import Client
from dpcfl_net.privacy.slots import DPSGDSlot, SelectionSlot, UnprotectedSlot

RAW_INDEX = "cluster index unprotected: the argmin of the training loss is sent as it is, and one record can flip it"


class Selection(Options):
    """The window of rounds in which clients choose their cluster, and what a choice may cost."""

    rounds_fraction: float = Field(default=0.1, gt=0, le=0.5, description="window: max(1, floor(this * rounds)) rounds")
    budget_fraction: float = Field(default=0.03, gt=0, lt=1, description="epsilon of one selection, as a fraction of the total")


class FromModel(Algorithm):
    """Clients train from the server's model and release the difference."""

    def training(self, client: ClientEntry, rounds: int) -> list[DPSGDSlot]:
        """Slots of `rounds` rounds of K ceil(N/b) steps at sampling rate b/N."""
        return [DPSGDSlot("train", *full_epochs(self.protocol.local, client))] * rounds

    def train_each(self, fed: Federation, models: np.ndarray, rows: Assignment) -> dict[int, np.ndarray]:
        """Let every client train from its row of the (M, p) models; every client needs one.

        Returns:
            The (p,) update of each client that answered.
        """
        assert None not in rows
        tasks = {client: {"model": models[rows[client]]} for client in fed.clients}
        return fed.call(self.train, each=tasks).column("update")

    @on_client(charges=["train"], takes={"model": MODEL}, gives={"update": UPDATE})
    def train(self, me: Client, model: np.ndarray) -> Release:
        """Run one round of DP-SGD from `model`."""
        return Release(update=me.dpsgd("train", model) - model)


class Choosing(FromModel):
    """Clients receive all M models, choose one (privately, or by the raw argmin of their loss) and train from it."""

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        most = cls.most_clusters(options)
        return replace(super().capabilities_for(options, setting), max_models=most, published_models=most)

    @staticmethod
    def most_clusters(options: Any) -> int:
        """Largest M that the options allow."""
        clusters: int = options.clusters
        return clusters

    def selections(self, count: int, budget_fraction: float) -> list[SelectionSlot]:
        """Slots of `count` choices by the exponential mechanism, of budget_fraction * epsilon each."""
        privacy = self.protocol.privacy
        per_selection = budget_fraction * privacy.epsilon
        eta = per_selection if privacy.adjacency == "zero-out" else per_selection / 2
        return [SelectionSlot("select", eta)] * count

    def argmins(self, count: int) -> list[UnprotectedSlot]:
        """Slots of `count` choices without protection."""
        return [UnprotectedSlot("argmin", RAW_INDEX)] * count

    def choose(
        self, fed: Federation, models: np.ndarray, assignment: Assignment, *, raw: bool = False
    ) -> tuple[Assignment, dict[int, np.ndarray]]:
        """Send all M models to all clients.

        A hostile client may name any index: an index without a model is ignored, and so is that client's update.

        Returns:
            The assignment with the new choices, and the updates of the clients that chose.
        """
        results = fed.call(self.argmin_and_train if raw else self.select_and_train, common={"models": models})
        chosen = {i: int(m) for i, m in results.column("choice").items() if 0 <= int(m) < len(models)}
        return [chosen.get(i, m) for i, m in enumerate(assignment)], {i: results[i]["update"] for i in chosen}

    @on_client(charges=["select", "train"], takes={"models": MODELS}, gives={"choice": INDEX, "update": UPDATE})
    def select_and_train(self, me: Client, models: np.ndarray) -> Release:
        """Choose by the exponential mechanism on counts of correctly classified records, then train from that model."""
        choice = me.select("select", models)
        return Release(choice=np.int64(choice), update=me.dpsgd("train", models[choice]) - models[choice])

    @on_client(charges=["argmin", "train"], takes={"models": MODELS}, gives={"choice": INDEX, "update": UPDATE})
    def argmin_and_train(self, me: Client, models: np.ndarray) -> Release:
        """Choose the model of least training loss, as the papers print it, then train from that model."""
        choice = me.lowest_loss("argmin", models)
        return Release(choice=np.int64(choice), update=me.dpsgd("train", models[choice]) - models[choice])


def too_many_clusters(clusters: int, clients: int) -> list[str]:
    """List the problem with M clusters if there are fewer clients."""
    return (
        [] if clusters <= clients else [f"algorithm.clusters is {clusters}: must be at most the number of clients, {clients}"]
    )
