"""Plain data that every room may name: adjacencies, policies, tasks, releases, server state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Adjacency = Literal["zero-out", "replace-one"]
ADJACENCIES: tuple[Adjacency, ...] = ("zero-out", "replace-one")


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


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a task or release.

    Attributes:
        dtype: "f4" or "i8".
        shape: Sides as sizes or names ("p" parameters, "M" models in a task, or the algorithm's own).
        max_norm: Of an update only: maps (algorithm, client's roster entry) to the largest L2 norm that the server accepts,
            inf for any. None marks a tensor that is not an update.
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
