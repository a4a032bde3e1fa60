"""RR-Cluster (Yang, Hu, Kim, Li, "Differentially Private Federated Clustering with Random Rebalancing", Algorithms 1 and 2)."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.base import INDEX, MODELS, Setting, on_central_server, on_client
from dpcfl_net.algorithms.client_level import ClientLevel, Sampled, sampling_of
from dpcfl_net.algorithms.rr_bases import BASES, IFCA
from dpcfl_net.clustering.rebalance import rebalance, rebalanced_in_expectation
from dpcfl_net.core.types import Release, State, TensorSpec
from dpcfl_net.federation.base import Federation, Results
from dpcfl_net.federation.central_dp import Contribution, Desk
from dpcfl_net.federation.client import Client
from dpcfl_net.privacy.client_level import joint_noise, labels_first_sensitivity
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.events.fixed_size_gaussian import FixedSizeGaussian
from dpcfl_net.privacy.slots import CentralSlot, Slot, UnprotectedSlot

UPDATE = TensorSpec("f4", ("update",))
AS_PUBLISHED = (
    "the published claim does not hold: dividing by a private cluster size has no finite epsilon under add/remove, "
    "for which it is made"
)


class RRCluster(ClientLevel):
    """Clients name their cluster and train its model; every cluster is filled up to B updates before noise is added.

    guarantee `labels-first`: noisy labels are released first, and rebalancing them is post-processing; replacement of a
    client, samples of fixed size. `expected`: no label is released; each update is put in its cluster's block beside a count,
    and rebalancing on average is post-processing of the noisy sums; add/remove, Poisson samples. `paper`: as published.
    B = 0 is the base without rebalancing.
    """

    name = "rr-cluster"
    paper = "Yang, Hu, Kim, Li, Algorithms 1 and 2"

    class Options(Sampled):
        base: Literal["ifca", "fesem", "fedcam"] = Field(default="ifca", description="how clients find their cluster")
        clusters: int = Field(default=4, ge=1, le=64, description="k")
        least: int = Field(default=8, ge=0, description="B: every cluster averages at least so many updates; 0: the plain base")
        guarantee: Literal["labels-first", "expected", "paper"] = Field(
            default="labels-first", description="what is released in which order, and so which claim holds"
        )
        label_clip: float = Field(default=0.1, gt=0, le=1, description="C_s: the length of a one-hot label before noise")
        labels_share: float = Field(
            default=0.3, gt=0, lt=1, description="the labels' part of a round's 1 / z^2, where they are released"
        )

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        problems = super().problems(options, setting)
        drawn, wanted = options.sampling_rate * setting.clients, options.clusters * options.least
        if wanted > drawn + 1e-9:
            problems.append(
                f"algorithm.least is {options.least}: {options.clusters} clusters of at least so many need {wanted} clients a round, "
                f"{options.sampling_rate:g} of {setting.clients} are {drawn:g}"
            )
        sampling = sampling_of(options.sampling, setting.privacy.adjacency)
        if options.guarantee == "expected" and sampling == "fixed":
            problems.append("algorithm.guarantee is 'expected': needs Poisson sampling, set privacy.adjacency zero-out")
        if options.guarantee != "expected" and sampling == "poisson":
            why = "the number of labels shows whether a client was there"
            problems.append(
                f"algorithm.guarantee is {options.guarantee!r}: needs privacy.adjacency replace-one and sampling fixed, {why}"
            )
        if options.guarantee == "paper" and setting.privacy.accountant != "rdp":
            problems.append(
                "algorithm.guarantee is 'paper': needs privacy.accountant rdp, by which the published claim is made"
            )
        return problems

    @classmethod
    def holds_state(cls, options: Any) -> bool:
        return BASES[options.base].stateful and options.guarantee != "paper"

    @property
    def base(self) -> IFCA:
        return BASES[self.options.base]()

    @property
    def max_models(self) -> int:
        return int(self.base.shared + self.options.clusters)

    @property
    def dims(self) -> dict[str, int | tuple[int, int]]:
        return {**super().dims, "update": self.protocol.model.parameters * (1 + self.base.shared)}

    def models_of(self, client: int, cluster: int | None) -> tuple[int, ...]:
        """FedCAM adds the outputs of the first model, which all share, to those of the cluster's."""
        return (*range(self.base.shared), self.base.shared + (cluster or 0))

    # ---- what is paid for

    def central_plan(self) -> list[Slot]:
        rounds, share = self.protocol.rounds, self.options.labels_share
        if self.options.guarantee == "expected":
            return [self.central_slot()] * rounds
        released = self.central_slot(("labels", share), ("sums", 1 - share))
        if self.options.guarantee == "labels-first":
            return [released] * rounds
        return [released, UnprotectedSlot("claim", AS_PUBLISHED)] * rounds

    @property
    def claim_of_paper(self) -> str | None:  # type: ignore[override]
        if self.options.guarantee != "paper":
            return None
        return f"client-level epsilon {self.protocol.privacy.epsilon:g} (Theorem 4.2, by Wang et al. 2019)"

    def sound_events(self) -> list[Event] | None:
        """As published, but for what labels really move when a client is replaced: sqrt(2) C_s instead of C_s."""
        z = self.protocol.curator_noise_multiplier
        if self.options.guarantee != "paper" or self.base.stateful or z is None:
            return None
        slot = self.central_plan()[0]
        assert isinstance(slot, CentralSlot)
        sound = joint_noise(slot.part_noise(z, "sums"), slot.part_noise(z, "labels") / math.sqrt(2))
        return [FixedSizeGaussian(sound, int(slot.sample_size), slot.population, self.protocol.rounds)]

    # ---- server half

    def start(self, fed: Federation) -> State:
        """Every model its own first values: equal ones would never part."""
        models = np.stack([fed.initial_model(k) for k in range(self.max_models)])
        return State(models, [None] * len(fed.clients), {"phase": "clusters"})

    def round(self, state: State, t: int, fed: Federation) -> State:
        half = {"labels-first": self.labels_then_sums, "expected": self.blocks, "paper": self.as_published}[
            self.options.guarantee
        ]
        released = fed.release(half, models=state.models)
        if released is None:
            return state
        steps, sizes = self.means(released)
        models = state.models + (self.options.server_lr * steps).astype(np.float32)
        return State(models, state.assignment, {"phase": "clusters", "sizes": sizes})

    def means(self, released: Any) -> tuple[np.ndarray, list[float]]:
        """The noisy mean update of every model, (M, p), and the sizes that they were divided by."""
        shared, sums = self.base.shared, released["sums"].astype(np.float64)
        steps = np.zeros_like(sums)
        steps[:shared] = sums[:shared] / self.drawn
        if self.options.guarantee == "expected":
            counts = released["counts"].astype(np.float64)
            steps[shared:] = rebalanced_in_expectation(sums[shared:], counts, self.options.least)
            return steps, [float(count) for count in counts]
        sizes = np.bincount(released["slots"], minlength=self.options.clusters)
        filled = np.flatnonzero(sizes)  # an empty cluster keeps its model
        steps[shared + filled] = sums[shared + filled] / sizes[filled, None]
        return steps, [float(size) for size in sizes]

    def describe(self, state: State) -> dict[str, Any]:
        return {"phase": "clusters", "sizes": state.memory.get("sizes")}

    # ---- curator half

    @on_central_server(bundle=["round"])
    def labels_then_sums(self, me: Desk, models: np.ndarray) -> Release:
        """Noisy labels of uniformly shuffled slots; then sums over the clusters that rebalancing makes of them."""
        return self.released(me, models, labels_first_sensitivity(1.0, self.options.label_clip)[1], "surplus")

    @on_central_server(bundle=["round", "claim"])
    def as_published(self, me: Desk, models: np.ndarray) -> Release:
        """The same with noise for C_s on a label, and donors from whole clusters (Algorithm 2, lines 7 and 11-12)."""
        me.without_guarantee("claim")
        return self.released(me, models, self.options.label_clip, "any")

    def released(self, me: Desk, models: np.ndarray, label_sensitivity: float, donors: Literal["surplus", "any"]) -> Release:
        """A round that releases labels: what each slot was labelled, which cluster it counts for, and the sums."""
        k, slots = self.options.clusters, me.sample("round")
        answers = self.collect(me, models, slots)
        labels = [int(answers[i]["label"]) if i in answers else None for i in slots]
        noisy = me.noisy_labels("round", "labels", labels, k, self.options.label_clip, label_sensitivity).argmax(axis=1)
        placed = rebalance(noisy, k, self.options.least, me.rng("round", "rebalancing"), donors)
        sums, _ = self.sums(me, answers, dict(zip(slots, placed.tolist(), strict=True)))
        me.show_observer(clients=slots, labels=labels, released=noisy.tolist())
        return Release(slots=placed.astype(np.int64), sums=sums)

    @on_central_server(bundle=["round"])
    def blocks(self, me: Desk, models: np.ndarray) -> Release:
        """Each client's update in its cluster's block, beside a count: noisy sums and counts, and no label."""
        answers = self.collect(me, models, me.sample("round"))
        where = {i: min(max(int(answer["label"]), 0), self.options.clusters - 1) for i, answer in answers.items()}
        sums, counts = self.sums(me, answers, where, counts={i: self.base.shared + label for i, label in where.items()})
        me.show_observer(clients=list(answers), labels=[where[i] for i in answers], released=[])
        assert counts is not None
        return Release(sums=sums, counts=counts[self.base.shared :].astype(np.float32))

    def collect(self, me: Desk, models: np.ndarray, sample: list[int]) -> Results:
        """The raw labels and updates of the round's clients."""
        return me.call(self.assign_and_train, {client: {"models": models} for client in sample})

    def sums(self, me: Desk, answers: Results, where: dict[int, int], counts: dict[int, int] | None = None) -> Any:
        """Noisy sums of the updates over the clusters that clients are put in."""
        parts = {i: self.contribution(answer["update"], where[i]) for i, answer in answers.items()}
        p, clip = self.protocol.model.parameters, self.protocol.local.clip
        return me.noisy_sums("round", "sums", parts, (self.max_models, p), clip, counts)

    def contribution(self, update: np.ndarray, cluster: int) -> Contribution:
        """Which blocks of the sums an update is added to: the shared model's, if there is one, and the cluster's."""
        parts = np.split(update, 1 + self.base.shared)
        return [*((row, parts[row]) for row in range(self.base.shared)), (self.base.shared + cluster, parts[-1])]

    # ---- client half

    @on_client(bundle=["raw"], takes={"models": MODELS}, gives={"label": INDEX, "update": UPDATE})
    def assign_and_train(self, me: Client, models: np.ndarray) -> Release:
        """Find the own cluster, train its model; label and update as they are."""
        label = self.base.assign(me, models)
        return Release(label=np.int64(label), update=self.base.train(me, models, label))
