"""A run with all that its user reads: progress and result on the terminal, and the report."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpcfl_net.core.errors import ConfigError, DpcflError, RunFailed
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.launch import chaos
from dpcfl_net.launch.cli.errors import print_error
from dpcfl_net.launch.cli.output_room import STOPPED_S, drop_output, has_room, say_last
from dpcfl_net.launch.interrupts import Interrupts
from dpcfl_net.launch.running import DEFAULTS, RunOptions, failed_access, run_in
from dpcfl_net.results import models
from dpcfl_net.results.run_files import report_command, resume_command

if TYPE_CHECKING:
    from dpcfl_net.launch.cli.screen import PlainLines, Screen


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

    screen = PlainLines() if options.in_calling_process else open_screen()
    document, failure = _follow(folder, config, options, screen)
    resume = resume_command(folder)
    if not document:
        say_last(
            f"stopped before the first round; resume with: {resume}"
            if folder.exists()
            else "stopped before the run began; the new run folder was removed"
        )
        return 130, document
    # The first signal may have interrupted the run; a further one also cancels the report.
    cancelled = options.interrupts.count > (document["state"] == "interrupted")
    code = 130 if cancelled else _write_report(folder, options.interrupts)
    if failure is not None:
        kept = "completed rounds are in" if document.get("rounds_done") else "no round was completed in"
        say_last(f"{kept} {folder}; resume with: {resume}")
        raise failure
    if document["state"] == "interrupted":
        say_last(f"stopped after round {document['rounds_done']} of {config.rounds}; resume with: {resume}")
        return 130, document
    try:
        with options.interrupts.raising():  # the reader of the output may not read
            if options.interrupts.count and not has_room(sys.stdout, STOPPED_S):
                raise KeyboardInterrupt
            screen.finish(document)
            if options.chaos is not None:
                print(f"faults:     {chaos.summary(folder)} ({RunFolder(folder).spans.name})")
            _print_files(folder, has_report=code == 0)
            sys.stdout.flush()
    except KeyboardInterrupt:
        drop_output()
        return 130, document
    return code, document


def _follow(
    folder: Path, config: Config, options: RunOptions, screen: Screen | PlainLines
) -> tuple[dict[str, Any], DpcflError | None]:
    """Run a folder as `run_in` does, on a screen, and give its rounds to the trackers."""
    from dpcfl_net.launch.feed import RoundFeed
    from dpcfl_net.launch.watcher import TrackedScreen

    feed = RoundFeed(folder, config, options.trackers)
    try:
        document, failure = run_in(
            folder, config, TrackedScreen(screen, feed), replace(options, on_failure=_print_failure, recording=_recording)
        )
        if document.get("state") == "finished":
            feed.update(ended=True)
    finally:
        feed.end()
    return document, failure


def _recording() -> AbstractContextManager[None]:
    """Show in a terminal that the end of a run is recorded: its screen is gone, and its result is not printed yet."""
    from dpcfl_net.launch.cli.steps import computing

    return computing("computing epsilon by round and writing models", on_stdout=True)


def _write_report(folder: Path, interrupts: Interrupts) -> int:
    """Write report.html; return 130 after a signal, 4 if it cannot be written, else 0."""
    try:
        with interrupts.raising():
            from dpcfl_net.launch.cli.steps import computing

            with computing("writing the report", on_stdout=True):
                from dpcfl_net.report.page import write_report

                write_report(folder)
    except KeyboardInterrupt:
        return 130
    except (ConfigError, OSError) as error:
        print_error(f"warning: {failed_access(folder, error) if isinstance(error, OSError) else error}")
        return RunFailed.exit_code
    return 0


def _print_files(folder: Path, *, has_report: bool) -> None:
    """Print where a finished run, its report and its models are."""
    files = sorted((folder / models.FOLDER).glob("*.safetensors"))
    more = f" and {len(files) - 1} more in this folder" if len(files) > 1 else ""
    print(f"run folder: {folder}")
    print(f"report:     {RunFolder(folder).report if has_report else f'not written; write it with: {report_command(folder)}'}")
    print(f"models:     {files[0]}{more}" if files else "models:     none; the server of this algorithm has no model")


def _print_failure(failure: DpcflError) -> None:
    """Print a failure at once; `dpcfl_net.launch.cli.main` does not print it again."""
    print_error(f"error: {failure}")
    failure.printed = True
