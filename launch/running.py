"""One run from its configuration to its report: prepare, watch, stop, record."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dpcfl_net.core import yaml_file
from dpcfl_net.core.errors import ConfigError, DpcflError, RunFailed, StopRun
from dpcfl_net.core.files import reason, write_text
from dpcfl_net.core.job_reader import read_protocol
from dpcfl_net.core.locks import run_lock
from dpcfl_net.core.plugins import short
from dpcfl_net.core.protocol import check_runnable
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.signing import read_operator_key
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.build import make_job, with_noise_seed
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.experiment.job_files import Job, read_job, write_job
from dpcfl_net.experiment.statement import replace_one_epsilon
from dpcfl_net.launch import chaos, run_kinds
from dpcfl_net.launch.interrupts import Interrupts
from dpcfl_net.launch.placement.placements import KeyOwners, LocalPlacement, Placement
from dpcfl_net.launch.preparation import StepRecorder
from dpcfl_net.results import models, summary
from dpcfl_net.transport.keys import make_operator_keys

if TYPE_CHECKING:
    from dpcfl_net.report.trackers.base import Tracker

FIRST_EPSILON_S = 1.0  # assumed cost of the first computation of epsilon: a run of seconds computes it at its end only
STATEMENT_S = 1.0  # how long a stopped run waits for its replace-one epsilon, which a report computes too


# Settings of a run inside the calling process: no message crosses a network, so there is no transcript.
IN_PROCESS = {"runtime.federation": "in-process", "output.transcript": "off"}


@dataclass(frozen=True)
class SavedRun:
    """Configuration and run.json of a run folder.

    Attributes:
        config: The configuration of the run.
        document: Content of run.json; empty if there is none.
    """

    config: Config
    document: dict[str, Any]

    @property
    def finished(self) -> bool:
        """True if all rounds are done."""
        return self.document.get("state") == "finished"

    @property
    def seconds(self) -> float:
        """Duration of the run so far, in seconds."""
        return float(self.document.get("wall_s", 0.0))


def read_saved_run(folder: Path, *, remote: bool = False, warn: Callable[[str], None] = lambda text: None) -> SavedRun:
    """Read a run folder that is to be resumed.

    Args:
        folder: The run folder.
        remote: Accept a run with workers on other hosts.
        warn: Called with a message if run.json is damaged; it is then written again.

    Returns:
        Its configuration and run.json.

    Raises:
        ConfigError: If the folder holds no run, or a damaged one, or one with workers on other hosts and `remote` is not set, or
            one that an earlier version started and did not finish.
        Refused: If its job is not signed.
    """
    if not RunFolder(folder).config.is_file():
        raise ConfigError(f"{folder} is not a run folder: it holds no config.yaml")
    try:
        config = configuration.load(RunFolder(folder).config)
    except ConfigError as error:
        raise ConfigError([f"{RunFolder(folder).config}: {problem}" for problem in error.problems]) from None
    if not remote and RunFolder(folder).placement.exists():
        raise ConfigError(f"the workers of {folder} are on other hosts: resume with dpcfl launch --resume {folder} --on ...")
    job = summary.read_run_job(folder)
    try:
        saved = SavedRun(config, summary.read_document(folder))
    except ConfigError as error:
        warn(str(error))
        saved = SavedRun(config, {})
    if not saved.finished:
        check_runnable(job.protocol)
    return saved


class ProgressDisplay(Protocol):
    """Shows the progress of a run."""

    def prepare(self, step: str) -> None:
        """Show a step of the preparation, before it begins."""

    def update(self, view: Any) -> None:
        """Show a `ProgressView`; StopRun ends the run early."""

    def close(self) -> None:
        """Stop drawing; may be called twice."""


@dataclass(frozen=True)
class RunOptions:
    """Options of a run of a folder.

    Attributes:
        seconds_before: Duration of the run before it is resumed, in seconds.
        placement: Hosts of the workers; None: this machine.
        interrupts: Signals that interrupt the run; None: INT, TERM and HUP while it runs.
        on_failure: Called with a failure before the end of the run is recorded.
        in_calling_process: Run everything in this process.
        chaos: File of faults to inject; None: no faults.
        trackers: Get the rounds of a run that `run_and_report` runs.
    """

    seconds_before: float = 0.0
    placement: Placement | None = None
    interrupts: Interrupts | None = None
    on_failure: Callable[[DpcflError], None] = lambda failure: None
    in_calling_process: bool = False
    chaos: Path | None = None
    trackers: Sequence[Tracker] = ()


DEFAULTS = RunOptions()


def new_folder(config: Config, out: Path) -> Path:
    """Create an empty run folder named after the configuration and the time.

    Args:
        config: The configuration.
        out: Parent of the folder.

    Raises:
        OSError: If it cannot be created.
        ConfigError: If no name is free.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    stem = f"{config.name}-{short(config.algorithm['name'])}-{stamp}"
    for count in range(100):
        folder = out / (stem if not count else f"{stem}-{count}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not folder.exists():  # `out` exists and is not a folder
                raise
            continue
        return folder
    raise ConfigError(f"no free name for a run folder {out / stem}")


def prepare(
    folder: Path, config: Config, placement: Placement | None = None, on_step: Callable[[str], None] = lambda step: None
) -> None:
    """Write all that a run starts from: keys, the signed job and the resolved configuration.

    Args:
        folder: The run folder.
        config: The configuration.
        placement: Hosts of the workers, where the clients' keys are created; None: this machine.
        on_step: Called with each step that may take long, before it begins.

    Raises:
        ConfigError: If the job cannot be made.
    """
    keys, clients = RunFolder(folder).keys, sum(config.data.clients)
    on_step(f"keys of clients: {clients}")
    make_operator_keys(keys)
    (placement or LocalPlacement()).make_keys(keys, KeyOwners.of(config))
    config = with_noise_seed(config)
    job = make_job(config, keys, on_step)
    write_config(folder, config)
    write_job(job, folder, keys)


def write_config(folder: Path, config: Config) -> None:
    """Write the resolved configuration, which `dpcfl run` accepts as CONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(RunFolder(folder).config, yaml_file.dump(config.model_dump(mode="json", exclude={"algorithms"})))


def run_and_report(folder: Path, config: Config, options: RunOptions = DEFAULTS) -> tuple[int, dict[str, Any]]:
    """Run a folder as `run_in` does, print progress and result, and write the report.

    In the calling process progress is printed line by line, which leaves the terminal to a debugger.

    Args:
        folder: The run folder.
        config: The configuration of the run.
        options: How to run it; failures are printed.

    Returns:
        The exit code, and run.json.

    Raises:
        DpcflError: The failure of the run, after it is printed.
    """
    if options.interrupts is None:
        with Interrupts(until_exit=True) as interrupts:
            return run_and_report(folder, config, replace(options, interrupts=interrupts))
    from dpcfl_net.launch.cli.screen import PlainLines, open_screen
    from dpcfl_net.launch.feed import RoundFeed
    from dpcfl_net.launch.watcher import TrackedScreen

    screen = PlainLines() if options.in_calling_process else open_screen()
    feed = RoundFeed(folder, config, options.trackers)
    try:
        document, failure = run_in(folder, config, TrackedScreen(screen, feed), replace(options, on_failure=_print_failure))
        if document.get("state") == "finished":
            feed.update(ended=True)
    finally:
        feed.end()
    resume = resume_command(folder, remote=options.placement is not None)
    if not document:
        print(
            f"stopped before the first round; resume with: {resume}"
            if folder.exists()
            else "stopped before the run began; the new run folder was removed"
        )
        return 130, document
    # The first signal may have interrupted the run; a further one also cancels the report.
    cancelled = options.interrupts.count > (document["state"] == "interrupted")
    code = 130 if cancelled else _write_report(folder, options.interrupts)
    if failure is not None:
        print(f"completed rounds are in {folder}; resume with: {resume}")
        raise failure
    if document["state"] == "interrupted":
        print(f"stopped after round {document['rounds_done']} of {config.rounds}; resume with: {resume}")
        return 130, document
    screen.finish(document)
    if options.chaos is not None:
        print(f"faults:     {chaos.summary(folder)} ({RunFolder(folder).spans.name})")
    _print_files(folder, has_report=code == 0)
    return code, document


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
        run.json, and the failure of the run or None. A finished run is not run again. The state is `interrupted` after a signal. If a new run is interrupted
        before it begins, run.json is empty and the folder is removed.

    Raises:
        RunInUse: If another process runs the folder.
        ConfigError: If an earlier version started the run, as `check_runnable`.
        DpcflError: If a new run fails before it begins.
    """
    if options.interrupts is None:
        with Interrupts() as interrupts:
            return run_in(folder, config, display, replace(options, interrupts=interrupts))
    interrupts, placement = options.interrupts, options.placement or LocalPlacement()
    with run_lock(folder):
        is_new = all(path == RunFolder(folder).lock for path in folder.iterdir())
        if not is_new and (done := _finished(folder)):  # another process ran it between the caller's check and the lock
            return done, None
        if not is_new:  # before any process, ledger or checkpoint is touched
            check_runnable(read_protocol(RunFolder(folder).protocol))
        run: run_kinds.Run | None = None
        recorder: RunRecorder | None = None
        faults: chaos.Chaos | None = None
        state, failure = "failed", None
        steps = StepRecorder(folder, display.prepare)
        try:
            with interrupts.raising():
                interrupts.check()
                faults = None if options.chaos is None else chaos.open_chaos(folder, config, options.chaos)
                run = run_kinds.run_of(folder, config, placement, options.in_calling_process, faults)
                run.warm()
                if is_new:
                    prepare(folder, config, placement, steps.begin)
                job = read_job(folder, read_operator_key(RunFolder(folder).operator_key))
            recorder = RunRecorder(folder, job, options.seconds_before, run, durable=config.runtime.durable)
            steps.begin(f"start of processes: {run.processes()}")
            run.start(job, interrupts)
            steps.end()
            recorder.write("running")
            run.watch(lambda: display.update(recorder.progress()), interrupts)
            run.finish()
            display.update(recorder.progress())
            state = "finished"
        except (KeyboardInterrupt, StopRun):
            state = "interrupted"
        except (DpcflError, OSError) as error:
            failure = error if isinstance(error, DpcflError) else RunFailed(_message(folder, error))
            display.close()
            options.on_failure(failure)
        except Exception:  # raised by user code in this process; it is passed on unchanged
            if recorder is not None:
                recorder.write(state, last=True)
            raise
        finally:
            display.close()
            if faults is not None:
                faults.close()
            if run is not None:
                run.stop()
        if recorder is None:
            if is_new:  # an incomplete job cannot be resumed
                shutil.rmtree(folder, ignore_errors=True)
            if failure is not None:
                raise failure
            return {}, None
        try:
            document = recorder.write(state, last=True)
            models.export_models(folder, recorder.job, config.data.root, personal=config.output.personal_models)
        except OSError as error:
            return recorder.document, failure or RunFailed(_message(folder, error))
        except DpcflError as error:
            return recorder.document, failure or error
        return document, failure


def _finished(folder: Path) -> dict[str, Any]:
    """Return run.json of a finished run; empty for others."""
    try:
        document = summary.read_document(folder)
    except ConfigError:  # damaged: the run is resumed and writes it again
        return {}
    return document if document.get("state") == "finished" else {}


def _write_report(folder: Path, interrupts: Interrupts) -> int:
    """Write report.html; return 130 after a signal, 4 if it cannot be written, else 0."""
    try:
        with interrupts.raising():
            from dpcfl_net.report.page import write_report

            write_report(folder)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"warning: {_message(folder, error)}", file=sys.stderr)
        return RunFailed.exit_code
    return 0


def _print_files(folder: Path, *, has_report: bool) -> None:
    """Print where a finished run, its report and its models are."""
    files = sorted((folder / models.FOLDER).glob("*.safetensors"))
    more = f" and {len(files) - 1} more in this folder" if len(files) > 1 else ""
    print(f"run folder: {folder}")
    print(f"report:     {RunFolder(folder).report if has_report else f'not written; write it with: dpcfl report {folder}'}")
    print(f"models:     {files[0]}{more}" if files else "models:     none; the server of this algorithm has no model")


def _print_failure(failure: DpcflError) -> None:
    """Print a failure at once; `dpcfl_net.launch.cli.main` does not print it again."""
    print(f"error: {failure}", file=sys.stderr, flush=True)
    failure.printed = True


def _message(folder: Path, error: OSError) -> str:
    return f"{error.filename or folder}: {reason(error)}"


def resume_command(folder: Path, *, remote: bool) -> str:
    """Return the command that resumes a run; `remote`: with workers on other hosts."""
    return f"dpcfl launch --resume {folder} --on ... (with the same options)" if remote else f"dpcfl run --resume {folder}"


class RunRecorder:
    """Keeps run.json and the epsilon lines up to date during a run.

    It belongs to the operator and may read everything.

    Args:
        folder: The run folder.
        job: The job.
        seconds_before: Duration of the run before it was resumed, in seconds.
        run: The processes of the run.
        durable: False if the run does not flush its ledgers.
    """

    def __init__(self, folder: Path, job: Job, seconds_before: float, run: run_kinds.Run, *, durable: bool) -> None:
        self.folder, self.job, self.seconds_before, self._run, self._durable = folder, job, seconds_before, run, durable
        self.document: dict[str, Any] = {}
        self.started = time.time()
        self._replace_one: float | None = None
        self._epsilon_round, self._epsilon_s, self._epsilon_at = 0, FIRST_EPSILON_S, time.monotonic()
        self._statement = threading.Thread(target=self._compute_replace_one, daemon=True)
        self._statement.start()

    def progress(self) -> Any:
        """Return the `ProgressView` of now. Updates the epsilon lines too, in at most a thirtieth of the time."""
        from dpcfl_net.launch.cli.progress import tail_progress

        view = tail_progress(self.folder)
        if view.round > self._epsilon_round and time.monotonic() - self._epsilon_at > 30 * self._epsilon_s:
            start = time.monotonic()
            summary.write_epsilon_lines(self.folder, self.job)
            self._epsilon_round, self._epsilon_at = view.round, time.monotonic()
            self._epsilon_s = self._epsilon_at - start
            view = tail_progress(self.folder)
        return view

    def write(self, state: str, *, last: bool = False) -> dict[str, Any]:
        """Write run.json and return its content.

        Args:
            state: "running", "finished", "interrupted" or "failed".
            last: True at the end of the run; the epsilon lines are then written too.

        Raises:
            OSError: If it cannot be written.
        """
        if last:
            self._statement.join(None if state == "finished" else STATEMENT_S)
            with contextlib.suppress(OSError):  # a full disk: they follow from the ledgers, and run.json matters more
                summary.write_epsilon_lines(self.folder, self.job)
        self.document = summary.run_document(
            self.folder,
            self.job,
            state=state,
            wall_s=self.seconds_before + time.time() - self.started,
            processes=self._run.processes(),
            replace_one=self._replace_one,
            devices=self._run.devices(),
            durable=self._durable,
        )
        summary.write_run(self.folder, self.document)
        return self.document

    def _compute_replace_one(self) -> None:
        self._replace_one = replace_one_epsilon(self.job.protocol)
