"""Plain data types of all packages: adjacencies, policies, tasks, releases, server state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

Adjacency = Literal["zero-out", "replace-one"]
ADJACENCIES: tuple[Adjacency, ...] = get_args(Adjacency)


@dataclass(frozen=True)
class Policy:
    """Limits of one worker on the jobs that it accepts.

    Attributes:
        max_epsilon: Largest epsilon. None: `SANE_EPSILON`, and jobs that declare that they have no epsilon are accepted; with a
            number they are refused.
        max_delta: Largest delta. None: 1 / N, N the client's records (or the number of clients if the unit is a client).
        protected_only: Refuse jobs whose server receives anything without protection: with a trusted server, whose epsilon does not
            protect against it, or with releases that the job declares to have no guarantee.
    """

    max_epsilon: float | None = None
    max_delta: float | None = None
    protected_only: bool = False


USUAL_POLICY = Policy()
SANE_EPSILON = 100.0


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a task or release.

    Attributes:
        dtype: "f4", "i8", or of secure aggregation "u1" (bytes) and "u4" (words).
        shape: Sides as sizes or names ("p" parameters, "M" models in a task, or the algorithm's own).
        max_norm: Of a release only: maps (algorithm, client's roster entry) to the largest L2 norm that the server accepts,
            inf for any; None: not checked. A tensor with a `max_norm` is a model update unless `update` is False.
        exact: Of an update only: True if it is sent as float32 even where the job compresses updates.
        update: False for a tensor with a `max_norm` that is no model update, such as a sum of records.

    Raises:
        ValueError: For another `dtype`, or a `max_norm` that is no function.
    """

    dtype: Literal["f4", "i8", "u1", "u4"]
    shape: tuple[int | str, ...] = ()
    max_norm: Callable[[Any, Any], float] | None = None
    exact: bool = False
    update: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in (known := ("f4", "i8", "u1", "u4")):
            raise ValueError(f"dtype of a TensorSpec is {self.dtype!r}: must be one of {', '.join(known)}")
        if self.max_norm is not None and not callable(self.max_norm):
            raise ValueError(
                f"max_norm of a TensorSpec is {self.max_norm!r}: must be a function of the algorithm and a client's roster entry"
            )

    @property
    def is_update(self) -> bool:
        """True for a model update: attacks look for it, and the job may compress it."""
        return self.update and self.max_norm is not None


class NoEffect(str):
    """Sentence about an option of an algorithm that is not used with the other options.

    A configuration with such an option is refused; a signed job is not, since its releases are the same without the option.

    Attributes:
        option: Dotted name of the option, without `algorithm.`.
    """

    option: str

    def __new__(cls, option: str, sentence: str) -> NoEffect:
        """Build the sentence about `option`."""
        found = super().__new__(cls, sentence)
        found.option = option
        return found


@dataclass(frozen=True)
class ClientStep:
    """A declared step: its task name, the slots that one task charges, and the tensors that it takes and gives.

    Attributes:
        kind: Name of its tasks.
        charges: Names of the slots that one task charges.
        takes: Tensors of the task.
        gives: Tensors of the release.
        clients_in: Of a central step only: name of the tensor that lists the clients whose slots are charged; "" charges
            the slots once.
    """

    kind: str
    charges: tuple[str, ...]
    takes: Mapping[str, TensorSpec]
    gives: Mapping[str, TensorSpec]
    clients_in: str = ""


@dataclass(frozen=True)
class Task:
    """Request of the coordinator to one client in one round; holds no privacy parameter.

    Attributes:
        round: Round of the task.
        kind: Name of the client step.
        tensors: Tensors by name.
        blake3: Hash of the bytes of all tensors in name order, hex, if the transport has verified it; "" if not.
    """

    round: int
    kind: str
    tensors: dict[str, np.ndarray]
    blake3: str = ""


class Release:
    """Return value of a client step: named arrays, all of them outputs of charged mechanisms."""

    def __init__(self, **tensors: np.ndarray | np.generic) -> None:
        self.tensors = {name: np.asarray(value) for name, value in tensors.items()}


@dataclass(frozen=True)
class Answer:
    """Answer of a client's gate to a task.

    Attributes:
        status: "release", or why there is none.
        release: Packed tensors, the same bytes for the same task.
        code: Code of a refusal.
        reason: Reason of a refusal.
        cached: True if the task was answered before.
        blake3: Hash of the bytes of the release's tensors, hex; "" without a release.
    """

    status: Literal["release", "lost", "stale", "refused"]
    release: bytes | memoryview = b""
    code: str = ""
    reason: str = ""
    cached: bool = False
    blake3: str = ""


# The cluster of each client, indexed by client id; None for a client without a cluster.
Assignment = list[int | None]


@dataclass
class State:
    """The server's whole state between rounds: plain, serialisable, sufficient to resume.

    Attributes:
        models: (M, p) float32, one row per cluster (no rows: personal models only).
        assignment: Cluster of each client; see `Assignment`.
        memory: Further state of the algorithm: msgpack-able scalars, lists, dicts with string keys, numpy arrays.
        diagnostics: Values for logs and the report, computed from data that the server may see. A word or number per round, a
            list with a number per cluster or per client, or a mapping of arrays (written once, as NAME.npz). Names are
            shown unchanged. `sizes` (clients per cluster) and, with one cluster, `phase` (a word for the round) have defaults.
    """

    models: np.ndarray
    assignment: Assignment
    memory: dict[str, Any] = field(default_factory=dict)
    diagnostics: dict[str, Any] = field(default_factory=dict)
