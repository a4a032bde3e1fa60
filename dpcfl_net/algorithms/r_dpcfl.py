"""R-DPCFL (Malekmohammadi, Taik, Farnadi, "Differentially Private Clustered Federated Learning", TMLR 2025, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.base import EXACT_UPDATE, MODEL, Options, on_client
from dpcfl_net.algorithms.buffered import also_without_answers
from dpcfl_net.algorithms.noise_weights import MayWeighByNoise, WeighedByNoise
from dpcfl_net.algorithms.secure_clusters import SecureClusters, also_without_survivors
from dpcfl_net.algorithms.shared_steps import Choosing, Selection
from dpcfl_net.clustering import mixture, sampled
from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.types import Assignment, Release, State
from dpcfl_net.federation.aggregation import ModelMeans
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.federation.client import Client
from dpcfl_net.privacy.slots import DPSGDSlot, Slot, given

WITHOUT_CLIENTS = (
    "the first round clusters the clients that answered, and draws the others uniformly until they choose in the "
    "window; the mean of a cluster is over its clients that answered; a cluster without an answer keeps its "
    "model"
)
JOINING = "a client that is away in the whole window by schedule chooses privately in its first round after it"
NOT_JOINING = (
    "one that missed the first round and has not chosen before the first secure sum keeps the cluster that was drawn for it last, "
    "or without a draw is in the first one"
)
FIRST_ROUND_ARRAYS = (
    "coordinates", "posteriors", "labels", "centres", "deviations", "candidates", "scores", "mss", "mss_plain", "mpo", "clusters",
    "outliers", "unverified",
)  # fmt: skip


def membership(fit: mixture.MixtureFit, clients: Sequence[int]) -> dict[str, list[int] | int]:
    """List clients alone in a cluster and outliers in clusters of others; count clients that may resemble no other. Without zeros."""
    counts = np.bincount(fit.labels, minlength=fit.clusters)[fit.labels]
    marks = {"alone": fit.outliers & (counts == 1), "outliers": fit.outliers & (counts > 1)}
    found: dict[str, list[int] | int] = {
        name: [client for client, on in zip(clients, mark, strict=True) if on] for name, mark in marks.items() if mark.any()
    }
    return found | ({"unverified": int(fit.unverified.sum())} if fit.unverified.any() else {})


def first_switch(options: Any) -> int:
    """Return the least E_c: 2, so that models have been trained and differ when clients choose; 1 after a warm start."""
    return 1 if options.warm_start else 2


def without_choices(options: Any, setting: Setting) -> str:
    """Name the setting with which clients never choose a cluster privately; empty if they may."""
    if options.clusters == 1:
        return "clusters 1"
    begins = (options.secure_from or 2) if setting.privacy.secure else setting.rounds + 1
    if begins - 1 > first_switch(options):
        return ""
    return f"secure sums from round {begins}" if setting.privacy.secure else f"rounds {setting.rounds}"


class Clustering(Options):
    """Options of the mixture on the updates of the first round."""

    added = ("sample",)
    space: mixture.Space = Field(default="spectral", description="space in which the mixture is fitted")
    sample: int = Field(
        default=2_000, ge=2, le=20_000,
        description="largest number of updates to which the mixture is fitted; with more clients: a random sample of this size, and the other "
        "clients are assigned to its clusters",
    )  # fmt: skip


class FromMixture(Options):
    """Options of an algorithm whose first clusters are a mixture on the updates of the first round."""

    clusters: int | Literal["auto"] = Field(
        default="auto", description="M: number of clusters; auto: chosen by the known noise and effective separation"
    )
    max_clusters: int = Field(default=8, ge=2, le=64, description="clusters auto: largest M")
    clustering: Clustering = Field(default=Clustering(), description="mixture on the updates of the first round")
    warm_start: bool = Field(
        default=False, description="initialise cluster models with the posterior-weighted updates of the first round"
    )


class RDPCFL(WeighedByNoise, SecureClusters, Choosing):
    """Full-batch first round, a mixture on its updates, soft rounds, a window of private choices, then frozen clusters.

    Source: Malekmohammadi, Taik, Farnadi, TMLR 2025, Algorithm 1.
    """

    name = "r-dpcfl"
    paper = "Malekmohammadi, Taik, Farnadi, TMLR 2025, Algorithm 1"

    class Options(FromMixture, MayWeighByNoise):
        added = ("asynchronous", "weights", "secure_from")
        selection: Selection = Field(default=Selection(), description="private choices of a cluster, in a window of rounds")
        secure_from: int | None = Field(
            default=None, ge=2,
            description="privacy.trust secure-aggregation: first round with secure sums, whose clusters are frozen; from 4 on (3 with "
            "warm_start) clients choose before it; null: 2",
        )  # fmt: skip

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        after = setting.rounds - 1  # the mixture of the first round needs each update
        said = f"{WITHOUT_CLIENTS}; {NOT_JOINING if setting.privacy.secure else JOINING}"
        said = also_without_survivors(also_without_answers(said, options), setting)
        return replace(super().capabilities_for(options, setting), summed_rounds=after, without_clients=said)

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        valid = options.clusters == "auto" or 1 <= options.clusters <= setting.clients
        must = f"must be 1 to the number of clients, {setting.clients}, or auto"
        problems = super().problems(options, setting)
        problems += [] if valid else [f"algorithm.clusters is {options.clusters}: {must}"]
        if options.clusters != "auto":
            problems += options.unused("max_clusters", f"clusters {options.clusters}")
        needed, there = 2 if options.clusters == "auto" else options.clusters, setting.clients - setting.away_at_first
        if setting.away_at_first and there < needed:
            why = f"the first round clusters the clients, and algorithm.clusters is {options.clusters}"
            problems.append(f"availability leaves {there} clients in round 1: must leave at least {needed}: {why}")
        first = getattr(options, "secure_from", None)
        if "selection" in type(options).model_fields and (where := without_choices(options, setting)):
            problems += options.unused("selection", where)
        if first is not None and not setting.privacy.secure:
            problems.append(f"algorithm.secure_from is {first}: needs privacy.trust secure-aggregation")
        if first is not None and first > setting.rounds:
            problems.append(f"algorithm.secure_from is {first}: must be at most rounds, {setting.rounds}")
        return problems

    @staticmethod
    def most_clusters(options: Any) -> int:
        return options.max_clusters if options.clusters == "auto" else options.clusters

    def plan(self, client: ClientEntry) -> list[Slot]:
        """List K full-batch steps, E - 1 rounds of K ceil(N/b) steps, and the window's choices, with one z: lines 1-3.

        A client that is away in round 1 by schedule has no full-batch steps, and rounds in which it is away are left out.
        """
        first = [DPSGDSlot("first", 1.0, self.protocol.local.epochs)] if client.is_there(1) else []
        if self.secure:
            begins, rounds = self.secure_from, self.protocol.rounds
            choices = 0 if self.options.clusters == 1 else client.rounds_there(begins - self.window, begins - 1)
            return [*first, *self.training(client, client.rounds_there(2, begins - 1)),
                    *self.selections(client, choices, self.options.selection.budget_fraction),
                    *self.secure_slots(client, client.rounds_there(begins, rounds))]  # fmt: skip
        there = self.participations_from(client, 2)
        return [*first, *self.training(client, there), *(self.choice_slots(client) if there else [])]

    def choice_slots(self, client: ClientEntry) -> list[Slot]:
        """List the slots of the private choices: line 21.

        The window begins after E_c, which is known only after round 1: the plan holds the most choices for any E_c.

        Args:
            client: The client's roster entry, there in a round after the first.
        """
        if self.options.clusters == 1 or self.earliest >= self.protocol.rounds:
            return []
        ends = range(self.earliest, max(self.earliest, self.protocol.rounds // 2) + 1)  # possible E_c
        most = max(client.rounds_there(e + 1, e + self.window) for e in ends)
        count = max(1, most)  # one choice of a client that misses the window
        return [*self.selections(client, count, self.options.selection.budget_fraction)]

    @classmethod
    def most_synchronous(cls, options: Any, setting: Setting) -> int:
        """Return the largest E_c, at most E / 2 if that is 2 or more, and the window; 1 if there is one cluster."""
        rounds = setting.rounds
        latest = max(first_switch(options), rounds // 2)
        return 1 if options.clusters == 1 else min(rounds, latest + options.selection.window(rounds))

    def start(self, fed: Federation) -> State:
        return State(fed.initial_model()[None], [None] * len(fed.clients))

    def round(self, state: State, t: int, fed: Federation) -> State:
        """Run a round: lines 4-28."""
        if t == 1:
            return self.first_round(state.models[0], fed)
        phase, assignment, means = self.phase(state, t), state.assignment, ModelMeans(state.models, self.weights)
        shown = {name: value for name, value in state.diagnostics.items() if name != "first_round"} | {"phase": phase}
        if phase == "secure":
            return self.secure_step(replace(state, diagnostics=shown), assignment, fed)
        if self.asynchronous is not None and phase in ("frozen", "single"):
            return self.buffered_round(replace(state, diagnostics=shown), t, fed)
        if phase == "soft":
            assignment = self.draw(fed, state.memory["posteriors"])
        if phase == "window":  # lines 19-23
            assignment = self.choices(fed, means, assignment)
        elif phase == "frozen":
            joining = self.joining(t, int(state.memory["soft_until"]))
            assignment = self.choose_on_joining(fed, means, assignment, joining)
        else:  # lines 22-23
            self.stream_each(fed, means, assignment)
        return State(means.moved(), assignment, state.memory, shown)  # lines 24-28

    def first_round(self, theta: np.ndarray, fed: Federation) -> State:
        """Cluster the clients by a spherical mixture on their full-batch updates: lines 5-14."""
        updates = fed.call(self.first_round_update, common={"model": theta}).column("update")  # lines 6-7
        stacked = np.stack([*updates.values()] or [np.zeros_like(theta)])
        fit = self.fit(stacked, [*updates], fed)  # lines 9-11
        uniform = np.full(fit.clusters, 1 / fit.clusters)  # for clients without an answer
        rows = dict(zip(updates, fit.posteriors, strict=False))
        posteriors = np.stack([rows.get(i, uniform) for i in fed.clients])  # pi_1, ..., pi_n
        soft_until = max(self.earliest, int((1 - fit.mpo) * self.protocol.rounds / 2))  # line 12: E_c, section 6.1 (RQ3)
        if self.secure:
            soft_until = self.secure_from - 1 - self.window
        models = np.repeat(theta[None], fit.clusters, axis=0)  # line 13
        if self.options.warm_start:
            pull = fit.posteriors * self.first_weights([*updates])
            weights = pull / np.maximum(pull.sum(axis=0), 1e-12)
            models = models + (weights.T @ stacked).astype(np.float32)
        shown = {"phase": "first", "MSS": float(fit.mss), "uncorrected MSS": float(fit.mss_plain), "MPO": float(fit.mpo)}
        shown |= membership(fit, [*updates])
        arrays = {"clients": np.array([*updates])} | {name: np.asarray(getattr(fit, name)) for name in FIRST_ROUND_ARRAYS}
        memory = {"posteriors": posteriors, "soft_until": soft_until}
        return State(
            models, [int(row.argmax()) for row in posteriors], memory, shown | ({"first_round": arrays} if updates else {})
        )

    def fit(self, updates: np.ndarray, clients: Sequence[int], fed: Federation) -> mixture.MixtureFit:
        """Fit the mixture to the updates of the clients that answered, (n, p) float32: lines 9-11. M is chosen if not set.

        With secure sums no client gets a cluster of one: its sum could not be formed, or would be its update.
        """
        answered = len(clients)
        clusters = None if self.options.clusters == "auto" else self.options.clusters
        if clusters is not None and answered < clusters:
            if set(fed.missing) - set(fed.lost):
                raise RunFailed(f"{answered} clients answered the first round, too few for {clusters} clusters")
            clusters = max(1, answered)  # a crash lost the other answers for ever: fewer clusters let the run continue
        how = self.options.clustering
        return sampled.fit(
            updates, sample=how.sample, clusters=clusters, max_clusters=self.options.max_clusters, space=how.space,
            seed=fed.seed("mixture"), noise_deviation=self.noise_deviations(clients), lone=not self.secure,
        )  # fmt: skip

    def noise_deviations(self, clients: Sequence[int]) -> np.ndarray | None:
        """Compute the standard deviation of the noise in a coordinate of first updates, lr c z sqrt(K) / N, (n,).

        Args:
            clients: Clients of the updates.

        Returns:
            The deviations; None without updates.
        """
        local, roster = self.protocol.local, [self.protocol.client(client) for client in clients]
        step = local.lr * local.clip * math.sqrt(local.epochs)
        return np.array([step * given(e.noise_multiplier) / e.records for e in roster]) if roster else None

    def first_weights(self, clients: Sequence[int]) -> np.ndarray:
        """Return the weights of first updates beside their posteriors: 1, or with `weights: noise` their inverse noise variances.

        Args:
            clients: Clients of the updates.

        Returns:
            The weights, (n, 1) or (1, 1).
        """
        deviations = self.noise_deviations(clients)
        if deviations is None or getattr(self.options, "weights", None) is None:
            return np.ones((1, 1))
        return np.square(deviations.min() / deviations)[:, None]

    @property
    def earliest(self) -> int:
        """Least E_c: without a warm start all models are equal until they are trained in round 2, and a choice would be a coin toss."""
        return first_switch(self.options)

    @property
    def window(self) -> int:
        """Number of rounds with choices: Algorithm 1 prints them in every round after E_c, appendix C.6 has them in E/10 rounds.

        Secure sums begin in a given round, and the window is what fits between E_c and that round.
        """
        window: int = self.options.selection.window(self.protocol.rounds)
        return max(0, min(window, self.secure_from - 1 - self.earliest)) if self.secure else window

    @property
    def secure_from(self) -> int:
        """First round with secure sums: E_c and the window end before it, so that the plan knows both phases."""
        return self.options.secure_from or 2

    def phase(self, state: State, t: int) -> str:
        """Find the phase of a round t > 1: soft to E_c (line 15), then a window of choices (line 18), then frozen clusters."""
        if self.secure and t >= self.secure_from:
            return "secure"
        soft_until = int(state.memory["soft_until"])
        if len(state.models) == 1:
            return "single"
        return "soft" if t <= soft_until else "window" if t <= soft_until + self.window else "frozen"

    def draw(self, fed: Federation, posteriors: np.ndarray) -> Assignment:
        """Draw R(i) = m with probability pi_i[m]: lines 16-17."""
        rng = fed.rng("soft assignment")
        return [int(rng.choice(len(pi), p=pi)) for pi in posteriors]

    @on_client(charges=["first"], takes={"model": MODEL}, gives={"update": EXACT_UPDATE})
    def first_round_update(self, me: Client, model: np.ndarray) -> Release:
        """Run K full-batch noisy steps, which have the least noise per coordinate for given z: line 7, Lemma 4.1."""
        return Release(update=me.dpsgd("first", model) - model)

    def choices(self, fed: Federation, means: ModelMeans, assignment: Assignment) -> Assignment:
        """Let clients choose privately and train from the chosen model: lines 19-23."""
        return self.choose(fed, means, assignment)
