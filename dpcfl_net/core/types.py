"""Plain data that every room may name: adjacencies, policies, tasks, releases, server state."""

from __future__ import annotations

from collections.abc import Mapping
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
    """One tensor of a task or release: dtype "f4" or "i8"; dims are sizes or names ("p" parameters, "M" clusters)."""

    dtype: Literal["f4", "i8"]
    shape: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class ClientStep:
    """What a client half's declaration pins: the slots it spends and every tensor that crosses the wire."""

    kind: str
    bundle: tuple[str, ...]
    takes: Mapping[str, TensorSpec]
    gives: Mapping[str, TensorSpec]


@dataclass(frozen=True)
class Task:
    """What the coordinator asks of one client in one round; carries no privacy parameter."""

    round: int
    kind: str
    tensors: dict[str, np.ndarray]


class Release:
    """The only thing a client half may return: named arrays, all of them outputs of charged mechanisms."""

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


@dataclass
class State:
    """The whole of a server half between rounds: plain, serialisable, enough to go on from.

    models: (M, p) float32, one row a cluster (no rows: personal models only).
    assignment: the cluster of each client in client order; None where a client has none.
    memory: what else the algorithm keeps: msgpack-able scalars, lists, dicts with string keys, numpy arrays.
    """

    models: np.ndarray
    assignment: list[int | None]
    memory: dict[str, Any] = field(default_factory=dict)
