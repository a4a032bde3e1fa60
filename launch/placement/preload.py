"""Imported once in the parent of all workers: loads the libraries that they share.

Use no socket, thread pool, random number or CUDA here: forked workers would inherit it.
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

# Only the launcher handles signals of the terminal. They were blocked until here.
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def read_first_job(folder: str, operator_key: str, data_root: str | None) -> None:
    """Cache the verified job, its hash and the partition of the data for the workers of a run.

    The caches are keyed by content, so that further runs of the same launcher are correct.
    """
    job = read_job(Path(folder), operator_key)
    digest(job.protocol)
    if not is_plugin(str(job.experiment.data["dataset"])):  # user code might start threads
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
    with contextlib.suppress(DpcflError):  # each worker meets the same error and reports it
        read_first_job(**json.loads(os.environ.pop(local.JOB)))
gc.collect()
gc.freeze()
