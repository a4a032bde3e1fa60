"""Kinds of run: what all offer to the launcher, and the kind that a configuration requires."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.launch.calling_process import CallingProcessRun
from dpcfl_net.launch.chaos import Chaos
from dpcfl_net.launch.interrupts import Interrupts
from dpcfl_net.launch.one_process import OneProcessRun
from dpcfl_net.launch.placement.placements import Placement
from dpcfl_net.launch.processes import FederationRun


class Run(Protocol):
    """The processes of one run folder."""

    def warm(self) -> None:
        """Start processes that can load their libraries before the job exists."""

    def start(self, job: Job, interrupts: Interrupts) -> None:
        """Start the run of the job in the folder.

        Args:
            job: The job.
            interrupts: Signals that interrupt the run.

        Raises:
            KeyboardInterrupt: After a signal.
        """

    def watch(self, tick: Callable[[], None], interrupts: Interrupts) -> None:
        """Watch the run until coordinator and observer have ended.

        Args:
            tick: Called about every `TICK_S`.
            interrupts: Signals that interrupt the run.

        Raises:
            RunFailed: If the run cannot continue.
            KeyboardInterrupt: After a signal.
        """

    def finish(self) -> None:
        """Wait for the remaining workers to exit after the last round."""

    def stop(self) -> None:
        """End all processes of the run, at last by SIGKILL."""

    def devices(self) -> dict[str, int]:
        """Return the number of worker processes by device."""

    def processes(self) -> int:
        """Return the largest number of processes at a time."""


def run_of(
    folder: Path, config: Config, placement: Placement, in_calling_process: bool = False, chaos: Chaos | None = None
) -> Run:
    """Choose the kind of run that a configuration requires.

    Args:
        folder: The run folder.
        config: The configuration of the run.
        placement: Hosts of the workers.
        in_calling_process: Run everything in this process.
        chaos: Faults to inject, for a run with a process per role.

    Returns:
        The run; no process has started.
    """
    if in_calling_process:
        return CallingProcessRun(folder, config)
    if config.runtime.federation == "in-process":
        return OneProcessRun(folder, config)
    return FederationRun(folder, config, placement, chaos)
