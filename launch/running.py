"""One run from its configuration to its report: prepared whole or not at all, watched, stopped for good, written down."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dpcfl_net.core import yaml_file
from dpcfl_net.core.errors import ConfigError, DpcflError, RunFailed, StopRun
from dpcfl_net.core.files import reason, write_text
from dpcfl_net.core.locks import run_lock
from dpcfl_net.core.plugins import short
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.signing import read_operator_key
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.build import make_job, with_noise_seed
from dpcfl_net.experiment.config import Config
from dpcfl_net.experiment.job_files import Job, read_job, write_job
from dpcfl_net.experiment.statement import replace_one_epsilon
from dpcfl_net.launch import processes
from dpcfl_net.launch.interrupts import Interrupts
from dpcfl_net.launch.placement.placements import LocalPlacement, Placement
from dpcfl_net.results import summary
from dpcfl_net.results.models import export_models
from dpcfl_net.transport.keys import make_operator_keys

FIRST_COUNT_S = 1.0  # what counting epsilon is taken to cost before the first time: a run of seconds counts at its end only
STATEMENT_S = 1.0  # how long a stopped run waits for its epsilon under replacement, which a report computes as well


# Settings of a run inside the calling process: no message crosses a wire, so that there is no transcript.
IN_PROCESS = {"runtime.federation": "in-process", "output.transcript": "off"}


@dataclass(frozen=True)
class Kept:
    """A run folder that may be resumed. seconds: what it took so far; finished: whether all of its rounds are done."""

    config: Config
    document: dict[str, Any]

    @property
    def finished(self) -> bool:
        return self.document.get("state") == "finished"

    @property
    def seconds(self) -> float:
        return float(self.document.get("wall_s", 0.0))


def kept(folder: Path, *, elsewhere: bool = False, warn: Callable[[str], None] = lambda text: None) -> Kept:
    """Read a run folder that is to be resumed.

    Args:
        folder: The run folder.
        elsewhere: Whether its workers may be on other hosts.
        warn: Called with what is wrong with a run.json that cannot be read; it is made again.

    Returns:
        Its configuration and run.json.

    Raises:
        ConfigError: If the folder holds no run, or a damaged one, or one whose workers are on other hosts.
        Refused: If its job is not signed.
    """
    if not RunFolder(folder).config.is_file():
        raise ConfigError(f"{folder} is not a run folder: it holds no config.yaml")
    try:
        config = configuration.load(RunFolder(folder).config)
    except ConfigError as error:
        raise ConfigError([f"{RunFolder(folder).config}: {problem}" for problem in error.problems]) from None
    if not elsewhere and RunFolder(folder).placement.exists():
        raise ConfigError(f"the workers of {folder} are on other hosts: go on with dpcfl launch --resume {folder} --on ...")
    summary.read_run_job(folder)
    try:
        return Kept(config, summary.read_document(folder))
    except ConfigError as error:
        warn(str(error))
        return Kept(config, {})


class Shown(Protocol):
    """Where a run's progress is shown."""

    def update(self, view: Any) -> None: ...

    def close(self) -> None: ...


def new_folder(config: Config, out: Path) -> Path:
    """An empty run folder below `out`, named after the configuration and the time; OSError if none can be made."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    stem = f"{config.name}-{short(config.algorithm['name'])}-{stamp}"
    for count in range(100):
        folder = out / (stem if not count else f"{stem}-{count}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not folder.exists():  # what is there is `out`, and no folder
                raise
            continue
        return folder
    raise ConfigError(f"no free name for a run folder {out / stem}")


def prepare(folder: Path, config: Config, site: Placement | None = None) -> None:
    """Keys, each made where it is used, the signed job and the resolved configuration: all that a run starts from."""
    keys = RunFolder(folder).keys
    make_operator_keys(keys)
    (site or LocalPlacement()).make_keys(keys, sum(config.data.clients), config.runtime.clients_per_worker)
    config = with_noise_seed(config)
    job = make_job(config, keys)
    write_config(folder, config)
    write_job(job, folder, keys)


def write_config(folder: Path, config: Config) -> None:
    """Write the resolved configuration: itself a valid CONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(RunFolder(folder).config, yaml_file.dump(config.model_dump(mode="json", exclude={"algorithms"})))


def run_and_report(
    folder: Path,
    config: Config,
    before: float = 0.0,
    site: Placement | None = None,
    interrupts: Interrupts | None = None,
    *,
    calling_process: bool = False,
) -> tuple[int, dict[str, Any]]:
    """Run as `run_in`, print progress and result, and write the report; (exit code, run.json).

    In the calling process progress is printed in plain lines, so that the terminal is free for a debugger.
    """
    if interrupts is None:
        with Interrupts(until_exit=True) as own:
            return run_and_report(folder, config, before, site, own, calling_process=calling_process)
    from dpcfl_net.launch.cli.screen import PlainLines, open_screen

    screen = PlainLines() if calling_process else open_screen()
    document, failure = run_in(folder, config, screen, before, site, interrupts, tell=_tell, calling_process=calling_process)
    if not document:
        left = folder.exists()
        print(
            f"stopped before it went on; again: {_again(folder, site)}"
            if left
            else "stopped before the run began: nothing is left of it"
        )
        return 130, document
    # The first signal may have ended the run; one more says that nobody waits for the report either.
    code = _report(folder, interrupts) if interrupts.count <= (document["state"] == "interrupted") else 130
    again = f"go on with: {_again(folder, site)}"
    if failure is not None:
        print(f"what was done is in {folder}; {again}")
        raise failure
    if document["state"] == "interrupted":
        print(f"stopped after round {document['rounds_done']} of {config.rounds}; {again}")
        return 130, document
    screen.finish(document)
    print(f"run folder {folder}, report {RunFolder(folder).report if code == 0 else f'not written: dpcfl report {folder}'}")
    return code, document


def run_in(
    folder: Path,
    config: Config,
    screen: Shown,
    before: float = 0.0,
    site: Placement | None = None,
    interrupts: Interrupts | None = None,
    tell: Callable[[DpcflError], None] = lambda failure: None,
    *,
    calling_process: bool = False,
) -> tuple[dict[str, Any], DpcflError | None]:
    """Start or resume the run of a folder, watch it, stop all its processes, write run.json and the models. Prints nothing.

    Args:
        folder: The run folder; an empty one gets a new job.
        config: The run's configuration.
        screen: Called with the progress several times a second. If it raises StopRun, the run is interrupted.
        before: Seconds that the run took before it is resumed.
        site: Where the workers are; this machine unless it is given.
        interrupts: Signals that interrupt the run.
        tell: Called with a failure at once, before the end is written down.
        calling_process: Run everything in this process instead of processes of its own.

    Returns:
        run.json and what the run failed of, if it did. The state is `interrupted` after a signal; run.json is empty and the
        folder removed if nothing had begun.

    Raises:
        ConfigError: If another process runs the folder.
    """
    if interrupts is None:
        with Interrupts() as own:
            return run_in(folder, config, screen, before, site, own, tell, calling_process=calling_process)
    site = site or LocalPlacement()
    with run_lock(folder):
        fresh = all(path == RunFolder(folder).lock for path in folder.iterdir())
        run: processes.Run | None = None
        book: Book | None = None
        state, failure = "failed", None
        try:
            with interrupts.raising():
                interrupts.check()
                run = processes.run_of(folder, config, site, calling_process)
                run.warm()
                if fresh:
                    prepare(folder, config, site)
                job = read_job(folder, read_operator_key(RunFolder(folder).operator_key))
            book = Book(folder, job, before, run)
            run.start(job, interrupts)
            book.write("running")
            run.watch(lambda: screen.update(book.look()), interrupts)
            run.finish()
            screen.update(book.look())
            state = "finished"
        except (KeyboardInterrupt, StopRun):
            state = "interrupted"
        except (DpcflError, OSError) as error:
            failure = error if isinstance(error, DpcflError) else RunFailed(_words(folder, error))
            screen.close()
            tell(failure)
        except Exception:  # an error of the user's own code in this process comes out as it is
            if book is not None:
                book.write(state, last=True)
            raise
        finally:
            screen.close()
            if run is not None:
                run.stop()
        if book is None:
            if fresh:  # made just now: half of a job is none
                shutil.rmtree(folder, ignore_errors=True)
            if failure is not None:
                raise failure
            return {}, None
        try:
            document = book.write(state, last=True)
            export_models(folder, book.job, config.data.root, personal=config.output.personal_models)
        except OSError as error:
            return book.document, failure or RunFailed(_words(folder, error))
        except DpcflError as error:
            return book.document, failure or error
        return document, failure


def _report(folder: Path, interrupts: Interrupts) -> int:
    """Write report.html; an exit code: 130 if a signal came meanwhile, 4 if it cannot be written, 0 if it is there."""
    try:
        with interrupts.raising():
            from dpcfl_net.report.page import write_report

            write_report(folder)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"warning: {_words(folder, error)}", file=sys.stderr)
        return RunFailed.exit_code
    return 0


def _tell(failure: DpcflError) -> None:
    """Say at once what a run failed of; `dpcfl_net.launch.cli.main` does not repeat it."""
    print(f"error: {failure}", file=sys.stderr, flush=True)
    failure.told = True


def _words(folder: Path, error: OSError) -> str:
    return f"{error.filename or folder}: {reason(error)}"


def _again(folder: Path, site: Placement | None) -> str:
    return f"dpcfl run --resume {folder}" if site is None else f"dpcfl launch --resume {folder} --on ... (as before)"


class Book:
    """Keeps run.json and the epsilon lines while a run goes; the operator's side, which may know everything."""

    def __init__(self, folder: Path, job: Job, before: float, run: processes.Run) -> None:
        self.folder, self.job, self.before, self._run = folder, job, before, run
        self.document: dict[str, Any] = {}
        self.started = time.time()
        self._replace_one: float | None = None
        self._round, self._cost, self._counted = 0, FIRST_COUNT_S, time.monotonic()
        self._statement = threading.Thread(target=self._compute_replace_one, daemon=True)
        self._statement.start()

    def look(self) -> Any:
        """The screen's view; now and then the epsilon lines are brought up to date, at a tenth of the time at most."""
        from dpcfl_net.launch.cli.progress import tail_progress

        view = tail_progress(self.folder)
        if view.round > self._round and time.monotonic() - self._counted > 10 * self._cost:
            start = time.monotonic()
            summary.write_epsilon_lines(self.folder, self.job)
            self._round, self._counted = view.round, time.monotonic()
            self._cost = self._counted - start
            view = tail_progress(self.folder)
        return view

    def write(self, state: str, *, last: bool = False) -> dict[str, Any]:
        """Bring run.json up to date."""
        if last:
            self._statement.join(None if state == "finished" else STATEMENT_S)
            with contextlib.suppress(OSError):  # a full disk: they follow from the ledgers, and run.json matters more
                summary.write_epsilon_lines(self.folder, self.job)
        self.document = summary.run_document(
            self.folder,
            self.job,
            state=state,
            wall_s=self.before + time.time() - self.started,
            processes=self._run.processes(),
            replace_one=self._replace_one,
            devices=self._run.devices(),
        )
        summary.write_run(self.folder, self.document)
        return self.document

    def _compute_replace_one(self) -> None:
        self._replace_one = replace_one_epsilon(self.job.protocol)
