"""FedDP-KMeans as initialiser of clusters: private k-means of all records, then clients by their noisy counts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms import base
from dpcfl_net.algorithms.base import on_client
from dpcfl_net.algorithms.shared_steps import FromModel, too_many_clusters
from dpcfl_net.core.errors import ConfigError, RunFailed
from dpcfl_net.core.protocol import Protocol
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.signed_settings import ModelTemplate
from dpcfl_net.core.types import Assignment, Release, State, TensorSpec
from dpcfl_net.federation.aggregation import ModelMeans
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.federation.client import Client
from dpcfl_net.privacy.slots import GaussianSlot, Slot, given

POINTS = 300  # synthetic server-side points
MOST_SIDES = 1_024  # of a record: second moments have d (d + 1) / 2 numbers
STEPS = ("moments", "weights", "centres", "lloyd")
WITHOUT_CLIENTS = "the mean of a cluster is over its clients that answered; a cluster without an answer keeps its model"
WITHOUT_SUMS = "sums are over the clients that answered; a client without an answer in the last round of k-means is in the largest cluster; "
CENTRES = TensorSpec("f4", ("centres", "record"))
COUNTED, TALLIED = 1.0, math.sqrt(2)  # norm of what a record adds: x x^T or a 1, or the record and a 1


def noisy_sum(side: str, bound: float) -> TensorSpec:
    """Describe the noisy sum of a step: no client can move the sum over all clients by more than an honest one could.

    Args:
        side: Name of its side.
        bound: Norm of what a record adds.
    """

    def max_norm(algorithm: Any, client: ClientEntry) -> float:
        size = algorithm.capabilities.sides[side](algorithm.protocol.model)
        return base.noisy_sum_norm(client, ratio=algorithm.options.noise_ratio, bound=bound, size=size)

    return TensorSpec("f4", (side,), max_norm=max_norm, update=False)


MOMENT, WEIGHT, TALLY = noisy_sum("moment", COUNTED), noisy_sum("point", COUNTED), noisy_sum("tally", TALLIED)


class FedDPKMeans(FromModel):
    """Four rounds of private k-means over all clients' records; then cluster models are trained in frozen clusters.

    1. moments: sum of x x^T; the server takes its first k eigenvectors. 2. weights: how many records have each server-side point
    as their nearest in this subspace; weighted k-means of the points gives centres. 3. centres: sum and number of the records of
    each centre, nearest in the subspace, which takes the centres back to the space of records. 4. lloyd: the same, nearest in the
    whole space: one Lloyd step. The sums are released by each client with noise.

    Source: Scott, Lampert, Saulpic, "Differentially private federated k-means clustering with server-side data", ICML 2025, for
    steps 1 to 4, after its abstract and its authors' published code. Differences:

    - The paper's server has public data. The server here has none: its points are drawn from a Gaussian with the released
      second moment. So the paper's bounds, which are about server-side data near each cluster, do not apply.
    - The paper's server receives one noisy sum (secure aggregation or a trusted server). Here each client adds all the noise.
    - The paper clips records; here they are scaled to norm 1. All sums have Gaussian noise; counts do not have Laplace noise.
    - The paper clusters records. That a client's cluster follows from the noisy counts of its records (k-means of the shares of
      the centres, step 4) and that models are trained in it is added here. With one cluster there is nothing to find: no sum is
      released or paid for, and training begins in round 1.
    """

    name = "feddp-kmeans"
    paper = "Scott, Lampert, Saulpic, ICML 2025 (initialisation, without server-side data)"

    class Options(base.Options):
        clusters: int = Field(ge=1, le=64, examples=[4], description="M: number of clusters of clients")
        centres: int = Field(default=10, ge=2, le=64, description="k: number of centres of records")
        noise_ratio: float = Field(
            default=4.0, ge=1e-3, le=1e6, description="noise multiplier of a sum divided by that of training (z)"
        )

    def __init__(self, protocol: Protocol) -> None:
        super().__init__(protocol)
        if k_means_rounds(self.options) and (sides := record_size(protocol.model)) > MOST_SIDES:
            raise ConfigError(f"algorithm.name is feddp-kmeans, and a record has {sides} values: must be at most {MOST_SIDES}")

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        k, found = options.centres, k_means_rounds(options)
        able, trained = super().capabilities_for(options, setting), max(0, setting.rounds - found)
        if not found:
            return replace(able, without_clients=WITHOUT_CLIENTS, summed_rounds=trained)
        return replace(
            able, published_models=options.clusters, without_clients=WITHOUT_SUMS + WITHOUT_CLIENTS,
            expected_releases=float(setting.clients * trained), summed_rounds=trained,
            covers=("model updates", "second moments, sums and counts of records"),
            sides={
                "record": record_size, "moment": lambda model: record_size(model) * (record_size(model) + 1) // 2,
                "point": lambda model: POINTS, "centres": lambda model: k, "axes": lambda model: min(k, record_size(model)),
                "tally": lambda model: k * (record_size(model) + 1),
            },
        )  # fmt: skip

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        problems = too_many_clusters(options.clusters, setting.clients)
        if not k_means_rounds(options):
            return problems + options.unused("centres", "clusters 1") + options.unused("noise_ratio", "clusters 1")
        if setting.rounds <= len(STEPS):
            problems.append(
                f"rounds is {setting.rounds}: must be at least {len(STEPS) + 1}, the first {len(STEPS)} are of k-means"
            )
        return problems

    def plan(self, client: ClientEntry) -> list[Slot]:
        found = k_means_rounds(self.options)
        sums: list[Slot] = [
            GaussianSlot(name, self.options.noise_ratio) for t, name in enumerate(STEPS[:found], 1) if client.is_there(t)
        ]
        return [*sums, *self.training(client, client.rounds_there(found + 1, self.protocol.rounds))]

    def start(self, fed: Federation) -> State:
        return State(fed.initial_model()[None], [0] * len(fed.clients))

    def round(self, state: State, t: int, fed: Federation) -> State:
        found = k_means_rounds(self.options)
        if t <= found:
            if t == 1:
                return self.first_axes(state, fed)
            return self.projected_centres(state, fed) if t == 2 else self.full_centres(state, t, fed)
        means = ModelMeans(state.models)
        self.stream_each(fed, means, state.assignment)
        return replace(state, models=means.moved(), diagnostics={"phase": "frozen" if found else "single"})

    # ---- server half

    def first_axes(self, state: State, fed: Federation) -> State:
        """Take the first k eigenvectors of the summed second moment, and draw points with this moment in their subspace."""
        released = fed.call(self.moments, common={}).column("moment")
        if not released:
            raise RunFailed("no client answered the first round: k-means has no second moment")
        sides = record_size(self.protocol.model)
        whole = symmetric(np.stack([*released.values()]).astype(np.float64).sum(axis=0), sides)
        values, vectors = np.linalg.eigh(whole)
        axes = vectors[:, ::-1][:, : min(self.options.centres, sides)].T  # (k, d)
        records = sum(self.protocol.client(i).records for i in released)
        spread = np.sqrt(np.maximum(values[::-1][: len(axes)], 0) / records)
        points = fed.rng("server points").standard_normal((POINTS, len(axes))) * spread
        points /= np.maximum(1, np.linalg.norm(points, axis=1, keepdims=True))  # projections of vectors of norm 1
        memory = {"axes": axes.astype(np.float32), "points": points.astype(np.float32)}
        return replace(state, memory=memory, diagnostics={"phase": "k-means"})

    def projected_centres(self, state: State, fed: Federation) -> State:
        """Weigh the points by the records near them, and cluster them by weighted k-means."""
        from sklearn.cluster import KMeans

        axes, points = state.memory["axes"], state.memory["points"]
        counts = fed.call(self.weights, common={"axes": axes, "points": points}).column("weight")
        total = np.stack([*counts.values()]).astype(np.float64).sum(axis=0) if counts else np.ones(POINTS)
        kept = total > self.noise_level(counts, COUNTED)  # a weight that noise explains is dropped
        if kept.sum() < self.options.centres:
            kept = total >= np.sort(total)[-self.options.centres]
        found = KMeans(self.options.centres, n_init=10, random_state=fed.seed("k-means"))
        found.fit(points[kept].astype(np.float64), sample_weight=np.maximum(total[kept], 1e-9))
        centres = found.cluster_centers_ @ axes  # in the space of records, within the subspace
        return replace(state, memory={"centres": centres.astype(np.float32), "axes": axes})

    def full_centres(self, state: State, t: int, fed: Federation) -> State:
        """Move the centres to the means of their records, and after the last step assign clients by their counts."""
        k = self.options.centres
        centres, axes = state.memory["centres"], state.memory["axes"]
        step = self.centres if t < len(STEPS) else self.lloyd
        given_tensors = {"centres": centres, "axes": axes} if t < len(STEPS) else {"centres": centres}
        tallies = fed.call(step, common=given_tensors).column("tally")
        if not tallies:
            raise RunFailed(f"no client answered round {t}: k-means has no counts")
        each = {i: tally.astype(np.float64).reshape(k, -1) for i, tally in tallies.items()}
        whole = np.sum([*each.values()], axis=0)
        counted = whole[:, -1] > self.noise_level(tallies, TALLIED)
        means = whole[:, :-1] / np.maximum(whole[:, -1:], 1.0)
        moved = np.where(counted[:, None], means, centres).astype(np.float32)
        if t < len(STEPS):
            return replace(state, memory={"centres": moved, "axes": axes})
        assignment = self.assigned({i: tally[:, -1] for i, tally in each.items()}, fed)
        models = np.repeat(state.models, self.options.clusters, axis=0)
        shown = {"phase": "k-means", "clusters": self.options.clusters}
        return State(models, assignment, {"centres": moved}, shown)

    def assigned(self, counts: dict[int, np.ndarray], fed: Federation) -> Assignment:
        """Cluster clients by k-means of the shares of their records at each centre."""
        from sklearn.cluster import KMeans

        shares = np.stack([np.maximum(own, 0) / max(float(np.maximum(own, 0).sum()), 1.0) for own in counts.values()])
        clusters = min(self.options.clusters, len(shares))
        labels = KMeans(clusters, n_init=10, random_state=fed.seed("clients")).fit_predict(shares)
        found = {i: int(label) for i, label in zip(counts, labels, strict=True)}
        largest = int(np.bincount(labels).argmax())
        return [found.get(i, largest) for i in fed.clients]

    def noise_level(self, answered: Iterable[int], norm: float) -> float:
        """Compute two deviations of the noise in a sum of counts: a count below may be noise.

        Args:
            answered: Clients of the sum.
            norm: Norm of what a record adds to the release that holds the counts; its noise is scaled to it.
        """
        noise = [given(self.protocol.client(i).noise_multiplier) for i in answered]
        return 2 * self.options.noise_ratio * norm * math.hypot(*noise)

    # ---- client half

    @on_client(charges=["moments"], takes={}, gives={"moment": MOMENT})
    def moments(self, me: Client) -> Release:
        """Release the noisy sum of x x^T: its upper triangle, so scaled that its norm is that of the matrix."""
        rows, columns = np.triu_indices(record_size(self.protocol.model))
        scale = np.where(rows == columns, 1.0, math.sqrt(2))
        return Release(moment=me.noisy_sum("moments", lambda x: unit(x)[:, rows] * unit(x)[:, columns] * scale, COUNTED))

    @on_client(
        charges=["weights"],
        takes={"axes": TensorSpec("f4", ("axes", "record")), "points": TensorSpec("f4", ("point", "axes"))},
        gives={"weight": WEIGHT},
    )
    def weights(self, me: Client, axes: np.ndarray, points: np.ndarray) -> Release:
        """Release the noisy number of records whose nearest point, in the subspace, is each point."""
        return Release(weight=me.noisy_sum("weights", lambda x: np.eye(POINTS)[nearest(unit(x) @ axes.T, points)], COUNTED))

    @on_client(
        charges=["centres"], takes={"centres": CENTRES, "axes": TensorSpec("f4", ("axes", "record"))}, gives={"tally": TALLY}
    )
    def centres(self, me: Client, centres: np.ndarray, axes: np.ndarray) -> Release:
        """Release noisy sum and number of the records of each centre, nearest in the subspace."""
        found = me.noisy_sum("centres", lambda x: tally(unit(x), nearest(unit(x) @ axes.T, centres @ axes.T), centres), TALLIED)
        return Release(tally=found)

    @on_client(charges=["lloyd"], takes={"centres": CENTRES}, gives={"tally": TALLY})
    def lloyd(self, me: Client, centres: np.ndarray) -> Release:
        """Release noisy sum and number of the records of each centre, nearest in the whole space."""
        found = me.noisy_sum("lloyd", lambda x: tally(unit(x), nearest(unit(x), centres), centres), TALLIED)
        return Release(tally=found)


def k_means_rounds(options: Any) -> int:
    """Return the number of rounds of k-means, which come first; none if there is one cluster."""
    return 0 if options.clusters == 1 else len(STEPS)


def record_size(model: ModelTemplate) -> int:
    """Return the number of values of a record, d.

    Args:
        model: Model template of the job.
    """
    return math.prod(model.input_shape)


def unit(x: np.ndarray) -> np.ndarray:
    """Scale rows to norm 1; zero rows stay.

    Args:
        x: (b, d).
    """
    scaled: np.ndarray = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    return scaled


def nearest(x: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Find the nearest point of each row.

    Args:
        x: (b, d).
        points: (m, d).

    Returns:
        Indices, (b,).
    """
    found: np.ndarray = ((points**2).sum(axis=1) - 2 * x @ points.T).argmin(axis=1)
    return found


def tally(x: np.ndarray, chosen: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Put each record and a 1 into the place of its centre.

    Args:
        x: (b, d), rows of norm at most 1.
        chosen: Centre of each row, (b,).
        centres: (k, d).

    Returns:
        (b, k (d + 1)), rows of norm at most sqrt(2).
    """
    rows = np.zeros((len(x), len(centres), x.shape[1] + 1))
    rows[np.arange(len(x)), chosen] = np.append(x, np.ones((len(x), 1)), axis=1)
    return rows.reshape(len(x), -1)


def symmetric(upper: np.ndarray, sides: int) -> np.ndarray:
    """Build the matrix of a scaled upper triangle.

    Args:
        upper: (d (d + 1) / 2,), off the diagonal times sqrt(2).
        sides: d.
    """
    found = np.zeros((sides, sides))
    rows, columns = np.triu_indices(sides)
    found[rows, columns] = upper / np.where(rows == columns, 2.0, math.sqrt(2))
    return found + found.T
