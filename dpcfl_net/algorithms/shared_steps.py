"""What several algorithms share: training from a model that the server sends, and choosing one of M models first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.base import INDEX, MODEL, MODELS, Algorithm, Options, full_epochs, on_client
from dpcfl_net.core.protocol import ClientEntry
from dpcfl_net.core.types import Release
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.client import Client
from dpcfl_net.privacy.slots import DPSGDSlot, SelectionSlot, UnprotectedSlot

RAW_INDEX = "cluster index unprotected: the argmin of the training loss is sent as it is, and one record can flip it"


class Selection(Options):
    """The window of rounds in which clients choose their cluster, and what a choice may cost."""

    rounds_fraction: float = Field(default=0.1, gt=0, le=0.5, description="window: max(1, floor(this * rounds)) rounds")
    budget_fraction: float = Field(default=0.03, gt=0, lt=1, description="epsilon of one selection, as a fraction of the total")


class FromModel(Algorithm):
    """Clients train from a model that the server sends and upload the difference."""

    def training(self, client: ClientEntry, rounds: int) -> list[DPSGDSlot]:
        """`rounds` rounds of K ceil(N/b) steps at rate b/N."""
        return [DPSGDSlot("train", *full_epochs(self.protocol.local, client))] * rounds

    def train_each(self, fed: Federation, models: np.ndarray, row: Mapping[int, int]) -> dict[int, np.ndarray]:
        """Every client trains from its row of (M, p) models; the (p,) updates of those that answered."""
        tasks = {client: {"model": models[row[client]]} for client in fed.clients}
        return fed.call(self.train, each=tasks).column("update")

    @on_client(bundle=["train"], takes={"model": MODEL}, gives={"update": MODEL})
    def train(self, me: Client, model: np.ndarray) -> Release:
        """One round of DP-SGD from `model`."""
        return Release(update=me.dpsgd("train", model) - model)


class Choosing(FromModel):
    """Clients get all M models, choose one and train from there: privately, or with the raw argmin of their loss."""

    @property
    def max_models(self) -> int:
        clusters: int = self.options.clusters
        return clusters

    def selections(self, count: int, budget_fraction: float) -> list[SelectionSlot]:
        """`count` choices by the exponential mechanism of budget_fraction * epsilon each."""
        privacy = self.protocol.privacy
        per_selection = budget_fraction * privacy.epsilon
        eta = per_selection if privacy.adjacency == "zero-out" else per_selection / 2
        return [SelectionSlot("select", eta)] * count

    def argmins(self, count: int) -> list[UnprotectedSlot]:
        """`count` choices without any protection."""
        return [UnprotectedSlot("argmin", RAW_INDEX)] * count

    def choose(
        self, fed: Federation, models: np.ndarray, assignment: dict[int, Any], *, raw: bool = False
    ) -> tuple[dict[int, Any], dict[int, np.ndarray]]:
        """All M models to everybody: the assignment with the new choices, and the updates of those that chose.

        A hostile client may name any index: one without a model leaves it where it was, and out of this round.
        """
        results = fed.call(self.argmin_and_train if raw else self.select_and_train, common={"models": models})
        chosen = {i: int(m) for i, m in results.column("choice").items() if 0 <= int(m) < len(models)}
        return {**assignment, **chosen}, {i: results[i]["update"] for i in chosen}

    @on_client(bundle=["select", "train"], takes={"models": MODELS}, gives={"choice": INDEX, "update": MODEL})
    def select_and_train(self, me: Client, models: np.ndarray) -> Release:
        """Choose by the exponential mechanism on counts of correctly classified own records, then train from there."""
        choice = me.select("select", models)
        return Release(choice=np.int64(choice), update=me.dpsgd("train", models[choice]) - models[choice])

    @on_client(bundle=["argmin", "train"], takes={"models": MODELS}, gives={"choice": INDEX, "update": MODEL})
    def argmin_and_train(self, me: Client, models: np.ndarray) -> Release:
        """Choose the model of least training loss, as the papers print it, then train from there."""
        choice = me.lowest_loss("argmin", models)
        return Release(choice=np.int64(choice), update=me.dpsgd("train", models[choice]) - models[choice])


def too_many_clusters(clusters: int, clients: int) -> list[str]:
    """Why M clusters cannot work with so many clients, if they cannot."""
    return (
        [] if clusters <= clients else [f"algorithm.clusters is {clusters}: must be at most the number of clients, {clients}"]
    )
