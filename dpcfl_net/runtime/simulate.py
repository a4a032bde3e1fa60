"""A whole run in one process and one thread: same gates, same ledgers, same bits as the processes give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.types import State
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.federation.central_dp import CentralDPServer
from dpcfl_net.federation.in_process import InProcessFederation
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.runtime.coordinator import drive
from dpcfl_net.runtime.one_process import Hosts


def simulate(
    job: Job, folder: Path, *, data_root: str | None = None, on_round: Callable[[int, State], None] = lambda t, s: None
) -> State:
    """Run a job without processes or sockets, its ledgers and checkpoints in `folder` (without fsync)."""
    import torch

    torch.set_num_threads(1)
    algorithm, files = job.algorithm, RunFolder(folder)
    hosts = Hosts(job, files.ledgers, data_root)
    central_server = CentralDPServer.of(algorithm, files.ledgers, job.experiment.noise, durable=False)
    try:
        fed = InProcessFederation(job.protocol, hosts)
        fed.central_server = central_server
        return drive(algorithm, fed, Checkpoints(files.checkpoints), on_round)
    finally:
        hosts.close()
        if central_server is not None:
            central_server.close()
