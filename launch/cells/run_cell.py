"""Runs one cell of a sweep in this process."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dpcfl_net.core.errors import DpcflError, RunInUse
from dpcfl_net.core.locks import try_own
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.launch import new_run, running
from dpcfl_net.launch.cells.outcome import FAILED, FINISHED, IN_USE, INTERRUPTED, CellOutcome, one_line
from dpcfl_net.launch.drafts import hidden_draft, remove_left_drafts
from dpcfl_net.launch.interrupts import Interrupts
from dpcfl_net.launch.own_code import check_code
from dpcfl_net.launch.sweep_grid import cell_folder
from dpcfl_net.results import summary


def run_cell(
    config: Config, store: Path, display: running.ProgressDisplay | None = None, slots: int | None = None
) -> CellOutcome:
    """Start or resume one configuration in its folder of the store, unless it is finished or another process runs it.

    Args:
        config: The configuration.
        store: Folder of the runs.
        display: Shows the progress; None: one line in a terminal.
        slots: Workers that may compute at once if `runtime.slots` is "auto"; None: one per usable core.

    Returns:
        The outcome; IN_USE if another process runs the cell, INTERRUPTED after a signal.
    """
    if display is None:
        from dpcfl_net.launch.cli.screen import ProgressLine

        display = ProgressLine()
    folder, start = cell_folder(config, store), time.monotonic()

    def outcome(state: str, error: object = "") -> CellOutcome:
        return CellOutcome(folder, state, False, time.monotonic() - start, one_line(error))

    try:
        if config.runtime.federation == "network":
            check_code([config])  # its processes import the code of the files
        with Interrupts() as interrupts:
            with interrupts.raising():
                if not RunFolder(folder).protocol.exists():
                    new_run.check_gpus(config)
                    _prepare(folder, config, display.prepare)
                saved = summary.read_document(folder)
            if saved.get("state") == FINISHED:
                return CellOutcome(folder, FINISHED, True)
            options = running.RunOptions(seconds_before=float(saved.get("wall_s", 0.0)), interrupts=interrupts)
            document, failure = running.run_in(folder, with_slots(config, slots), display, options)
    except KeyboardInterrupt:
        return outcome(INTERRUPTED)
    except RunInUse as error:
        return outcome(IN_USE, error)
    except DpcflError as error:
        return outcome(FAILED, error)
    return outcome(document.get("state", INTERRUPTED), failure or "")


def with_slots(config: Config, slots: int | None) -> Config:
    """Return the configuration with a number of compute slots, unless it sets its own."""
    if slots is None or config.runtime.slots != "auto":
        return config
    return config.model_copy(update={"runtime": config.runtime.model_copy(update={"slots": slots})})


def _prepare(folder: Path, config: Config, on_step: Callable[[str], None]) -> None:
    """Create a run folder atomically: an incomplete one could not be resumed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_left_drafts(folder.parent)
    with _draft(folder) as draft:
        try:
            new_run.prepare(draft, config, on_step=on_step)
            draft.rename(folder)
        except OSError:
            if not RunFolder(folder).protocol.exists():  # otherwise another process has created it with the same job
                raise


@contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    """Create a folder beside `folder`, locked while it is a draft; it is removed at the end if it still has its name."""
    draft, handle = _locked_draft(folder)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        os.close(handle)


def _locked_draft(folder: Path) -> tuple[Path, int]:
    """Create a draft and take its lock; until then another command may take it for a left one and remove it."""
    while True:
        draft = hidden_draft(folder)
        draft.mkdir()
        with suppress(FileNotFoundError):
            if (handle := try_own(RunFolder(draft).lock)) is not None:
                return draft, handle
