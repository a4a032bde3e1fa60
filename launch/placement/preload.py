"""The parent of all workers: loads the libraries and the job that they share, and forks them.

Use no socket, thread pool, random number or CUDA here: forked workers would inherit it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from pathlib import Path

import torch

from dpcfl_net.algorithms.base import registry
from dpcfl_net.core.errors import DpcflError
from dpcfl_net.core.frozen import digest
from dpcfl_net.core.plugins import is_plugin
from dpcfl_net.experiment.job_files import client_slice, read_job
from dpcfl_net.launch.placement import immortal
from dpcfl_net.launch.placement.fork_server import GROUP_MAIN, WORKER_MAIN, main_function, serve
from dpcfl_net.launch.placement.rehearsal import rehearse
from dpcfl_net.privacy.accounting import cache

MODULES = (
    "dpcfl_net.runtime.worker_group",
    "dpcfl_net.training.models",
    "dpcfl_net.training.fast_path",
    "zmq.auth.thread",
    "safetensors.numpy",
)
MANY_CLIENTS = 50  # from here on, 4 MiB less of each worker are worth half a second of the start


def load_libraries() -> None:
    """Import all that workers need, with one thread per library."""
    torch.set_num_threads(1)
    for module in MODULES:
        importlib.import_module(module)
    for main in (WORKER_MAIN, GROUP_MAIN):
        main_function(main)
    registry()
    cache.accountant()


def serve_workers(job: tuple[Path, str, str | None] | None) -> None:
    """Load libraries and job, and fork workers on request; does not return.

    Args:
        job: Folder, operator's key and data folder of a job to read in advance; None: no job.
    """
    load_libraries()
    clients = 0
    if job is not None:
        with contextlib.suppress(DpcflError):  # each worker meets the same error and reports it
            clients = read_first_job(*job)
    if clients >= MANY_CLIENTS:
        gc.unfreeze()  # what the parent of this process has loaded
        gc.collect()
        immortal.keep_for_ever()
    serve()


def read_first_job(folder: Path, operator_key: str, data_root: str | None) -> int:
    """Cache the verified job, its hash, its model and the partition of the data for the workers of a run.

    The caches are keyed by content, so that further runs of the same launcher are correct.

    Args:
        folder: The run folder.
        operator_key: Public key of the operator.
        data_root: Folder of the data sets; None: the usual one.

    Returns:
        Number of clients of the job.

    Raises:
        DpcflError: If the job cannot be read.
    """
    job = read_job(folder, operator_key)
    digest(job.protocol)
    if not is_plugin(str(job.experiment.data["dataset"])):  # user code might start threads
        client_slice(job, job.protocol.roster[0].id, data_root)
    rehearse(job)
    return len(job.protocol.roster)
