"""RR-Cluster (Yang, Hu, Kim, Li, "Differentially Private Federated Clustering with Random Rebalancing", Algorithms 1 and 2)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from dpcfl_net.algorithms.base import INDEX, MODELS, any_norm, on_central_server, on_client
from dpcfl_net.algorithms.client_level import round_slot
from dpcfl_net.algorithms.rr_bases import BASES
from dpcfl_net.algorithms.rr_options import RROptions, option_problems
from dpcfl_net.algorithms.rr_public_labels import PUBLIC, PublicLabels, first_labels
from dpcfl_net.clustering.rebalance import rebalance, rebalanced_in_expectation
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.types import Release, State, TensorSpec
from dpcfl_net.federation.base import Arrays, Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.federation.central_context import CentralContext
from dpcfl_net.federation.client import Client
from dpcfl_net.federation.clipped_sums import ClippedSums
from dpcfl_net.federation.secure.stages import MASKED, MASKING
from dpcfl_net.privacy.client_level import joint_noise, labels_first_sensitivity
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.events.fixed_size_gaussian import FixedSizeGaussian
from dpcfl_net.privacy.slots import CentralSlot, LabelledCentralSlot, Slot, UnprotectedSlot

BLOCKS = TensorSpec("f4", ("update",), max_norm=any_norm)  # of the shared model, if there is one, and of the cluster's
AS_PUBLISHED = (
    "the published claim does not hold: dividing by a private cluster size has no finite epsilon under add/remove, "
    "for which it is made"
)

WITHOUT_COUNTS = (
    "clients are sampled whether they are there or not; those without an answer are missing from the noisy sums and counts; a "
    "cluster without an answer moves by noise"
)
WITHOUT_LABELS = (
    "clients are sampled whether they are there or not; one without an answer gets a label at random, counts in the "
    "cluster of that label, and adds nothing to its sum"
)
WITHOUT_VECTORS = (
    "the secure sum of updates and counts is over the clients whose masked vector arrived; with fewer than the threshold it is "
    "aborted, and the models stay"
)


class RRCluster(PublicLabels):
    """Clients name their cluster and train its model; every cluster is filled up to B updates before noise is added.

    Guarantee `labels-first`: noisy labels are released first, and rebalancing them is post-processing; for replace-one adjacency
    and samples of fixed size. Guarantee `expected`: no label is released; each update is added to the block of its cluster,
    together with a count, and rebalancing in expectation is post-processing of the noisy sums; for zero-out adjacency and Poisson
    samples. Guarantee `paper`: as published. B = 0 is the base method without rebalancing. With `labels_every`, base `oracle` or one
    cluster, labels are public (`PublicLabels`); with one cluster no label is released, and none is paid for.

    Source: Yang, Hu, Kim, Li, Algorithms 1 and 2.
    """

    name = "rr-cluster"
    paper = "Yang, Hu, Kim, Li, Algorithms 1 and 2"
    Options = RROptions

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        base, paper = BASES[options.base], options.guarantee == "paper"
        models = base.shared + options.clusters
        bound = "by Theorem 27 of Wang et al. 2019; the paper's Theorem 4.2 prints a looser bound"
        claim = f"client-level epsilon {setting.privacy.epsilon:g}, {bound}"
        able = super().capabilities_for(options, setting)
        return replace(
            able,
            holds_state=base.stateful and not paper,
            max_models=models,
            least_models=models,
            sent_models=_sent_models(options, setting, models),
            published_models=models,
            shared_models=base.shared,
            uses_oracle=options.base == "oracle",
            sides={
                "clusters": lambda model: options.clusters,
                "placed": lambda model: 1 + base.shared,
                "update": lambda model: model.parameters * (1 + base.shared),
                "masked": lambda model: models * (model.parameters + _counted(options)),
            },
            protects=able.protects if options.guarantee == "expected" else able.protects[:1],
            claim_of_paper=claim if paper else None,
            published=_published(options),
            sent_raw=_sent_raw(options),
            without_clients=_without_clients(options, able, setting),
            sound_events=(lambda z: sound_events(options, setting, z)) if paper and not base.stateful else None,
        )

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        return super().problems(options, setting) + option_problems(options, setting)

    @property
    def min_cluster_size(self) -> int:
        """B, the minimum number of updates in a cluster."""
        return int(self.options.min_cluster_size)

    # ---- plan

    def plan(self, client: ClientEntry) -> list[Slot]:
        return super().plan(client) + self.label_plan()

    def central_plan(self) -> list[Slot]:
        rounds = self.protocol.rounds
        if self.secure:
            return []
        if self.options.labels_are_public:
            return [round_slot(self.options, self.setting)] * rounds + self.label_slots()
        if self.options.guarantee == "expected":
            return [round_slot(self.options, self.setting)] * rounds
        released = labels_slot(self.options, self.setting)
        if self.options.guarantee == "labels-first":
            return [released] * rounds
        return [released, UnprotectedSlot("claim", AS_PUBLISHED)] * rounds

    # ---- server

    def start(self, fed: Federation) -> State:
        """Initialise every model with different values: equal models would stay equal."""
        models = np.stack([fed.initial_model(k) for k in range(self.capabilities.max_models)])
        return State(models, [0 if self.options.clusters == 1 else None] * len(fed.clients))

    def round(self, state: State, t: int, fed: Federation) -> State:
        if self.secure:
            return self.secure_round(state, fed)
        if self.options.known_clusters or (self.options.labels_every and t >= self.first_labels):
            return self.public_round(state, t, fed)
        steps = {"labels-first": self.labels_then_sums, "expected": self.blocks, "paper": self.as_published}
        released = fed.release(steps[self.options.guarantee], models=state.models)
        if released is None:
            return state
        return self.moved(state, released, self.clients_per_round)

    def secure_round(self, state: State, fed: Federation) -> State:
        """Run a round whose sums and counts of clusters are one secure sum: neither update nor cluster of a client is known.

        Args:
            state: State after the round before.
            fed: Federation of the clients.
        """
        result = self.sum_securely(fed, self.masked_blocks, models=state.models)
        shown = {"secure sum": result.aborted or "ok", "survivors": len(result.survivors)}
        if result.total is None:
            return replace(state, diagnostics={"phase": "clusters", **shown})
        empty = self.new_sums()
        sums, counts = empty.split(result.total.reshape(empty.total.shape))
        released = {"sums": sums}
        if counts is not None:
            released["counts"] = counts[self.base.shared :].astype(np.float32)
        moved = self.moved(state, released, self.coin * len(result.survivors))
        return replace(moved, diagnostics=moved.diagnostics | shown)

    def moved(self, state: State, released: Any, clients: float) -> State:
        """Move every model by its noisy mean update.

        Args:
            state: State after the round before.
            released: Tensors that the central step published.
            clients: Expected number of clients in the sums.
        """
        moves, sizes = self.means(released, clients)
        models = state.models + (self.options.server_lr * moves).astype(np.float32)
        return State(models, state.assignment, diagnostics={"phase": "clusters", "sizes": sizes})

    def means(self, released: Any, clients: float) -> tuple[np.ndarray, list[float]]:
        """Compute the noisy mean update of every model.

        Args:
            released: Tensors that the central step published.
            clients: Expected number of clients in the sums, by which those of shared models and of an only cluster are divided.

        Returns:
            Mean updates, (M, p) float64, and the cluster sizes by which the sums were divided.
        """
        shared, sums = self.base.shared, released["sums"].astype(np.float64)
        if self.options.clusters == 1:
            return sums / clients, [float(clients)]
        steps = np.zeros_like(sums)
        steps[:shared] = sums[:shared] / clients
        if self.options.guarantee == "expected":
            counts = released["counts"].astype(np.float64)
            steps[shared:] = rebalanced_in_expectation(sums[shared:], counts, self.min_cluster_size)
            return steps, [float(count) for count in counts]
        sizes = np.bincount(released["slots"], minlength=self.options.clusters)
        filled = np.flatnonzero(sizes)  # an empty cluster keeps its model
        steps[shared + filled] = sums[shared + filled] / sizes[filled, None]
        return steps, [float(size) for size in sizes]

    # ---- central steps

    @on_central_server(charges=["round"])
    def labels_then_sums(self, me: CentralContext, models: np.ndarray) -> Release:
        """Release noisy labels of the clients in random order, then sums over the rebalanced clusters.

        Args:
            me: The round's sample and mechanisms.
            models: (M, p) float32.
        """
        return self.released(me, models, labels_first_sensitivity(1.0, self.options.label_clip)[1], "surplus")

    @on_central_server(charges=["round", "claim"])
    def as_published(self, me: CentralContext, models: np.ndarray) -> Release:
        """Release labels and sums as published: identifiers and rebalancing of Algorithm 2, sums of Algorithm 1.

        The noise on a label covers C_s instead of sqrt(2) C_s, and rebalancing may take any client of a cluster of B or more.

        Args:
            me: The round's sample and mechanisms.
            models: (M, p) float32.
        """
        me.without_guarantee("claim")
        return self.released(me, models, self.options.label_clip, "any")

    def released(
        self, me: CentralContext, models: np.ndarray, label_sensitivity: float, donors: Literal["surplus", "any"]
    ) -> Release:
        """Run a round that releases labels.

        Args:
            me: The round's sample and mechanisms.
            models: (M, p) float32.
            label_sensitivity: L2 sensitivity that Gaussian noise on a label covers.
            donors: Clients that rebalancing may take: those above B, or any.

        Returns:
            The cluster of each sampled client in random order, and the noisy sums, (M, p).
        """
        k, sample = self.options.clusters, me.sample("round")
        answers = me.call(self.assign_and_train, {client: {"models": models} for client in sample})
        labels = [self.named_cluster(answers.get(i)) for i in sample]
        if self.options.labels == "randomised-response":
            noisy = me.sampled_labels("round", labels)
        else:
            rows = me.noisy_labels("round", "labels", labels, k, self.options.label_clip, label_sensitivity)
            noisy = rows.argmax(axis=1)
        placed = rebalance(noisy, k, self.min_cluster_size, me.rng("round", "rebalancing"), donors)
        clipped, where = self.empty_sums(counted=False), dict(zip(sample, placed.tolist(), strict=True))
        for client, answer in answers.items():
            clipped.add(client, self.contribution(answer["update"], where[client]))
        sums, _ = me.noisy_total("round", "sums", clipped)
        kinds = {"as sent": labels, "as released": noisy.tolist(), "as placed": placed.tolist()}
        me.show_observer(clients=sample, labels=kinds)
        return Release(slots=placed.astype(np.int64), sums=sums)

    def named_cluster(self, answer: Arrays | None) -> int | None:
        """Read the cluster that a client names; None without an answer, and for a number without a cluster."""
        label = -1 if answer is None else int(answer["label"])
        return label if 0 <= label < self.options.clusters else None

    @on_central_server(charges=["round"])
    def blocks(self, me: CentralContext, models: np.ndarray) -> Release:
        """Release noisy sums and counts of each cluster, and no label.

        Args:
            me: The round's sample and mechanisms.
            models: (M, p) float32.
        """
        clipped, where = self.new_sums(), dict[int, int]()

        def take(client: int, answer: Arrays) -> None:
            label = where[client] = min(max(int(answer["label"]), 0), self.options.clusters - 1)
            clipped.add(client, self.contribution(answer["update"], label), self.base.shared + label)

        me.stream(self.assign_and_train, take, {client: {"models": models} for client in me.sample("round")})
        sums, counts = me.noisy_total("round", "sums", clipped)
        me.show_observer(clients=list(where), labels={"as sent": list(where.values())})
        assert counts is not None
        return Release(sums=sums, counts=counts[self.base.shared :].astype(np.float32))

    def new_sums(self) -> ClippedSums:
        return self.empty_sums(counted=_counted(self.options))

    def empty_sums(self, *, counted: bool) -> ClippedSums:
        """Return empty sums of a block for each model.

        Args:
            counted: True if clients are counted.
        """
        shape = self.capabilities.max_models, self.protocol.model.parameters
        return ClippedSums(shape, self.protocol.local.clip, counted=counted)

    # ---- client step

    @on_client(charges=["raw"], takes={"models": MODELS}, gives={"label": INDEX, "update": BLOCKS})
    def assign_and_train(self, me: Client, models: np.ndarray) -> Release:
        """Choose a cluster, train its model, and release the raw label and update.

        Args:
            me: The client's data, mechanisms and state.
            models: (M, p) float32.
        """
        label = self.base.assign(me, models)
        return Release(label=np.int64(label), update=self.base.train(me, models, label))

    @on_client(charges=["masked"], takes={**MASKING, "models": MODELS}, gives={"masked": MASKED})
    def masked_blocks(self, me: Client, models: np.ndarray) -> Release:
        """Choose a cluster and train its model if the client's coin says so, and add the update and a count to the secure sum.

        Args:
            me: The client's data, mechanisms and state.
            models: (M, p) float32.
        """

        def contribute() -> np.ndarray:
            counted = _counted(self.options)
            label = self.base.assign(me, models) if counted else 0
            update = self.base.train(me, models, label)
            return self.vector(self.contribution(update, label), self.base.shared + label if counted else None)

        return Release(masked=me.masked_update("masked", contribute))


def _counted(options: Any) -> bool:
    """Return True if a secure sum counts the clients of each cluster; the sum of an only one is divided by a public number."""
    return bool(options.clusters > 1)


def _sent_models(options: Any, setting: Setting, models: int) -> float:
    """Average the models in a task: all of them until labels are public, then those that the client trains."""
    if not options.labels_are_public:
        return float(models)
    first = 0 if options.known_clusters else first_labels(options) - 1
    separate = min(first, setting.rounds) / setting.rounds
    return separate * models + (1 - separate) * (1 + BASES[options.base].shared)


def _published(options: RROptions) -> tuple[str, ...]:
    """Name the publications of the trusted server."""
    counts = ("noisy counts of the clients of each cluster",)
    if options.known_clusters:
        return Capabilities.published
    if options.labels_every:
        how = "the exponential mechanism" if options.labels == "exponential" else "randomised response"
        before = counts if options.guarantee == "expected" else ()
        return (*Capabilities.published, *before, f"labels of all clients by {how}")
    how = "by randomised response" if options.labels == "randomised-response" else "with noise"
    labels = (f"labels of the sampled clients {how}, in random order",)
    return (*Capabilities.published, *(counts if options.guarantee == "expected" else labels))


def _sent_raw(options: RROptions) -> tuple[str, ...]:
    """Name what the trusted server receives without noise."""
    if options.known_clusters:
        return Capabilities.sent_raw
    labelled = ("the raw update and cluster label of every sampled client",)
    if not options.labels_every:
        return labelled
    scores = "distances of models" if options.base == "fesem" else "losses"
    first = labelled if options.guarantee == "expected" else Capabilities.sent_raw
    return (*first, f"the raw {scores} by which all clients choose a cluster, whenever labels are released")


def _without_clients(options: Any, able: Capabilities, setting: Setting) -> str:
    """Describe how a round treats missing clients."""
    if options.clusters == 1:
        return able.without_clients
    if setting.privacy.secure:
        return WITHOUT_VECTORS
    if options.labels_are_public:
        return PUBLIC
    return WITHOUT_COUNTS if options.guarantee == "expected" else WITHOUT_LABELS


def labels_slot(options: Any, setting: Setting) -> CentralSlot:
    """Build the central slot of a round that releases noisy labels, then sums.

    Args:
        options: Options of the algorithm.
        setting: Public facts of the run.
    """
    if options.labels == "randomised-response":
        own = round_slot(options, setting)
        return LabelledCentralSlot(
            own.name, own.sampling, own.sample_size, own.population,
            label_epsilon=options.labels_epsilon, categories=options.clusters,
        )  # fmt: skip
    return round_slot(options, setting, ("labels", options.labels_share), ("sums", 1 - options.labels_share))


def sound_events(options: Any, setting: Setting, z: float) -> list[Event]:
    """Build events that hold for guarantee `paper`: replacing a client moves a label by sqrt(2) C_s, not by C_s.

    Args:
        options: Options of the algorithm.
        setting: Public facts of the run.
        z: Noise multiplier of a round.
    """
    slot = labels_slot(options, setting)
    sound = joint_noise(slot.part_noise(z, "sums"), slot.part_noise(z, "labels") / math.sqrt(2))
    return [FixedSizeGaussian(sound, int(slot.sample_size), slot.population, setting.rounds)]
