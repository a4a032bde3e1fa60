"""Client steps that several algorithms share: train from the server's model, or first choose one of M models."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.base import INDEX, MODEL, MODELS, UPDATE, Algorithm, Options, full_epochs, on_client
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.types import Assignment, Release
from dpcfl_net.federation.aggregation import ModelMeans, chosen_row
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.federation.client import Client
from dpcfl_net.privacy.slots import DPSGDSlot, SelectionSlot, UnprotectedSlot

RAW_INDEX = "cluster index unprotected: the argmin of the training loss is sent as it is, and one record can flip it"


class Selection(Options):
    """Options of private choices: number of rounds, and epsilon of a choice."""

    rounds_fraction: float = Field(
        default=0.1, gt=0, le=0.5, description="fraction of the rounds with choices; at least one round"
    )
    budget_fraction: float = Field(default=0.03, gt=0, lt=1, description="epsilon of one choice, as a fraction of the total")

    def window(self, rounds: int) -> int:
        """Return the number of rounds with choices.

        Args:
            rounds: Rounds of the run.
        """
        return max(1, int(Fraction(str(self.rounds_fraction)) * rounds))  # in binary, 0.29 * 100 is slightly below 29


class FromModel(Algorithm):
    """Clients train from the server's model and release the update."""

    def training(self, client: ClientEntry, rounds: int) -> list[DPSGDSlot]:
        """List the slots of training: K ceil(N/b) steps at sampling rate b/N in each round.

        Args:
            client: The client's roster entry.
            rounds: Number of rounds.
        """
        return [DPSGDSlot("train", *full_epochs(self.protocol.local, client))] * rounds

    def train_each(
        self, fed: Federation, models: np.ndarray, rows: Assignment, clients: Iterable[int] | None = None
    ) -> dict[int, np.ndarray]:
        """Let every client train from its row of the models.

        Args:
            fed: Federation of the clients.
            models: (M, p) float32.
            rows: Row of each client; none is None.
            clients: Clients that train; None: all.

        Returns:
            The (p,) update of each client that answered.
        """
        assert None not in rows
        tasks = {client: {"model": models[rows[client]]} for client in (fed.clients if clients is None else clients)}
        return fed.call(self.train, each=tasks).column("update")

    def stream_each(self, fed: Federation, means: ModelMeans, rows: Assignment) -> None:
        """Let every client train from its row of the models, and add its update to that row's mean.

        Args:
            fed: Federation of the clients.
            means: The models, (M, p), and their means.
            rows: Row of each client; none is None.
        """
        found = {client: row for client, row in enumerate(rows) if row is not None}
        assert len(found) == len(rows)
        fed.add_up(self.train, means, found, each={client: {"model": means.models[found[client]]} for client in fed.clients})

    @on_client(charges=["train"], takes={"model": MODEL}, gives={"update": UPDATE})
    def train(self, me: Client, model: np.ndarray) -> Release:
        """Run one round of DP-SGD from `model`.

        Args:
            me: The client's data and mechanisms.
            model: (p,) float32.
        """
        return Release(update=me.dpsgd("train", model) - model)


class Choosing(FromModel):
    """Clients receive all M models, choose one (privately, or by the raw argmin of their loss) and train from it."""

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        most = cls.most_clusters(options)
        return replace(super().capabilities_for(options, setting), max_models=most, published_models=most)

    @staticmethod
    def most_clusters(options: Any) -> int:
        """Return the largest M that the options allow."""
        clusters: int = options.clusters
        return clusters

    def selections(self, client: ClientEntry, count: int, budget_fraction: float) -> list[SelectionSlot]:
        """List the slots of choices by the exponential mechanism.

        Args:
            client: The client's roster entry.
            count: Number of choices.
            budget_fraction: Epsilon of one choice, as a fraction of the total.
        """
        per_selection = budget_fraction * self.protocol.epsilon_of(client)
        eta = per_selection if self.protocol.privacy.adjacency == "zero-out" else per_selection / 2
        return [SelectionSlot("select", eta)] * count

    def argmins(self, count: int) -> list[UnprotectedSlot]:
        """List the slots of choices without protection.

        Args:
            count: Number of choices.
        """
        return [UnprotectedSlot("argmin", RAW_INDEX)] * count

    def choose(self, fed: Federation, means: ModelMeans, assignment: Assignment, *, raw: bool = False) -> Assignment:
        """Let all clients choose one of the models, train from it, and add their updates to its mean.

        A hostile client may name any index: an index without a model is ignored, and so is that client's update.

        Args:
            fed: Federation of the clients.
            means: The models, (M, p), and their means.
            assignment: Assignment before the round.
            raw: Choose by the raw argmin of the loss instead of the exponential mechanism.

        Returns:
            The assignment with the new choices.
        """
        step = self.argmin_and_train if raw else self.select_and_train
        chosen = fed.add_up(step, means, common={"models": means.models})
        return [chosen.get(client, row) for client, row in enumerate(assignment)]

    def joining(self, t: int, before_window: int) -> list[int]:
        """List the clients that choose in a round of frozen clusters: their schedule has no earlier round from the window on.

        Args:
            t: Round with frozen clusters.
            before_window: Rounds before the window of choices.
        """
        return [e.id for e in self.protocol.roster if e.is_there(t) and not e.rounds_there(before_window + 1, t - 1)]

    def choose_on_joining(
        self, fed: Federation, means: ModelMeans, assignment: Assignment, joining: Collection[int]
    ) -> Assignment:
        """Let clients that missed all rounds of choices by schedule choose once; the other clients train as assigned.

        A joining client that does not answer keeps its row of `assignment` and is not asked to choose again.

        Args:
            fed: Federation of the clients.
            means: The models, (M, p), and their means.
            assignment: Assignment before the round; no row is None.
            joining: Clients that choose in this round.

        Returns:
            As `choose`.
        """
        if not joining:
            self.stream_each(fed, means, assignment)
            return assignment
        # Two calls in one round: all updates are kept, so that they are added in client order. Quorum 0: the round does not wait
        # for a client that has never been there.
        models = means.models
        results = fed.call(
            self.select_and_train, common={"models": models}, each={client: {} for client in joining}, quorum=0.0
        )
        rows = {client: chosen_row(release, len(models)) for client, release in results.items()}
        chosen = {client: row for client, row in rows.items() if row is not None}
        after = [chosen.get(client, row) for client, row in enumerate(assignment)]
        others = [client for client in fed.clients if client not in joining]
        updates = {client: results[client]["update"] for client in chosen} | self.train_each(fed, models, after, others)
        for client in sorted(updates):
            row = after[client]
            assert row is not None
            means.add(row, client, updates[client])
        return after

    @on_client(charges=["select", "train"], takes={"models": MODELS}, gives={"choice": INDEX, "update": UPDATE})
    def select_and_train(self, me: Client, models: np.ndarray) -> Release:
        """Choose by the exponential mechanism on counts of correctly classified records, then train from that model.

        Args:
            me: The client's data and mechanisms.
            models: (M, p) float32.
        """
        choice = me.select("select", models)
        return Release(choice=np.int64(choice), update=me.dpsgd("train", models[choice]) - models[choice])

    @on_client(charges=["argmin", "train"], takes={"models": MODELS}, gives={"choice": INDEX, "update": UPDATE})
    def argmin_and_train(self, me: Client, models: np.ndarray) -> Release:
        """Choose the model of least training loss, as in the papers, then train from that model.

        Args:
            me: The client's data and mechanisms.
            models: (M, p) float32.
        """
        choice = me.lowest_loss("argmin", models)
        return Release(choice=np.int64(choice), update=me.dpsgd("train", models[choice]) - models[choice])


def too_many_clusters(clusters: int, clients: int) -> list[str]:
    """List the problem with M clusters if there are fewer clients.

    Args:
        clusters: M.
        clients: Number of clients.
    """
    return (
        [] if clusters <= clients else [f"algorithm.clusters is {clusters}: must be at most the number of clients, {clients}"]
    )
