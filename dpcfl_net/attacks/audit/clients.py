"""An audited run whose clients are the canaries: reads what the trusted server published and scores every client."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from dpcfl_net.attacks.audit import scores
from dpcfl_net.attacks.audit.bounds import TradeOff
from dpcfl_net.attacks.audit.gather import LIKELIHOOD, TWO_ROUNDS, Scores
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.job_files import ALL_CLIENTS, Job
from dpcfl_net.federation.base import Arrays
from dpcfl_net.federation.central_dp import CENTRAL_SERVER, published
from dpcfl_net.privacy.client_level import block_norm
from dpcfl_net.privacy.ledger.entries import Entry
from dpcfl_net.privacy.slots import CentralSlot, given
from dpcfl_net.results.epsilon_spent import charges

PUBLISHED = "the published sums"
SUMS = "sums"  # part of a central slot


@dataclass(frozen=True)
class PublishedSum:
    """A noisy sum over a sample of clients, along each canary, in units of the clip norm.

    Attributes:
        round: Round.
        blocks: Sum of each block, (k, m).
        weights: Probability of each block for each canary that is in the sample, (k, m).
        rate: Probability with which a client is in the sample.
        noise: Stated deviation of the noise.
    """

    round: int
    blocks: np.ndarray
    weights: np.ndarray
    rate: float
    noise: float


class ClientRecord:
    """Canaries, ledger of the trusted server, and its releases.

    Args:
        folder: Run folder.
        job: The signed job, with an audit.

    Attributes:
        view: Name of what the scores look at.
    """

    view = PUBLISHED

    def __init__(self, folder: Path, job: Job) -> None:
        assert job.experiment.audit is not None
        self.folder, self.job, self.audit, self.protocol = folder, job, job.experiment.audit, job.protocol
        self.canaries = self.audit.in_model(self.protocol.model.parameters)
        self._ledger = RunFolder(folder).ledger(CENTRAL_SERVER)

    @property
    def epsilon(self) -> float:
        """Claimed epsilon of every client."""
        return self.protocol.privacy.epsilon

    @property
    def opposite(self) -> bool:
        """True if canaries that are out send the opposite update: replace-one adjacency, where one client stands for another."""
        return self.protocol.privacy.adjacency == "replace-one"

    @cached_property
    def bits(self) -> np.ndarray:
        """True for each canary that is in, (m,) bool."""
        return self.canaries.bits(ALL_CLIENTS)

    @property
    def claim(self) -> TradeOff:
        """Trade-off curve of the charges in the trusted server's ledger."""
        events = [event for line in self._charges() for event in line.events]
        return TradeOff.of_adjacency(events, self.protocol.privacy.adjacency)

    @property
    def subject(self) -> str:
        """Sentence on what was audited."""
        count, clients = self.audit.canaries, len(self.protocol.roster)
        out = "send the opposite update" if self.opposite else "send zeros"
        others = f"; the other {clients - count} clients sent zeros" if clients > count else ""
        return (
            f"{count} of {clients} clients were canaries: without data, each sends an update of 4 clip norms in its own direction, and "
            f"those that are out {out}{others}. {int(self.bits.sum())} are in. The accuracy of this run is meaningless."
        )

    @property
    def remarks(self) -> list[str]:
        """More sentences."""
        said = list(self._observed)
        if self.job.experiment.noise is not None:
            said.append(
                "All noise is derived from the noise seed in the experiment: anyone who has the seed can subtract it. This audit does not."
            )
        return said

    @property
    def _observed(self) -> list[str]:
        """Sentences on what the scores look at."""
        return [
            "A client is audited by what the trusted server published: the noisy sums of the clients' clipped updates over secret samples."
        ]

    def sums(self) -> Iterator[PublishedSum]:
        """Read every published sum.

        Yields:
            The sums in the order of rounds.

        Raises:
            ConfigError: If a release is not one that the ledger was charged for.
        """
        plan = {slot.name: slot for slot in self.job.algorithm.central_plan()}
        charged = {(line.round, line.kind): [plan[name] for name in line.slots] for line in self._charges()}
        for number, kind, release in published(self._ledger):
            if (number, kind) not in charged:
                raise ConfigError(f"the trusted server's ledger has no charge for its release of round {number}, {kind}")
            samples = [slot for slot in charged[number, kind] if isinstance(slot, CentralSlot)]
            blocks = self._blocks(release)
            if samples and blocks is not None:
                slot, weights = samples[0], self._weights(release, len(blocks))
                rate = slot.sample_size / slot.population
                yield PublishedSum(number, blocks, weights, rate, self._noise(slot, release))

    @cached_property
    def scores(self) -> list[Scores]:
        """The likelihood, and unless canaries that are out send the opposite update, the difference of two rounds."""
        found = _Sums(self.audit.canaries)
        for each in self.sums():
            found.add(each, opposite=self.opposite)
        if not found.rounds:
            return []
        # The squares of canaries that are out hold their opposite updates, too: they only grow, so that the test of noise stays valid.
        totals = None if self.opposite else found.plain / math.sqrt(found.variance)
        counted = totals, found.squares, np.full(self.audit.canaries, found.count)
        likelihood = Scores(self.view, LIKELIHOOD, found.likelihood, self.bits, *counted)
        if self.opposite:
            return [likelihood]
        return [likelihood, Scores(self.view, TWO_ROUNDS, found.differences, self.bits)]

    def _charges(self) -> list[Entry]:
        return charges(self._ledger, self.protocol)

    def _blocks(self, release: Arrays) -> np.ndarray | None:
        """Sums along the canaries, (k, m), of the only tensor of a release whose rows are models; None without one."""
        p = self.protocol.model.parameters
        models = [
            array for array in release.values() if array.dtype.kind == "f" and array.ndim in (1, 2) and array.shape[-1] == p
        ]
        if len(models) != 1:
            return None
        return np.stack([self.canaries.project(row) for row in np.atleast_2d(models[0])]) / self.protocol.local.clip

    def _weights(self, release: Arrays, blocks: int) -> np.ndarray:
        """Probability of each block: its share of released labels, or the cluster that a canary names if only counts are released."""
        m = self.audit.canaries
        if "slots" in release:
            shares = np.bincount(release["slots"], minlength=blocks) / max(1, len(release["slots"]))
            return np.repeat(shares[:, None], m, axis=1)
        if "counts" in release:
            return (np.arange(m) % blocks == np.arange(blocks)[:, None]).astype(np.float64)
        return np.full((blocks, m), 1 / blocks)

    def _noise(self, slot: CentralSlot, release: Arrays) -> float:
        norm = block_norm(1.0) if "counts" in release else 1.0
        return (
            slot.part_noise(given(self.protocol.curator_noise_multiplier), SUMS) * norm * (2 if slot.sampling == "fixed" else 1)
        )


class _Sums:
    """Running sums over the rounds, (m,) each."""

    def __init__(self, canaries: int) -> None:
        self.likelihood, self.differences, self.plain, self.squares = np.zeros((4, canaries))
        self.variance, self.count, self.rounds = 0.0, 0, 0
        self._before: PublishedSum | None = None

    def add(self, each: PublishedSum, *, opposite: bool) -> None:
        """Add one published sum."""
        self.likelihood += scores.of_clients(each.blocks, each.weights, each.rate, opposite=opposite)
        self.plain += each.blocks.sum(0)
        self.squares += (each.blocks**2).sum(0) / each.noise**2
        self.variance += len(each.blocks) * each.noise**2
        self.count += len(each.blocks)
        self.rounds += 1
        before, self._before = self._before, each
        if before is not None and before.rate == each.rate and before.blocks.shape == each.blocks.shape:
            now, then = (one.blocks.sum(0)[None] for one in (each, before))
            self.differences += scores.round_differences(now, then, 1, each.rate)
            self._before = None  # each round is in one difference only
