"""Read the signed job, the newest checkpoint and the logs of a run from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from simulate import simulate

from dpcfl_net.core import runlog
from dpcfl_net.core.signing import read_operator_key
from dpcfl_net.core.types import State
from dpcfl_net.experiment.job_files import Job, read_job
from dpcfl_net.runtime.checkpoint import Checkpoints


def job_of(folder: Path) -> Job:
    """The job, with the folder's operator key."""
    return read_job(folder, read_operator_key(folder / "operator.pub"))


def last_state(folder: Path) -> tuple[int, State]:
    """Round and state of the newest checkpoint."""
    found = Checkpoints(folder / "checkpoints").newest()
    assert found is not None
    return found


def last_models(folder: Path) -> bytes:
    """The models of the newest checkpoint."""
    return last_state(folder)[1].models.tobytes()


def server_lines(folder: Path) -> list[dict[str, Any]]:
    """The coordinator's line of each round."""
    return [line for line in runlog.read(folder / "metrics.jsonl") if "answered" in line]


def warnings_of(folder: Path) -> list[str]:
    """The warnings of the run."""
    return [line["text"] for line in runlog.read(folder / "warnings.jsonl")]


def assert_bits_of_one_process(folder: Path, again: Path) -> None:
    """The last state is that of the same job in one process, below `again`."""
    job, (t, state) = job_of(folder), last_state(folder)
    alone = simulate(job, again)
    assert t == job.protocol.rounds
    assert state.assignment == alone.assignment
    assert np.array_equal(state.models.view("u4"), alone.models.view("u4"))
