"""One run of a folder: start or resume, watch, stop, record."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dpcfl_net.core.errors import ConfigError, DpcflError, RunFailed, StopRun
from dpcfl_net.core.files import reason
from dpcfl_net.core.job_reader import read_protocol
from dpcfl_net.core.locks import run_lock
from dpcfl_net.core.protocol import check_runnable
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.signing import read_operator_key
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.job_files import read_job
from dpcfl_net.launch import chaos, run_kinds
from dpcfl_net.launch.interrupts import Interrupts
from dpcfl_net.launch.new_run import check_gpus, prepare
from dpcfl_net.launch.own_code import record_code
from dpcfl_net.launch.placement.placements import LocalPlacement, Placement
from dpcfl_net.launch.preparation import StepRecorder
from dpcfl_net.launch.resumed_ledgers import check_ledgers
from dpcfl_net.launch.run_recorder import RunRecorder
from dpcfl_net.privacy.ledger.ledger_folder import erase_kept_keys
from dpcfl_net.results import models, summary

if TYPE_CHECKING:
    from dpcfl_net.report.trackers.base import Tracker


class ProgressDisplay(Protocol):
    """Shows the progress of a run."""

    def prepare(self, step: str) -> None:
        """Show a step of the preparation, before it begins."""

    def update(self, view: Any) -> None:
        """Show a `ProgressView`; StopRun ends the run early."""

    def close(self) -> None:
        """Stop drawing; may be called twice."""


class Quiet(ProgressDisplay):
    """Shows nothing."""

    def prepare(self, step: str) -> None:
        """Show no step."""

    def update(self, view: Any) -> None:
        """Show no round."""

    def close(self) -> None:
        """Nothing was drawn."""


@dataclass(frozen=True)
class RunOptions:
    """Options of a run of a folder.

    Attributes:
        seconds_before: Duration of the run before it is resumed, in seconds.
        placement: Hosts of the workers; None: this machine.
        interrupts: Signals that interrupt the run; None: INT, TERM and HUP while it runs.
        on_failure: Called with a failure before the end of the run is recorded.
        recording: Entered after the display is closed, while the end of the run is recorded: its epsilon by round may take seconds.
        in_calling_process: Run everything in this process.
        chaos: File of faults to inject; None: no faults.
        trackers: Get the rounds of a run that `reported_run.run_and_report` runs.
    """

    seconds_before: float = 0.0
    placement: Placement | None = None
    interrupts: Interrupts | None = None
    on_failure: Callable[[DpcflError], None] = lambda failure: None
    recording: Callable[[], AbstractContextManager[None]] = nullcontext
    in_calling_process: bool = False
    chaos: Path | None = None
    trackers: Sequence[Tracker] = ()


DEFAULTS = RunOptions()


def run_in(
    folder: Path, config: Config, display: ProgressDisplay, options: RunOptions = DEFAULTS
) -> tuple[dict[str, Any], DpcflError | None]:
    """Start or resume the run of a folder, watch it, stop all its processes, write run.json and the models. Prints nothing.

    Args:
        folder: The run folder; an empty one gets a new job.
        config: The configuration of the run.
        display: Shown each step of the preparation, then the progress several times a second. If it raises StopRun, the run is
            interrupted.
        options: How to run it.

    Returns:
        run.json, and the failure of the run or None. A finished run is not run again. The state is `interrupted` after a signal. If
        a run is interrupted before it begins, run.json is empty; a new folder is removed.

    Raises:
        RunInUse: If another process runs the folder.
        ConfigError: If an earlier version started the run, as `check_runnable`, or if this machine lacks GPUs of a run that is resumed.
        LedgerError: If the ledger of a client that has answered is missing, as `check_ledgers`.
        DpcflError: If a new run fails before it begins.
    """
    if options.interrupts is None:
        with Interrupts() as interrupts:
            return run_in(folder, config, display, replace(options, interrupts=interrupts))
    with run_lock(folder):
        is_new = all(path == RunFolder(folder).lock for path in folder.iterdir())
        if not is_new and (done := _finished(folder)):  # another process ran it between the caller's check and the lock
            return done, None
        if not is_new:  # before any process, ledger or checkpoint is touched
            check_runnable(read_protocol(RunFolder(folder).protocol))
            if options.placement is None:
                check_gpus(config)
        attempt = _Attempt(folder, config, display, options, options.interrupts, is_new)
        try:
            outcome = attempt.run()
        except SystemExit:  # rich raises it when the reader of the output, such as `head`, has ended
            attempt.record("interrupted", None)
            raise
        return attempt.record(*outcome)


@dataclass
class _Attempt:
    """Runs a folder whose lock is held, and records the end.

    Attributes:
        folder: The run folder.
        config: The configuration of the run.
        display: Shown the progress.
        options: How to run it.
        interrupts: Signals that interrupt the run.
        is_new: True if the folder is empty.
        processes: The processes; None before they are chosen.
        recorder: Writes run.json; None before the job exists.
        faults: Injected faults; None without any.
    """

    folder: Path
    config: Config
    display: ProgressDisplay
    options: RunOptions
    interrupts: Interrupts
    is_new: bool
    processes: run_kinds.Run | None = None
    recorder: RunRecorder | None = None
    faults: chaos.Chaos | None = None

    def run(self) -> tuple[str, DpcflError | None]:
        """Run until the last round, a signal or a failure, and stop all processes.

        Returns:
            State of the run for run.json, and the failure or None.
        """
        try:
            self._follow()
            return "finished", None
        except (KeyboardInterrupt, StopRun):
            return "interrupted", None
        except (DpcflError, OSError) as error:
            failure = error if isinstance(error, DpcflError) else failed_access(self.folder, error)
            self.display.close()
            self.options.on_failure(failure)
            return "failed", failure
        except Exception as error:  # raised by user code in this process; it is passed on unchanged
            if self.recorder is not None and not self._is_gone():
                self.recorder.write("failed", last=True, error=f"{type(error).__name__}: {error}")
            raise
        finally:
            with ExitStack() as stack:  # last what must happen also after an error of the others
                if self.processes is not None:
                    stack.callback(self.processes.stop)
                if self.faults is not None:
                    stack.callback(self.faults.close)
                self.display.close()

    def _follow(self) -> None:
        """Start the run and watch it to its end."""
        folder, config, options = self.folder, self.config, self.options
        placement, steps = options.placement or LocalPlacement(), StepRecorder(folder, self.display.prepare)
        with self.interrupts.raising():
            self.interrupts.check()
            self.faults = None if options.chaos is None else chaos.open_chaos(folder, config, options.chaos)
            processes = run_kinds.run_of(folder, config, placement, options.in_calling_process, self.faults)
            self.processes = processes
            processes.warm()
            if self.is_new:
                RunFolder(folder).preparing.touch()
                prepare(folder, config, placement, steps.begin)
            job = read_job(folder, read_operator_key(RunFolder(folder).operator_key))
            record_code(folder, config)
            RunFolder(folder).preparing.unlink(missing_ok=True)  # a resumed run may have been killed just before this
            if not self.is_new and not RunFolder(folder).placement.exists():  # agents check those of other hosts
                check_ledgers(folder, job)
        recorder = RunRecorder(
            folder, job, options.seconds_before, processes, durable=summary.flushes(config.runtime.model_dump(), job)
        )
        self.recorder = recorder
        steps.begin(f"start of processes: {processes.processes()}")
        processes.start(job, self.interrupts)
        steps.end()
        recorder.write("running")
        processes.watch(lambda: self.display.update(recorder.progress()), self.interrupts)
        processes.finish()
        self.display.update(recorder.progress())

    def _is_gone(self) -> bool:
        """Return True if the folder was removed or moved; run.json would make another one, which looks like a run."""
        return not RunFolder(self.folder).protocol.exists()

    def record(self, state: str, failure: DpcflError | None) -> tuple[dict[str, Any], DpcflError | None]:
        """Write run.json and the models; remove the folder of a new run that has no job yet.

        Args:
            state: State of the run.
            failure: Its failure.

        Returns:
            As `run_in`.

        Raises:
            DpcflError: The failure, if there is no job yet.
            RunFailed: If the folder was removed or moved.
        """
        if self.recorder is not None and self._is_gone():
            raise RunFailed(f"{self.folder} was removed or moved while it was in use: the end of the run is not recorded")
        if self.recorder is None:
            if self.is_new:  # an incomplete job cannot be resumed
                shutil.rmtree(self.folder, ignore_errors=True)
            if failure is not None:
                raise failure
            return {}, None
        try:
            with self.options.recording():
                if state == "finished":  # no request comes again; with a key one could remove the noise of its release
                    for ledger in sorted(RunFolder(self.folder).ledgers.glob("*")):
                        erase_kept_keys(ledger, durable=self.config.runtime.durable)
                personal = self.config.output.personal_models
                models.export_models(self.folder, self.recorder.job, self.config.data.root, personal=personal)
                self.recorder.write(state, last=True, error="" if failure is None else str(failure))
        except (OSError, DpcflError) as error:
            failure = failure or (error if isinstance(error, DpcflError) else failed_access(self.folder, error))
            state = "failed" if state == "finished" else state  # resume it for the rest; a finished run is not resumed
            with suppress(OSError, DpcflError):
                self.recorder.write(state, last=True, error=str(failure) if state == "failed" else "")
        return self.recorder.document, failure


def _finished(folder: Path) -> dict[str, Any]:
    """Return run.json of a finished run; empty for others."""
    try:
        document = summary.read_document(folder)
    except ConfigError:  # damaged: the run is resumed and writes it again
        return {}
    return document if document.get("state") == "finished" else {}


def failed_access(folder: Path, error: OSError) -> RunFailed:
    """Return the failure of a run that cannot read or write a file.

    Args:
        folder: The run folder, named if the error names no file.
        error: The system's error.
    """
    return RunFailed(f"{error.filename or folder}: {reason(error)}")
