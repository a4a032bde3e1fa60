"""Small jobs with secure sums, in one process, in which chosen clients do not answer chosen tasks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from conftest import SMALL

from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.types import State
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.job_files import Job, client_records
from dpcfl_net.federation.client import slot_key
from dpcfl_net.federation.engine import Engine
from dpcfl_net.federation.gate import seeded_key
from dpcfl_net.federation.in_order import Arrays, Take
from dpcfl_net.federation.in_process import InProcessFederation
from dpcfl_net.privacy.ledger.chain import read_ledger
from dpcfl_net.privacy.secure_sum import SumCode
from dpcfl_net.runtime.one_process import federation
from dpcfl_net.training.sgd import PlainSGD
from dpcfl_net.transport.identities import make_identities
from dpcfl_net.transport.keys import client_key, make_keys

SEED = "5eed" * 16
STAGES = ("secure_keys", "secure_shares", "masked_update", "secure_survivors", "secure_unmask")
CLIENT = {
    "epsilon": 10, "delta": 0.1, "unit": "client", "trust": "secure-aggregation", "noise": "seeded", "noise_seed": SEED,
    "secure_aggregation": {"stage_deadline_s": 0.05},
}  # fmt: skip
SAMPLE = {"epsilon": 10, "delta": 1e-3, "trust": "secure-aggregation", "noise": "seeded", "noise_seed": SEED}
WITH_COINS = {"epochs": 1, "batch_size": 16, "lr": 0.1, "clip": 1.0, "deadline_s": 0.5}
DP_SGD = {"epochs": 1, "batch_size": 16, "lr": 0.1, "clip": 1.0}
Lost = Mapping[tuple[int, str], Collection[int]]  # (round, task) to clients


def document(algorithm: dict[str, Any], privacy: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A configuration of 8 clients with the linear model."""
    privacy = CLIENT if privacy is None else privacy
    by_client = privacy.get("unit") == "client"
    coins = by_client and algorithm.get("sampling") != "visible"
    data: dict[str, Any] = {"dataset": "digits", "clients": [8] if by_client else [4, 4], "train_per_client": 50}
    data |= {"test_per_client": 20, "shift": "none" if by_client else "rotation"}
    base = {"name": "secure", "rounds": 3, "data": data, "model": {"name": "linear"}, "local": WITH_COINS if coins else DP_SGD}
    return {**SMALL, **base, "output": {}, "privacy": privacy, "algorithm": algorithm, **changes}


def make(folder: Path, algorithm: dict[str, Any], privacy: dict[str, Any] | None = None, **changes: Any) -> Job:
    """Make a job and its keys, below `folder`."""
    resolved = config.resolve(document(algorithm, privacy, **changes))
    clients = resolved.data.client_count
    make_keys(folder / "keys", clients)
    make_identities(folder / "keys", range(clients))
    return make_job(resolved, folder / "keys")


class Lossy(InProcessFederation):
    """A federation in which some clients are not asked, and the answers of others are lost on the way."""

    unasked: Lost = {}
    unheard: Lost = {}
    carried: tuple[int, int, int] = (0, 0, 0)  # tasks, bytes of tensors to the server and from it

    def _exchange(self, kind: str, tasks: Mapping[int, dict[str, np.ndarray]], take: Take, window: int | None) -> None:
        where = self.round, kind
        asked = {client: task for client, task in tasks.items() if client not in self.unasked.get(where, ())}

        def hear(client: int, tensors: Arrays) -> None:
            count, up, down = self.carried
            self.carried = count + 1, up + size(tensors), down + size(tasks[client])
            if client not in self.unheard.get(where, ()):
                take(client, tensors)

        super()._exchange(kind, asked, hear, window)


@contextmanager
def opened(job: Job, folder: Path, *, quorum: float = 1.0, **lost: Lost) -> Iterator[Lossy]:
    """Open a federation of the job's clients; `unasked` and `unheard` as for `Lossy`."""
    with federation(job, RunFolder(folder).ledgers, key_folder=folder / "keys") as inner:
        fed = Lossy(job.protocol, inner.hosts, quorum=quorum)
        fed.unasked, fed.unheard = lost.get("unasked", {}), lost.get("unheard", {})
        yield fed


def played(job: Job, folder: Path, *, quorum: float = 1.0, **lost: Lost) -> list[State]:
    """Run a job in this process. Returns the state at the start and after each round."""
    with opened(job, folder, quorum=quorum, **lost) as fed:
        states = [job.algorithm.start(fed)]
        for t in range(1, job.protocol.rounds + 1):
            fed.round = t
            states.append(job.algorithm.round(states[-1], t, fed))
        return states


def charged(folder: Path, client: int) -> list[tuple[int, str]]:
    """(round, kind) of a client's debits, in order."""
    lines = read_ledger(RunFolder(folder).ledgers / client_key(client))
    return [(line.round, line.kind) for line in lines if line.type == "debit"]


def size(tensors: Arrays) -> int:
    """Bytes of tensors."""
    return sum(array.nbytes for array in tensors.values())


# ---- what a trusted server would add, by hand


def key_of(job: Job, client: int, t: int, kind: str) -> bytes:
    """The key of the slot "masked" of a task with seeded noise."""
    return slot_key(charge_key(job, client, t, kind), "masked")


def charge_key(job: Job, client: int, t: int, kind: str) -> bytes:
    """The key of a task with seeded noise."""
    assert job.experiment.noise is not None
    return seeded_key(job.experiment.noise, client, t, kind, ["masked"])


def records(job: Job, client: int) -> Any:
    """A client's training records."""
    return client_records(job, client, None, "train")


def trainer(job: Job) -> PlainSGD:
    """Plain SGD of the job's clients."""
    return Engine.of(job.protocol).sgd


def noise(job: Job, code: SumCode, clients: Collection[int], t: int, kind: str) -> np.ndarray:
    """The clients' shares of the noise, added in whole units."""
    return sum((code.noise_share(key_of(job, client, t, kind)) for client in clients), np.zeros(code.d, np.int64))
