"""A run inside the calling process, for breakpoints in client steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dpcfl_net.core.process_log import log_to_file
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.launch.interrupts import TICK_S, Interrupts
from dpcfl_net.launch.one_process import one_process_spec

# Settings of a run inside the calling process: no message crosses a network, so there is no transcript.
IN_PROCESS = {"runtime.federation": "in-process", "output.transcript": "off"}


@dataclass
class CallingProcessRun:
    """A run without other processes (see `run_kinds.Run`); its log is logs/in-process.log."""

    folder: Path
    config: Config

    def warm(self) -> None:
        """There is no process to start."""

    def start(self, job: Job, interrupts: Interrupts) -> None:
        RunFolder(self.folder).logs.mkdir(exist_ok=True)
        self._job = job

    def watch(self, tick: Callable[[], None], interrupts: Interrupts) -> None:
        """Run all rounds. Signals interrupt between client steps; `tick` is called after each round.

        A second signal interrupts a step that does not end. The ledger holds its charge, as after a crash.
        """
        from dpcfl_net.runtime.one_process import run_in_one_process
        from dpcfl_net.training.worker_settings import as_in_a_worker

        ticked = time.monotonic()

        def after_step(round_done: bool) -> None:
            nonlocal ticked
            interrupts.check()
            if round_done or time.monotonic() - ticked >= TICK_S:
                tick()
                ticked = time.monotonic()

        log = RunFolder(self.folder).log("in-process")
        with log_to_file(log), as_in_a_worker(), interrupts.raising_again():
            run_in_one_process(one_process_spec(self.folder, self.config, self._job), after_step)

    def finish(self) -> None:
        """There is no other process."""

    def stop(self) -> None:
        """There is no other process."""

    def devices(self) -> dict[str, int]:
        return {"cpu": 1}

    def processes(self) -> int:
        return 1
