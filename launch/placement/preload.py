"""Imported once in the process that workers are forked from: what all of them need is loaded there and shared.

No socket, no thread pool, no random number and no CUDA may be used here: children inherit all of it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
from pathlib import Path

import setproctitle
import torch

from dpcfl_net.algorithms.base import registry
from dpcfl_net.core.errors import DpcflError
from dpcfl_net.core.plugins import is_plugin
from dpcfl_net.core.protocol import digest
from dpcfl_net.experiment.job_files import client_slice, read_job
from dpcfl_net.launch.interrupts import SIGNALS
from dpcfl_net.launch.placement import local
from dpcfl_net.privacy.accounting import cache

# Signals at a terminal concern the launcher. They were held back until here.
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def read_first_job(folder: str, operator_key: str, data_root: str | None) -> None:
    """What each worker of a run would find out again: the verified job, its hash, and who holds which records.

    All three are kept by the content that they come from, so that another run of the same launcher finds its own.
    """
    job = read_job(Path(folder), operator_key)
    digest(job.protocol)
    if not is_plugin(str(job.experiment.data["dataset"])):  # a person's own code might start threads
        client_slice(job, job.protocol.roster[0].id, data_root)


setproctitle.setproctitle("dpcfl parent of all workers")
torch.set_num_threads(1)
for module in (
    "dpcfl_net.launch.processes",
    "dpcfl_net.runtime.worker_group",
    "dpcfl_net.training.models",
    "dpcfl_net.training.fast_path",
    "filelock",
    "zmq.auth.thread",
    "safetensors.numpy",
):
    importlib.import_module(module)
registry()
cache.accountant()
if local.JOB in os.environ:  # {"folder", "operator_key", "data_root"} of the first run, in JSON
    with contextlib.suppress(DpcflError):  # each worker meets the same trouble, and says so where it is heard
        read_first_job(**json.loads(os.environ.pop(local.JOB)))
gc.collect()
gc.freeze()
