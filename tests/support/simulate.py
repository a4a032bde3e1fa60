"""A run in one process and one thread without a run folder: the same gates, ledgers and bits as with processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.types import State
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.runtime.checkpoint import Checkpoints
from dpcfl_net.runtime.coordinator import drive
from dpcfl_net.runtime.one_process import federation


def simulate(
    job: Job,
    folder: Path,
    *,
    data_root: str | None = None,
    on_round: Callable[[int, State], None] = lambda t, state: None,
    key_folder: Path | None = None,
) -> State:
    """Run a job without processes or sockets, from the newest checkpoint on.

    Args:
        job: The job.
        folder: Folder of ledgers and checkpoints; ledgers are written without fsync.
        data_root: Folder of the data sets; None: the usual one.
        on_round: Called with the round and its state after each checkpoint.
        key_folder: As for `client_hosts.make_host`.

    Returns:
        The state after the last round.

    Raises:
        Refused: If a client refuses the job.
        RunFailed: If fewer clients than the quorum answer, or no checkpoint can be read.
    """
    files = RunFolder(folder)
    with federation(job, files.ledgers, data_root=data_root, key_folder=key_folder) as fed:
        return drive(job.algorithm, fed, Checkpoints(files.checkpoints), on_round)
