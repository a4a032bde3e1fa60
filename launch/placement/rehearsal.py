"""Rehearsal of a client step in the parent of all workers: they share the memory that the first use of code and model takes.

No record is read, no noise is drawn, and no thread or socket is opened: a fork would inherit it.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from dpcfl_net.core.errors import Refused
from dpcfl_net.core.plugins import is_plugin
from dpcfl_net.data import cache
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.federation.claim import verify_claim
from dpcfl_net.federation.client_host import ClientHost, open_ledger
from dpcfl_net.federation.engine import Engine
from dpcfl_net.privacy.slots import DPSGDSlot
from dpcfl_net.training.physical_batches import likely_sizes

RECORDS = 2
LONGEST_S = 0.3  # of processor time for steps: no worker starts before they end, and workers prepare the remaining sizes


@dataclass(frozen=True)
class Zeros:
    """Records of zeros with label 0.

    Attributes:
        shape: Shape of one record.
    """

    shape: tuple[int, ...]

    def __len__(self) -> int:
        return RECORDS

    def batch(self, rows: np.ndarray, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `training.dpsgd.Records`."""
        return torch.zeros(size, *self.shape), torch.zeros(size, dtype=torch.int64)


def rehearse(job: Job) -> None:
    """Verify the first client's claim, open and close its client runtime on an empty ledger, and sum gradients of zeros.

    Args:
        job: The job.

    Raises:
        DpcflError: If the job or its model cannot be used here.
    """
    algorithm, protocol = job.algorithm, job.protocol
    client, records = protocol.roster[0].id, Zeros(tuple(protocol.model.input_shape))
    with contextlib.suppress(Refused):  # each worker verifies it again, by its own terms
        verify_claim(algorithm, client, cache.folder() / "claims")
    with TemporaryDirectory(prefix="dpcfl-rehearsal-") as folder:
        ledger = open_ledger(Path(folder) / "ledger", protocol, client, durable=False)
        host = ClientHost(algorithm, client, ledger, lambda part: records, lambda: Engine.of(protocol), None)
        host.close()
    if is_plugin(protocol.model.name):  # user code might start threads
        return
    host.engine.build(algorithm)
    slots = dict.fromkeys(slot for slot in algorithm.plan(protocol.roster[0]) if isinstance(slot, DPSGDSlot))
    if slots and host.engine.trainer.path == "fast":  # other paths use autograd, which starts threads where there is a GPU
        _take_steps(host, list(slots), records)


def _take_steps(host: ClientHost, slots: list[DPSGDSlot], records: Zeros) -> None:
    """Sum gradients in batches of the usual sizes, which compares their bits and makes oneDNN's kernels, for all workers."""
    trainer, protocol = host.engine.trainer, host.protocol
    zeros, until = np.zeros(protocol.model.parameters, np.float32), time.process_time() + LONGEST_S
    for slot in slots:
        room = host.room(slot)
        for size in likely_sizes(protocol.roster[0].records, slot.rate, trainer.slots) if room is None else [room]:
            trainer.clipped_sum(zeros, records, np.arange(size), room)
            if time.process_time() > until:
                return
