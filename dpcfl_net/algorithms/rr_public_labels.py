"""Rounds of RR-Cluster with public labels: private labels of all clients, the true clusters (oracle), or one cluster."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from dpcfl_net.algorithms.base import MODELS, any_norm, on_central_server, on_client
from dpcfl_net.algorithms.client_level import ClientLevel
from dpcfl_net.algorithms.rr_bases import BASES, IFCA
from dpcfl_net.algorithms.rr_options import RROptions
from dpcfl_net.clustering.rebalance import rebalance
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.types import Release, State, TensorSpec
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.central_context import CentralContext
from dpcfl_net.federation.client import Client
from dpcfl_net.federation.clipped_sums import ClippedSums, Contribution
from dpcfl_net.privacy.slots import LabelSlot, RawSlot, Slot

LOSSES = TensorSpec("f4", ("clusters",))
BLOCK = TensorSpec("f4", ("update",), max_norm=any_norm)
LABELS = "labels"  # slot of a release of all labels
MEMORY = "public labels"
PUBLIC = (
    "clients are sampled whether they are there or not; a client without an answer gets a label at random, and adds nothing to the sum "
    "of its cluster, which is divided by the expected number of its clients in the sample"
)


class PublicLabels(ClientLevel):
    """Rounds in which the cluster of every client is public.

    A sum needs noise for one update only, 2 C where a client is replaced and C where it is left out, since the clusters are no
    secret; each sum is divided by q times the public size of its cluster. Rebalancing of public labels is post-processing.
    """

    def __init__(self, protocol: Protocol) -> None:
        super().__init__(protocol)
        true, clusters = self.setting.true_clusters, self.options.clusters
        if self.options.base == "oracle" and clusters != true:
            raise ConfigError(f"algorithm.clusters is {clusters}: must be {true} with base oracle, the number of true clusters")

    @property
    def base(self) -> IFCA:
        """The base method."""
        return self.base_of("masked" if self.secure else "raw")

    def base_of(self, slot: str) -> IFCA:
        """Build the base method.

        Args:
            slot: Slot of the release that pays for what it computes.
        """
        return BASES[self.options.base](slot)

    @property
    def first_labels(self) -> int:
        """First round in which all clients release labels."""
        return first_labels(self.options)

    @property
    def label_rounds(self) -> int:
        """Number of releases of the labels of all clients."""
        every = self.options.labels_every
        return math.ceil((self.protocol.rounds + 1 - self.first_labels) / every) if every else 0

    @property
    def least_members(self) -> int:
        """Minimum size of a public cluster, so that a sample holds B of it on average; an equal share where clients are too few."""
        needed = math.ceil(self.options.min_cluster_size / self.options.sampling_rate - 1e-9)
        return min(needed, len(self.clients) // self.options.clusters)

    def label_slots(self) -> list[Slot]:
        """List the slots of the labels of all clients in the central plan."""
        kind, categories = self.options.labels, self.options.clusters
        if kind == "gaussian":  # labels are a part of each round
            return []
        return [LabelSlot(LABELS, kind, self.options.labels_epsilon, categories)] * self.label_rounds

    def public_round(self, state: State, t: int, fed: Federation) -> State:
        """Run a round with public labels, which are released every r rounds from `first_labels`.

        Args:
            state: State after the round before.
            t: Round.
            fed: Federation of the clients.
        """
        if self.options.base == "oracle":
            assert self.protocol.oracle is not None
            state = replace(state, assignment=[*self.protocol.oracle])
            labels = np.array(self.protocol.oracle, np.int64)
        elif self.options.clusters == 1:
            labels = np.zeros(len(self.clients), np.int64)
        else:
            if (t - self.first_labels) % self.options.labels_every == 0:
                named = fed.release(self.all_labels, models=state.models)
                if named is not None:  # None: a crash lost them after they were charged, and the earlier ones stay
                    state = replace(state, memory={**state.memory, MEMORY: named["labels"]})
            if MEMORY not in state.memory:
                return state
            labels = np.asarray(state.memory[MEMORY])
        released = fed.release(self.placed, models=state.models, labels=labels)
        return state if released is None else self._moved_publicly(state, released["sums"].astype(np.float64), labels)

    def _moved_publicly(self, state: State, sums: np.ndarray, labels: np.ndarray) -> State:
        """Move every model by its noisy sum over the expected number of its clients; an empty cluster keeps its model."""
        shared = self.base.shared
        counts = np.bincount(labels, minlength=self.options.clusters) * (self.clients_per_round / len(labels))
        divisors = np.concatenate([np.full(shared, self.clients_per_round), counts])
        filled = divisors > 0
        steps = np.zeros_like(sums)
        steps[filled] = sums[filled] / divisors[filled, None]
        models = state.models + (self.options.server_lr * steps).astype(np.float32)
        sizes = [float(size) for size in counts]
        return State(models, state.assignment, state.memory, diagnostics={"phase": "clusters", "sizes": sizes})

    # ---- central steps

    @on_central_server(charges=[LABELS])
    def all_labels(self, me: CentralContext, models: np.ndarray) -> Release:
        """Release a private label of every client, and fill small clusters with random members of large ones.

        Args:
            me: The round's mechanisms.
            models: (M, p) float32.
        """
        answers = me.call(self.name_cluster, {client: {"models": models} for client in self.clients})
        losses = [answers[i]["losses"] if i in answers else None for i in self.clients]
        sent = [None if own is None else int(np.argmin(own)) for own in losses]
        if self.options.labels == "exponential":
            named = me.chosen_labels(LABELS, losses, self.options.labels_loss_range)
        else:
            named = me.randomised_labels(LABELS, sent)
        placed = rebalance(named, self.options.clusters, self.least_members, me.rng(LABELS, "rebalancing"), "surplus")
        kinds = {"as sent": sent, "as released": named.tolist(), "as placed": placed.tolist()}
        me.show_observer(clients=list(self.clients), labels=kinds)
        return Release(labels=placed.astype(np.int64))

    @on_central_server(charges=["round"])
    def placed(self, me: CentralContext, models: np.ndarray, labels: np.ndarray) -> Release:
        """Release noisy sums of the updates of each public cluster over a secret sample.

        Args:
            me: The round's sample and mechanisms.
            models: (M, p) float32.
            labels: Public cluster of every client, (n,) int64.
        """
        shared, where = self.base.shared, dict(zip(self.clients, labels.tolist(), strict=True))
        clipped = ClippedSums((len(models), models.shape[1]), self.protocol.local.clip, counted=False)
        tasks = {i: {"models": np.concatenate([models[:shared], models[shared + where[i], None]])} for i in me.sample("round")}
        me.stream(self.train_placed, lambda i, answer: clipped.add(i, self.contribution(answer["update"], where[i])), tasks)
        return Release(sums=me.noisy_total("round", "sums", clipped)[0])

    def contribution(self, update: np.ndarray, cluster: int) -> Contribution:
        """Split an update into parts for the blocks of the sums.

        Args:
            update: ((shared + 1) * p,) float32.
            cluster: Cluster in which the client is placed.

        Returns:
            (block, part) for the shared model, if the base method has one, and for the cluster's model.
        """
        parts = np.split(update, 1 + self.base.shared)
        return [*((row, parts[row]) for row in range(self.base.shared)), (self.base.shared + cluster, parts[-1])]

    # ---- client steps

    @on_client(charges=["label"], takes={"models": MODELS}, gives={"losses": LOSSES})
    def name_cluster(self, me: Client, models: np.ndarray) -> Release:
        """Release the raw score of every cluster's model, the largest float32 number in place of one that is larger or infinite.

        The lowest score is of the cluster that the base method chooses: a loss, or FeSEM's squared distance.

        Args:
            me: The client's data and mechanisms.
            models: (M, p) float32.
        """
        scores = self.base_of("label").scores(me, models)
        return Release(losses=np.minimum(scores, np.finfo(np.float32).max).astype(np.float32))

    @on_client(charges=["raw"], takes={"models": TensorSpec("f4", ("placed", "p"))}, gives={"update": BLOCK})
    def train_placed(self, me: Client, models: np.ndarray) -> Release:
        """Train the model of the client's public cluster and release the raw update.

        Args:
            me: The client's data, mechanisms and state.
            models: Shared models and that of the cluster, (shared + 1, p) float32.
        """
        return Release(update=self.base.train(me, models, 0))

    def label_plan(self) -> list[Slot]:
        """List the raw releases of a client's losses."""
        return [RawSlot("label")] * self.label_rounds


def first_labels(options: RROptions) -> int:
    """Return the first round in which all clients release labels: under `expected` models are first separated without any.

    Args:
        options: Options with `labels_every`.
    """
    return 1 + options.labels_every * (options.guarantee == "expected")
