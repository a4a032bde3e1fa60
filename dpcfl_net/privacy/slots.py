"""Slots of a plan: the allowed releases of a client or a trusted server over a run, each with its event."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from dpcfl_net.core.types import Adjacency
from dpcfl_net.privacy.events.allocated_gaussian import AllocatedGaussian
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.events.bounded_range_selection import BoundedRangeSelection
from dpcfl_net.privacy.events.data_free import DataFree
from dpcfl_net.privacy.events.fixed_size_gaussian import FixedSizeGaussian
from dpcfl_net.privacy.events.labelled_fixed_size_gaussian import LabelledFixedSizeGaussian
from dpcfl_net.privacy.events.randomised_response import RandomisedResponse
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.privacy.events.unprotected import Unprotected

RAW = "raw to a trusted server: it sees this release as it is"


def given(noise_multiplier: float | None) -> float:
    """Return the noise multiplier of a plan that needs one.

    Raises:
        ValueError: If the job has none.
    """
    if noise_multiplier is None:
        raise ValueError("the plan holds releases with noise, and the job has no noise multiplier for it")
    return noise_multiplier


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError for another value; a misspelt one would be taken for the default."""
    if value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}")


@dataclass(frozen=True)
class Slot(ABC):
    """One release, or the releases of one task, in a plan.

    Attributes:
        name: Name in plans and ledgers; slots of one name in a plan are equal.
        units: Values of `privacy.unit` for which the event is the cost of the release.
    """

    units: ClassVar[tuple[str, ...]] = ("sample", "client")
    name: str

    @abstractmethod
    def event(self, noise_multiplier: float | None, adjacency: Adjacency = "zero-out") -> Event:
        """Build the event that the slot costs.

        Args:
            noise_multiplier: The plan's noise multiplier z; None if the job has none.
            adjacency: "zero-out" or "replace-one".

        Returns:
            The event for accountant and ledger.

        Raises:
            ValueError: If the slot needs a noise multiplier and there is none.
        """


@dataclass(frozen=True)
class DPSGDSlot(Slot):
    """DP-SGD of one task.

    Attributes:
        rate: Probability that a given record is in a batch; 1 takes every record.
        steps: Number of steps.
        sampling: "poisson", each record in each batch independently; "allocation", each record in one of the 1 / rate batches of
            an epoch, independently of the others.

    Raises:
        ValueError: If the sampling has another name, or the steps of an allocation are not whole epochs of 1 / rate batches.
    """

    units = ("sample",)
    rate: float
    steps: int
    sampling: Literal["poisson", "allocation"] = "poisson"

    def __post_init__(self) -> None:
        _check_choice("sampling", self.sampling, ("poisson", "allocation"))
        if self.sampling == "allocation" and (not math.isclose(self.rate * self.batches, 1.0) or self.steps % self.batches):
            raise ValueError(f"steps must be whole epochs of 1 / rate batches, got {self.steps!r} steps at rate {self.rate!r}")

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return max(1, round(1 / self.rate))

    def event(self, noise_multiplier: float | None, adjacency: Adjacency = "zero-out") -> Event:
        """See `Slot`; the accountant doubles the sensitivity under replace-one."""
        return self.ran(given(noise_multiplier), self.steps)

    def ran(self, noise_multiplier: float, steps: int) -> Event:
        """Build the event of some of the steps.

        Args:
            noise_multiplier: z.
            steps: Number of steps that ran. An epoch of an allocation counts as a whole from its first step on.

        Returns:
            The event.
        """
        if self.sampling == "allocation" and self.batches > 1:
            return AllocatedGaussian(noise_multiplier, self.batches, -(-steps // self.batches))
        return SampledGaussian(noise_multiplier, self.rate, steps)


@dataclass(frozen=True)
class GaussianSlot(Slot):
    """One Gaussian release over all data of a client.

    Attributes:
        ratio: The noise multiplier of this release over the plan's z, relative to the sensitivity under zero-out.
        doubles: True if the replace-one sensitivity is twice the zero-out sensitivity, as for a vector of bounded norm; False
            if both are equal, as for a number between 0 and a bound.
    """

    ratio: float = 1.0
    doubles: bool = True

    def event(self, noise_multiplier: float | None, adjacency: Adjacency = "zero-out") -> Event:
        """See `Slot`. Under replace-one the accountant doubles every sensitivity; an unchanged one gets doubled noise."""
        factor = 2 if adjacency == "replace-one" and not self.doubles else 1
        return SampledGaussian(factor * self.ratio * given(noise_multiplier), 1.0, 1)


@dataclass(frozen=True)
class SelectionSlot(Slot):
    """One selection by the exponential mechanism, P(m) proportional to exp(eta * count_m).

    Attributes:
        eta: Weight of one record in the log-probability; counts are of the client's own records.
    """

    units = ("sample",)
    eta: float

    def event(self, noise_multiplier: float | None, adjacency: Adjacency = "zero-out") -> Event:
        """See `Slot`. Zero-out moves every count by 0 or +1 together (range eta), replace-one by -1..+1 (range 2 eta)."""
        return BoundedRangeSelection(self.eta if adjacency == "zero-out" else 2 * self.eta, 1)


@dataclass(frozen=True)
class UnprotectedSlot(Slot):
    """One release without a guarantee, as a paper publishes it; a plan that holds one has epsilon = inf.

    Attributes:
        reason: Why it has no guarantee.
    """

    reason: str

    def event(self, noise_multiplier: float | None, adjacency: Adjacency = "zero-out") -> Event:
        """See `Slot`; independent of the noise."""
        return Unprotected(self.reason)


@dataclass(frozen=True)
class RawSlot(Slot):
    """One raw release to a server that is trusted to add the noise; nothing protects it against that server."""

    def event(self, noise_multiplier: float | None, adjacency: Adjacency = "zero-out") -> Event:
        """See `Slot`; independent of the noise. The server's ledger holds the cost of the run."""
        return Unprotected(RAW)


@dataclass(frozen=True)
class StageSlot(Slot):
    """One message that the client computes without its records; it costs nothing, and the gate answers it once."""

    def event(self, noise_multiplier: float | None, adjacency: Adjacency = "zero-out") -> Event:
        """See `Slot`; independent of the noise."""
        return DataFree()


@dataclass(frozen=True)
class SecureSlot(Slot):
    """One masked vector of a secure sum; the honest participants' shares of the noise protect the sum, see `secure_sum`.

    Attributes:
        rate: Probability that the protected unit is in the sum: Poisson sampling rate of records, or of clients with secret
            coins; 1 if participation is visible.
    """

    rate: float

    def event(self, noise_multiplier: float | None, adjacency: Adjacency = "zero-out") -> Event:
        """See `Slot`; z is the deviation of the honest participants' noise over the sensitivity of the sum."""
        return SampledGaussian(given(noise_multiplier), self.rate, 1)


@dataclass(frozen=True)
class CentralSlot(Slot):
    """Releases of a trusted server in one round, over a fresh sample of clients.

    Attributes:
        sampling: "poisson", each client independently with probability sample_size / population; "fixed", exactly
            sample_size of population without replacement.
        sample_size: Clients of a sample (expected number under "poisson").
        population: Number of clients.
        parts: (name, share): the share of 1 / z^2 of each release of the round.

    Raises:
        ValueError: If the sampling has another name, or the shares are not positive or do not add up to 1.
    """

    units = ("client",)
    sampling: Literal["poisson", "fixed"]
    sample_size: float
    population: int
    parts: tuple[tuple[str, float], ...] = (("sums", 1.0),)

    def __post_init__(self) -> None:
        _check_choice("sampling", self.sampling, ("poisson", "fixed"))
        shares = [share for _, share in self.parts]
        if not all(share > 0 for share in shares) or not math.isclose(sum(shares), 1.0):
            raise ValueError(f"parts must have positive shares that add up to 1, got {self.parts!r}")

    def event(self, noise_multiplier: float | None, adjacency: Adjacency = "zero-out") -> Event:
        """See `Slot`; all parts together. z is noise over the sensitivity under add/remove (Poisson) or replace-one (fixed)."""
        if self.sampling == "fixed":
            return FixedSizeGaussian(given(noise_multiplier), int(self.sample_size), self.population, 1)
        return SampledGaussian(given(noise_multiplier), self.sample_size / self.population, 1)

    def part_noise(self, noise_multiplier: float, part: str) -> float:
        """Compute the noise multiplier of one part, relative to that part's own sensitivity.

        Args:
            noise_multiplier: The round's noise multiplier z.
            part: Name of the part.

        Returns:
            z / sqrt(share of the part).

        Raises:
            KeyError: If there is no such part.
        """
        return noise_multiplier / math.sqrt(dict(self.parts)[part])


@dataclass(frozen=True)
class LabelledCentralSlot(CentralSlot):
    """A round of a trusted server that releases a label of each sampled client by randomised response, then noisy sums.

    Attributes:
        label_epsilon: Pure epsilon of one label.
        categories: Number of labels.

    Raises:
        ValueError: If the sample is not of fixed size: the number of labels of a Poisson sample reveals whether a client took part.
    """

    label_epsilon: float = 0.0
    categories: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampling != "fixed":
            raise ValueError(f"sampling must be 'fixed' for labels of a sample, got {self.sampling!r}")

    def event(self, noise_multiplier: float | None, adjacency: Adjacency = "zero-out") -> Event:
        """See `Slot`; labels and sums together. z is noise over the sensitivity of the sums under replace-one."""
        size, z = int(self.sample_size), given(noise_multiplier)
        return LabelledFixedSizeGaussian(z, self.label_epsilon, self.categories, size, self.population, 1)


@dataclass(frozen=True)
class LabelSlot(Slot):
    """One release of a private label of every client by a trusted server.

    Attributes:
        mechanism: "randomised-response" or "exponential".
        epsilon: Pure epsilon of the release. Under "exponential" the scores of a client lie in an interval of length 1, so that
            two clients' scores differ by -1 to 1, and log-probabilities are epsilon / 2 times the scores: their ratios range
            over at most epsilon.
        categories: Number of labels.

    Raises:
        ValueError: If the mechanism has another name.
    """

    units = ("client",)
    mechanism: Literal["randomised-response", "exponential"]
    epsilon: float
    categories: int

    def __post_init__(self) -> None:
        _check_choice("mechanism", self.mechanism, ("randomised-response", "exponential"))

    def event(self, noise_multiplier: float | None, adjacency: Adjacency = "zero-out") -> Event:
        """See `Slot`; independent of the noise and of the adjacency.

        Under zero-out the label is drawn uniformly, which changes no probability by a larger factor than another label does.
        """
        if self.mechanism == "exponential":
            return BoundedRangeSelection(self.epsilon, 1)
        return RandomisedResponse(self.epsilon, self.categories, 1)


@dataclass(frozen=True)
class ParticipationSlot(Slot):
    """One participation of a client in a noisy sum of a trusted server, charged to this client alone.

    In a central plan it stands for a slot of each client (`for_clients`). z is noise over the clip norm, and there is no sample.
    """

    units = ("client",)

    def event(self, noise_multiplier: float | None, adjacency: Adjacency = "zero-out") -> Event:
        """See `Slot`; the accountant doubles the sensitivity under replace-one."""
        return SampledGaussian(given(noise_multiplier), 1.0, 1)


def slot_of(name: str, client: int | Literal[""]) -> str:
    """Return the name of a client's slot for participations.

    Args:
        name: Name of the slot in the central plan.
        client: Client id; "" for the part that is common to all clients.
    """
    return f"{name} of client {client}"


def for_clients(plan: Sequence[Slot], clients: Iterable[int]) -> list[Slot]:
    """Give each client its slots of a central plan, as the trusted server's gate charges them.

    Args:
        plan: The central plan.
        clients: Client ids.

    Returns:
        The plan, in which each `ParticipationSlot` is replaced by one for each client.
    """
    shared = [slot for slot in plan if not isinstance(slot, ParticipationSlot)]
    own = [slot for slot in plan if isinstance(slot, ParticipationSlot)]
    return shared + [replace(slot, name=slot_of(slot.name, client)) for client in clients for slot in own]


def names_for(plan: Sequence[Slot], client: int) -> frozenset[str]:
    """List the names of the slots of a trusted server's ledger that a client pays for.

    Args:
        plan: The central plan.
        client: Client id.
    """
    return frozenset(slot_of(s.name, client) if isinstance(s, ParticipationSlot) else s.name for s in plan)
