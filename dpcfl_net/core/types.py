"""Plain data that every floor may name: privacy events, slots of a plan, tasks, releases, server state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Adjacency = Literal["zero-out", "replace-one"]
ADJACENCIES: tuple[Adjacency, ...] = ("zero-out", "replace-one")


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return value


@dataclass(frozen=True)
class SampledGaussian:
    """`steps` Poisson-sampled Gaussian releases; the noise on each sum has standard deviation noise_multiplier * clip."""

    noise_multiplier: float
    sampling_rate: float
    steps: int

    def __post_init__(self) -> None:
        if not 0 < _number("noise_multiplier", self.noise_multiplier) < math.inf:
            raise ValueError(f"noise_multiplier must be positive and finite, got {self.noise_multiplier!r}")
        if not 0 <= _number("sampling_rate", self.sampling_rate) <= 1:
            raise ValueError(f"sampling_rate must lie in [0, 1], got {self.sampling_rate!r}")
        _whole("steps", self.steps)


@dataclass(frozen=True)
class FixedSizeGaussian:
    """`steps` Gaussian releases, each over a fresh sample of exactly `sample_size` of `population`, drawn without replacement.

    noise_multiplier: standard deviation of the noise over the L2 sensitivity of one whole release when a member of the sample
    is replaced by another (2 * clip for a sum of clipped vectors). Replace-one adjacency only, and nothing doubled there.
    """

    noise_multiplier: float
    sample_size: int
    population: int
    steps: int

    def __post_init__(self) -> None:
        if not 0 < _number("noise_multiplier", self.noise_multiplier) < math.inf:
            raise ValueError(f"noise_multiplier must be positive and finite, got {self.noise_multiplier!r}")
        for name in ("sample_size", "population", "steps"):
            _whole(name, getattr(self, name))
        if not 1 <= self.sample_size <= self.population:
            raise ValueError(f"sample_size must lie between 1 and population {self.population}, got {self.sample_size!r}")

    @property
    def sampling_rate(self) -> float:
        """The chance of each member to be in a sample."""
        return self.sample_size / self.population


@dataclass(frozen=True)
class BoundedRangeSelection:
    """`count` exponential-mechanism selections whose log-probability ratios range over at most `epsilon` each."""

    epsilon: float
    count: int

    def __post_init__(self) -> None:
        if not 0 <= _number("epsilon", self.epsilon) < math.inf:
            raise ValueError(f"epsilon must be non-negative and finite, got {self.epsilon!r}")
        _whole("count", self.count)


@dataclass(frozen=True)
class Unprotected:
    """A release without a guarantee: everything composed with it has epsilon = inf."""

    reason: str


Event = SampledGaussian | FixedSizeGaussian | BoundedRangeSelection | Unprotected


def _whole(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number >= 0, got {value!r}")


def given(noise_multiplier: float | None) -> float:
    """The noise multiplier of a plan that holds noise; ValueError where the job names none for it."""
    if noise_multiplier is None:
        raise ValueError("the plan holds releases with noise, and the job names no noise multiplier for it")
    return noise_multiplier


@dataclass(frozen=True)
class DPSGDSlot:
    """One task's DP-SGD: `steps` steps, each on a Poisson batch of sampling rate `rate` (1: every record)."""

    name: str
    rate: float
    steps: int

    def event(self, noise_multiplier: float | None, adjacency: Adjacency = "zero-out") -> Event:
        """What the accountant sees; replace-one's doubled sensitivity is the accountant's part."""
        return SampledGaussian(given(noise_multiplier), self.rate, self.steps)


@dataclass(frozen=True)
class GaussianSlot:
    """One release over all that a client holds, with Gaussian noise of z * ratio times its sensitivity under zero-out.

    doubles: whether an exchange moves it twice as far as taking out does, as for a vector of bounded length, or just as far,
    as for a number between 0 and a bound.
    """

    name: str
    ratio: float = 1.0
    doubles: bool = True

    def event(self, noise_multiplier: float | None, adjacency: Adjacency = "zero-out") -> Event:
        """The accountant doubles every sensitivity under replace-one: where it does not double, the noise counts twice."""
        told = 2 if adjacency == "replace-one" and not self.doubles else 1
        return SampledGaussian(told * self.ratio * given(noise_multiplier), 1.0, 1)


@dataclass(frozen=True)
class SelectionSlot:
    """One choice by the exponential mechanism, P(m) proportional to exp(eta * count_m), counts of own records."""

    name: str
    eta: float

    def event(self, noise_multiplier: float | None, adjacency: Adjacency = "zero-out") -> Event:
        """Zero-out moves every count by 0 or +1 together (range eta); replace-one by -1..+1 (range 2 eta)."""
        return BoundedRangeSelection(self.eta if adjacency == "zero-out" else 2 * self.eta, 1)


@dataclass(frozen=True)
class UnprotectedSlot:
    """One release without any guarantee, as a paper has it: whoever's plan holds one has epsilon = inf, and `reason` says why."""

    name: str
    reason: str

    def event(self, noise_multiplier: float | None, adjacency: Adjacency = "zero-out") -> Event:
        """The same whatever the noise."""
        return Unprotected(self.reason)


@dataclass(frozen=True)
class Policy:
    """The most that one worker serves, whatever a signed job promises.

    max_epsilon: None for `SANE_EPSILON`, beyond which no promise is worth the name, and for jobs that declare in their signed
    protocol that they have no epsilon; a number refuses these as well. max_delta: None for 1 / N, N the client's records (or,
    where a whole client is protected, the number of clients).
    """

    max_epsilon: float | None = None
    max_delta: float | None = None


USUAL_POLICY = Policy()
SANE_EPSILON = 100.0
RAW = "raw to a trusted server: it sees this release as it is"


@dataclass(frozen=True)
class RawSlot:
    """One release as it is to a server that is trusted to add the noise; against that server itself nothing protects it."""

    name: str

    def event(self, noise_multiplier: float | None, adjacency: Adjacency = "zero-out") -> Event:
        """The same whatever the noise: what the run costs stands in the server's own ledger."""
        return Unprotected(RAW)


@dataclass(frozen=True)
class CentralSlot:
    """One round's releases of a trusted server: a fresh sample of clients, and Gaussian noise on each of `parts`.

    sampling: "poisson", each client by its own coin with probability sample_size / population; "fixed", exactly sample_size
    of population without replacement. parts: (name, share), the part of 1 / z^2 that each release of the round gets.
    """

    name: str
    sampling: Literal["poisson", "fixed"]
    sample_size: float
    population: int
    parts: tuple[tuple[str, float], ...] = (("sums", 1.0),)

    def event(self, noise_multiplier: float | None, adjacency: Adjacency = "zero-out") -> Event:
        """All parts together: z is noise over the sensitivity under add/remove (Poisson) or replace-one (fixed size)."""
        if self.sampling == "fixed":
            return FixedSizeGaussian(given(noise_multiplier), int(self.sample_size), self.population, 1)
        return SampledGaussian(given(noise_multiplier), self.sample_size / self.population, 1)

    def part_noise(self, noise_multiplier: float, part: str) -> float:
        """The noise multiplier of one part, over that part's own sensitivity; KeyError for a part that is not there."""
        return noise_multiplier / math.sqrt(dict(self.parts)[part])


Slot = DPSGDSlot | GaussianSlot | SelectionSlot | UnprotectedSlot | RawSlot | CentralSlot


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a task or release.

    Attributes:
        dtype: "f4" or "i8".
        shape: Sides as sizes or names ("p" parameters, "M" models in a task, or the algorithm's own).
        max_norm: Maps (algorithm, client's roster entry) to the largest L2 norm that the server accepts; None: any.
    """

    dtype: Literal["f4", "i8"]
    shape: tuple[int | str, ...] = ()
    max_norm: Callable[[Any, Any], float] | None = None


@dataclass(frozen=True)
class ClientStep:
    """A declared step: its task name, the slots that one task charges, and the tensors that it takes and gives."""

    kind: str
    charges: tuple[str, ...]
    takes: Mapping[str, TensorSpec]
    gives: Mapping[str, TensorSpec]


@dataclass(frozen=True)
class Task:
    """What the coordinator asks of one client in one round; carries no privacy parameter."""

    round: int
    kind: str
    tensors: dict[str, np.ndarray]


class Release:
    """The only thing that a client step may return: named arrays, all of them outputs of charged mechanisms."""

    def __init__(self, **tensors: np.ndarray | np.generic) -> None:
        self.tensors = {name: np.asarray(value) for name, value in tensors.items()}


@dataclass(frozen=True)
class Answer:
    """What a client's gate says to a task. `release`: packed tensors (bytes), the same for the same task."""

    status: Literal["release", "lost", "stale", "refused"]
    release: bytes = b""
    code: str = ""
    reason: str = ""
    cached: bool = False


# The cluster of each client, indexed by client id; None for a client without a cluster.
Assignment = list[int | None]


@dataclass
class State:
    """The server's whole state between rounds: plain, serialisable, sufficient to resume.

    Attributes:
        models: (M, p) float32, one row per cluster (no rows: personal models only).
        assignment: Cluster of each client; see `Assignment`.
        memory: What else the algorithm needs: msgpack-able scalars, lists, dicts with string keys, numpy arrays.
        diagnostics: Figures for logs and the report, computed from what the server may see. A word or number per round, a
            list with a number per cluster or per client, or a mapping of arrays (written once, as NAME.npz). Names are
            shown as they are. Two have defaults: `phase`, the word for the round, and `sizes`, the clients per cluster.
    """

    models: np.ndarray
    assignment: Assignment
    memory: dict[str, Any] = field(default_factory=dict)
    diagnostics: dict[str, Any] = field(default_factory=dict)
