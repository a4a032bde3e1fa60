"""Options of RR-Cluster, and checks of their combinations."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dpcfl_net.algorithms.client_level import Sampled, sampling_of
from dpcfl_net.algorithms.shared_steps import too_many_clusters
from dpcfl_net.federation.capabilities import Setting


class RROptions(Sampled):
    """Options of RR-Cluster."""

    earlier_names = {"least": "min_cluster_size"}
    added = ("labels", "labels_every", "labels_epsilon", "labels_loss_range")
    base: Literal["ifca", "fesem", "fedcam", "oracle"] = Field(
        default="ifca", description="base method, by which clients choose their cluster; oracle: the true clusters, public"
    )
    clusters: int = Field(default=4, ge=1, le=64, description="k: number of clusters")
    min_cluster_size: int = Field(
        default=8,
        ge=0,
        description="B: minimum number of updates in a cluster; 0: the base method without rebalancing (earlier name: least)",
    )
    guarantee: Literal["labels-first", "expected", "paper"] = Field(
        default="labels-first", description="order of the releases, which decides the claim that holds"
    )
    label_clip: float = Field(
        default=0.1,
        ge=1e-9,
        le=1,
        description="C_s: norm of a one-hot label before noise, which is proportional to it: any C_s gives the same labels",
    )
    labels_share: float = Field(
        default=0.3, gt=0, lt=1, description="fraction of a round's 1 / z^2 for gaussian labels, where they are released"
    )
    labels: Literal["gaussian", "randomised-response", "exponential"] = Field(
        default="gaussian",
        description="mechanism of the labels: gaussian, of each round's sample; randomised-response, of each round's sample, or of all "
        "clients every labels_every rounds; exponential, of all clients every labels_every rounds",
    )
    labels_every: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="r: labels of all clients are released in rounds 1, r + 1, 2 r + 1, ... (from r + 1 under `expected`) and stay public; "
        "0: labels of each round's sample",
    )
    labels_epsilon: float = Field(
        default=1.0,
        gt=0,
        le=100,
        description="pure epsilon of one release of a client's label by randomised-response or exponential",
    )
    labels_loss_range: float = Field(
        default=1.0,
        gt=0,
        le=1e6,
        description="exponential only: loss (base fesem: squared distance) above a client's smallest one at which scores are clipped",
    )

    @property
    def known_clusters(self) -> str:
        """The setting with which the cluster of every client is public from the start; empty if clients name it."""
        if self.base == "oracle":
            return "base oracle"
        return "clusters 1" if self.clusters == 1 else ""

    @property
    def labels_are_public(self) -> bool:
        """True if the rounds use public labels."""
        return bool(self.labels_every or self.known_clusters)

    @property
    def without_noisy_labels(self) -> str:
        """The setting with which no labels are released by Gaussian noise; empty if they are."""
        if self.known_clusters:
            return self.known_clusters
        if self.guarantee == "expected":
            return "guarantee expected"
        return "" if self.labels == "gaussian" else f"labels {self.labels}"


def option_problems(options: RROptions, setting: Setting) -> list[str]:
    """List the problems of the options of RR-Cluster, besides those of sampling.

    Args:
        options: Validated options.
        setting: Public facts of the run.

    Returns:
        As `Algorithm.problems`.
    """
    problems = _label_problems(options, setting) + too_many_clusters(options.clusters, setting.clients)
    per_round, needed = options.sampling_rate * setting.clients, options.clusters * options.min_cluster_size
    if options.known_clusters == "clusters 1":
        problems += options.unused("min_cluster_size", "clusters 1")
    elif not options.known_clusters and needed > per_round + 1e-9:
        problems.append(
            f"algorithm.min_cluster_size is {options.min_cluster_size}: {options.clusters} clusters of that size need {needed} clients "
            f"a round, but sampling_rate {options.sampling_rate:g} of {setting.clients} clients draws {per_round:g}"
        )
    sampling = sampling_of(options.sampling, setting.privacy.adjacency)
    if options.guarantee == "expected" and sampling == "fixed":
        problems.append("algorithm.guarantee is 'expected': needs Poisson sampling: set privacy.adjacency to zero-out")
    if options.guarantee != "expected" and sampling == "poisson":
        why = "the number of labels reveals whether a client took part"
        problems.append(
            f"algorithm.guarantee is {options.guarantee!r}: needs privacy.adjacency replace-one and sampling fixed, since {why}"
        )
    if options.guarantee == "paper" and setting.privacy.accountant != "rdp":
        problems.append(
            "algorithm.guarantee is 'paper': needs privacy.accountant rdp, with which the published claim is computed"
        )
    return problems


def _label_problems(options: RROptions, setting: Setting) -> list[str]:
    """List the problems of the options on labels."""
    every, mechanism = options.labels_every, options.labels
    problems: list[str] = []
    if every and setting.privacy.secure:
        why = "clients would send their losses as they are to a server that is not trusted"
        problems.append(f"algorithm.labels_every is {every}: must be 0 with privacy.trust secure-aggregation, since {why}")
    if mechanism == "gaussian" and every:
        problems.append(
            f"algorithm.labels_every is {every}: must be 0 with labels gaussian; labels of all clients need randomised-response or "
            "exponential"
        )
    if mechanism == "gaussian":
        problems += options.unused("labels_epsilon", "labels gaussian")
    if mechanism != "exponential":
        problems += options.unused("labels_loss_range", f"labels {mechanism}")
    if where := options.without_noisy_labels:
        problems += options.unused("labels_share", where) + options.unused("label_clip", where)
    if mechanism == "exponential" and not every:
        problems.append(f"algorithm.labels is {mechanism!r}: needs labels_every of 1 or more")
    if mechanism == "randomised-response" and not every:
        problems += _sample_problems(options, setting)
    if mechanism != "gaussian" and options.clusters < 2:
        problems.append(f"algorithm.clusters is {options.clusters}: must be 2 or more with labels {mechanism}")
    if every and options.guarantee == "paper":
        problems.append("algorithm.guarantee is 'paper': must be labels-first or expected with labels_every")
    if every and options.guarantee == "expected" and every >= setting.rounds:
        problems.append(
            f"algorithm.labels_every is {every}: must be below rounds {setting.rounds} with guarantee expected, whose first labels "
            "come after so many rounds"
        )
    if options.known_clusters and options.guarantee == "paper":
        problems.append(f"algorithm.guarantee is 'paper': must be labels-first or expected with {options.known_clusters}")
    if options.base == "oracle":
        problems += _oracle_problems(options, setting)
    return problems


def _sample_problems(options: RROptions, setting: Setting) -> list[str]:
    """List the problems of randomised response on the sample of each round."""
    problems = []
    if options.guarantee != "labels-first":
        problems.append(
            f"algorithm.guarantee is {options.guarantee!r}: must be labels-first with labels randomised-response and labels_every 0, "
            "which release the labels of each round's sample"
        )
    if setting.privacy.accountant != "pld":
        problems.append(
            f"privacy.accountant is {setting.privacy.accountant!r}: must be pld with labels randomised-response and labels_every 0, "
            "whose labels and sums of one sample it counts together"
        )
    if options.base == "oracle":
        problems.append("algorithm.labels is 'randomised-response': must be gaussian with base oracle, whose labels are public")
    return problems


def _oracle_problems(options: RROptions, setting: Setting) -> list[str]:
    """List the problems of the options with base oracle."""
    problems = []
    if options.labels_every:
        problems.append(
            f"algorithm.labels_every is {options.labels_every}: must be 0 with base oracle, whose labels are public"
        )
    if options.min_cluster_size:
        problems.append(
            f"algorithm.min_cluster_size is {options.min_cluster_size}: must be 0 with base oracle, which moves no client"
        )
    if setting.privacy.secure:
        problems.append("algorithm.base is 'oracle': needs privacy.trust trusted-server")
    return problems
