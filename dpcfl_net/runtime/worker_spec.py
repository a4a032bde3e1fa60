"""What worker processes are started with: light, for whoever starts them without computing anything itself."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from dpcfl_net.core.types import USUAL_POLICY, Policy
from dpcfl_net.training.devices import CPU, Device


@dataclass(frozen=True)
class Terms:
    """On what terms workers serve. book: folder of the record book, and budget: (epsilon, delta) that all runs together may
    promise about a record; only where a job composes runs."""

    policy: Policy = USUAL_POLICY
    book: Path | None = None
    budget: tuple[float, float] | None = None


USUAL_TERMS = Terms()


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker is started with: paths and addresses, never a secret.

    slots: a folder that workers share, and how many of them may compute at once; beside the slots of the host, one for a core
    or for each place on a GPU, which all runs of this user share.
    """

    job: Path
    client: int
    connect: str
    observer: str | None
    keys: Path
    operator_key: str
    ledgers: Path
    terms: Terms = USUAL_TERMS
    data_root: str | None = None
    slots: tuple[Path, int] | None = None
    orphan_timeout_s: float = 60
    device: Device = CPU


@dataclass(frozen=True)
class GroupSpec:
    """What such a process is started with: a worker's specification, its client to be filled in, and where start commands come from."""

    worker: WorkerSpec
    commands: Connection


@dataclass(frozen=True)
class OneProcessSpec:
    """Everything that a run in one process is started with."""

    folder: Path
    operator_key: str
    ledgers: Path
    terms: Terms = USUAL_TERMS
    data_root: str | None = None
    keep_checkpoints: int = 2
    quorum: float = 1.0
    evaluate_every: int = 1
