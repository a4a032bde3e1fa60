"""Implements `dpcfl launch --on slurm --requeue`: a batch job whose run continues when SLURM starts the job again."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.plugins import short
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment import config as configuration
from dpcfl_net.launch.cli import launch
from dpcfl_net.launch.cli import run as runs
from dpcfl_net.launch.placement import slurm_batch
from dpcfl_net.runtime.checkpoint import rounds_in


def run(path: Path, overrides: list[str], out: Path, options: launch.Options) -> tuple[int, dict[str, Any]]:
    """Run a configuration in its run folder, which is named after the batch job; resume it if the job was started before.

    Args:
        path: Configuration: a file or a packaged name.
        overrides: Settings to change, as key=value.
        out: Parent of the run folder.
        options: Options of the command.

    Returns:
        The exit code, and run.json (empty if nothing began) with the run folder as `folder`.

    Raises:
        ConfigError: Outside of a batch job, or if the run folder is that of an earlier job with the same id.
        RunFailed: If the run failed, or if the time limit is too short for one round.
    """
    job, limit = slurm_batch.job_id(), slurm_batch.TimeLimit()
    config = configuration.load(path, overrides)
    folder = out / f"{config.name}-{short(config.algorithm['name'])}-slurm-{job}"
    files = RunFolder(folder)
    before = rounds_in(files.checkpoints)
    if files.operator_key.exists() and files.placement.exists():  # the key is the last file of a job
        if not slurm_batch.restarts():
            raise ConfigError(
                f"{folder} is the run of an earlier job {job}, and SLURM has not started this job before: its ids were used again; rename "
                f"the folder, or resume its run: dpcfl launch --resume {shlex.quote(str(folder))} --on slurm"
            )
        print(f"job {job} was started again ({slurm_batch.restarts()}): resuming {folder}", flush=True)
        code = launch.resume(folder, options)
        found = {"folder": folder, **runs.document(folder)}
    else:
        shutil.rmtree(folder, ignore_errors=True)  # interrupted before its job was complete; it cannot be resumed
        folder.mkdir(parents=True)
        code, found = launch.new(path, overrides, out, options, folder)
    if code == 130:
        slurm_batch.requeue(job, limit, progress=rounds_in(files.checkpoints)[-1:] > before[-1:])
    return code, found
