"""Grids of runs: each cell is a run folder in a store shared by all sweeps, so that finished runs are not repeated."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpcfl_net.core import yaml_file
from dpcfl_net.core.atomic import write_atomically
from dpcfl_net.core.errors import ConfigError, RunFailed
from dpcfl_net.core.files import read_bytes
from dpcfl_net.core.locks import is_running
from dpcfl_net.core.run_folder import SweepFolder
from dpcfl_net.experiment import config as configuration
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.launch import running
from dpcfl_net.launch.cells.labels import labels
from dpcfl_net.launch.cells.local import LocalCells
from dpcfl_net.launch.cells.outcome import FAILED, FINISHED, INTERRUPTED, RUNNING, WAITING, CellOutcome
from dpcfl_net.launch.cells.queue import CellPlace, CellQueue, CellWatcher, InThisProcess
from dpcfl_net.launch.cells.run_cell import run_cell
from dpcfl_net.launch.new_run import mode_of
from dpcfl_net.launch.sweep_axes import axes_of, parse_axes
from dpcfl_net.launch.sweep_device import DEVICES, check_devices, with_device
from dpcfl_net.launch.sweep_grid import Cell, Source, cell_at, cell_folder, grid
from dpcfl_net.results import summary
from dpcfl_net.results.number_format import duration, percent
from dpcfl_net.results.result import read_document

STORE = "store"


@dataclass(frozen=True)
class Sweep:
    """A grid over one configuration.

    Attributes:
        document: The configuration as a dictionary.
        axes: Values of each axis as YAML text, by dotted key.
        cells: All combinations, the last axis fastest.
        folder: Folder of sweep.json and the report.
        store: Folder of the runs.
        device: Device of cells with `runtime.device: auto` that other hosts run; None: that of this machine.
    """

    document: dict[str, Any]
    axes: dict[str, list[str]]
    cells: list[Cell]
    folder: Path
    store: Path
    device: str | None = None

    @classmethod
    def of(
        cls, source: Source, axes: Iterable[str] | Mapping[str, Sequence[Any]], out: Path, device: str | None = None
    ) -> Sweep:
        """Build the grid and check every cell.

        Args:
            source: Configuration, as `configuration.load` accepts it.
            axes: Items as `parse_axes` accepts them, or values by dotted key.
            out: Parent of the sweep's folder and of the run store shared by all sweeps.
            device: "cpu" or "cuda" if other hosts run the cells; None: this machine runs them.

        Raises:
            ConfigError: With every problem of every cell.
        """
        texts = axes_of(axes) if isinstance(axes, Mapping) else parse_axes(axes)
        cells = grid(source, texts)
        check_devices(cells, device)
        cells = [replace(cell, config=with_device(cell.config, device)) for cell in cells]
        document = configuration.source_document(source)
        identity = json.dumps([document, texts, *([device] if device == "cuda" else [])], sort_keys=True, default=str)
        folder = out / f"{cells[0].config.name}-sweep-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
        return cls(document, texts, cells, folder, out / STORE, device)

    def run(
        self,
        on_cell: Callable[[int, Cell, CellOutcome], None] = lambda number, cell, outcome: None,
        display: Callable[[int, Cell], running.ProgressDisplay] | None = None,
        place: CellPlace | None = None,
        watcher: CellWatcher | None = None,
    ) -> list[CellOutcome]:
        """Run the unfinished cells and keep sweep.json up to date. A failed cell does not end the sweep.

        A cell that another process runs is left to it; the sweep waits for its end, and resumes it if it did not finish.

        Args:
            on_cell: Called with number (from 1), cell and outcome of each cell, in the order in which cells end.
            display: Makes the progress display of a cell that this process runs; None: one line in a terminal.
            place: Where cells run; None: one after another in this process.
            watcher: Shows cells that run at the same time.

        Returns:
            Outcomes in the order of the cells. After a signal some are INTERRUPTED or WAITING.
        """
        states = [FINISHED if done else WAITING for done in self.done()]
        self.write(states)

        def ended(index: int, outcome: CellOutcome) -> None:
            states[index] = outcome.state
            self.write(states)
            on_cell(index + 1, self.cells[index], outcome)

        def run_one(index: int) -> CellOutcome:
            cell = self.cells[index]
            return run_cell(cell.config, self.store, display(index + 1, cell) if display is not None else None)

        place = place or InThisProcess(run_one)
        return CellQueue(self.folders(), place, ended, watcher).run()

    def failures(self, outcomes: Sequence[CellOutcome]) -> list[str]:
        """Return a message for each failed cell, with its folder."""
        failed = [(cell.label, outcome) for cell, outcome in zip(self.cells, outcomes, strict=True) if outcome.state == FAILED]
        width = max((len(label) for label, _ in failed), default=0) + 1
        return [f"{label + ':':<{width}} {outcome.error} (run folder {outcome.folder})" for label, outcome in failed]

    def folders(self) -> list[Path]:
        """Return the run folder of each cell."""
        return [cell_folder(cell.config, self.store) for cell in self.cells]

    def done(self) -> list[bool]:
        """Return True for each cell whose finished run is in the store."""
        return [summary.read_document(folder).get("state") == FINISHED for folder in self.folders()]

    def write(self, states: Sequence[str]) -> None:
        """Write sweep.json: configuration, axes, and the state of each cell."""
        cells = [
            {"values": cell.values, "folder": os.path.relpath(folder, self.folder), "state": state}
            for cell, folder, state in zip(self.cells, self.folders(), states, strict=True)
        ]
        axes = {key: [yaml_file.parse(text, f"axis {key}") for text in texts] for key, texts in self.axes.items()}
        document = {"config": self.document, "axes": axes, "device": self.device, "cells": cells}
        self.folder.mkdir(parents=True, exist_ok=True)
        text, mode = json.dumps(document, indent=2, default=str) + "\n", mode_of(self.document, self.axes)
        write_atomically(SweepFolder(self.folder).sweep, text, mode=mode)


def read_cell(folder: Path, index: int) -> tuple[Cell, Path]:
    """Read one cell of a sweep that another process has written.

    Args:
        folder: Folder of the sweep.
        index: Number of the cell, from 0.

    Returns:
        The cell, and the folder of the runs.

    Raises:
        ConfigError: If sweep.json is damaged, or if this cell is another run here than where the sweep was written.
    """
    document, path = read_document(folder), SweepFolder(folder).sweep
    device = document.get("device")
    if not isinstance(document.get("config"), dict) or device not in (None, *DEVICES):
        raise ConfigError(f"{path} is damaged: it needs `config`, and `device` must be null, {' or '.join(DEVICES)}")
    cell = cell_at(document["config"], axes_of(document["axes"]), index)
    cell = replace(cell, config=with_device(cell.config, device))
    written = Path(os.path.normpath(folder / document["cells"][index]["folder"]))
    if cell_folder(cell.config, written.parent) != written:
        raise ConfigError(
            f"cell {index} ({cell.label}) is {written.name} in {path} and another run here: this host has another version of "
            "dpcfl_net or of your own code, or another kind of device for runtime.device=auto"
        )
    return cell, written.parent


def recorded_outcomes(folder: Path) -> list[CellOutcome]:
    """Read the outcome of each cell of a sweep from its files, also while other processes run cells.

    Args:
        folder: Folder of the sweep.

    Returns:
        Outcomes in the order of the cells. RUNNING: a process runs the cell. INTERRUPTED: it started and can be resumed.

    Raises:
        ConfigError: If the folder holds no sweep.
    """
    runs = [Path(os.path.normpath(folder / cell["folder"])) for cell in read_document(folder)["cells"]]
    return [_recorded_outcome(run, SweepFolder(folder).outcome(index)) for index, run in enumerate(runs)]


def _recorded_outcome(run: Path, record: Path) -> CellOutcome:
    document = summary.read_document(run)
    state = document.get("state", WAITING)
    if state == FINISHED:
        return CellOutcome(run, FINISHED, seconds=float(document.get("wall_s", 0.0)))
    if is_running(run):
        return CellOutcome(run, RUNNING)
    if record.exists():
        return CellOutcome.from_json(run, read_bytes(record))
    return CellOutcome(run, state, error="the logs in its folder tell why" if state == FAILED else "")


def stopped(outcomes: Sequence[CellOutcome]) -> bool:
    """Return True if a signal stopped the sweep."""
    return any(outcome.state in (INTERRUPTED, WAITING) for outcome in outcomes)


def failed_cells(failures: Sequence[str], total: int) -> RunFailed:
    """Build the error of a sweep with failed cells.

    Args:
        failures: A message per failed cell.
        total: Number of cells.
    """
    return RunFailed("\n".join([f"{len(failures)} of {total} cells failed; run the same command to try them again", *failures]))


def run_cells(
    cells: Sequence[Config],
    store: Path,
    say: Callable[[str], None],
    *,
    jobs: int = 1,
    logs: Path | None = None,
    until: float | None = None,
) -> list[CellOutcome]:
    """Run configurations, each in its folder of the store.

    Finished runs are not repeated; resumes runs that stopped, crashed or failed. A failed run does not end the others.

    Args:
        cells: The configurations.
        store: Folder of the runs.
        say: Called with a line per run.
        jobs: Number of runs at once. With more than one, each has its own process and an equal share of the cores.
        logs: Folder for the logs of these processes; None: the store.
        until: Monotonic time after which no run starts; None: no limit.

    Returns:
        Outcomes in the order of the configurations; WAITING for those that there was no time for.

    Raises:
        KeyboardInterrupt: If a signal stopped a run, or came while the end of the last one was recorded.
    """
    folders, told = [cell_folder(config, store) for config in cells], labels(cells)
    place = (
        InThisProcess(lambda index: run_cell(cells[index], store))
        if jobs == 1
        else LocalCells(logs or store, cells, store, jobs)
    )

    def ended(index: int, outcome: CellOutcome) -> None:
        say(outcome_line(index + 1, len(cells), told[index], outcome))

    queue = CellQueue(folders, place, ended, until=until)
    outcomes = queue.run()
    if queue.interrupted or stopped([outcome for index, outcome in enumerate(outcomes) if index not in queue.late]):
        raise KeyboardInterrupt
    return outcomes


def outcome_line(number: int, total: int, label: str, outcome: CellOutcome) -> str:
    """Format a cell and its outcome on one line.

    Args:
        number: Number of the cell, from 1.
        total: Number of cells.
        label: Label of the cell.
        outcome: Its outcome.
    """
    return f"{number:>{len(str(total))}}/{total}  {label}  {outcome_text(outcome)}"


def outcome_text(outcome: CellOutcome) -> str:
    """Format an outcome: accuracy and duration, or the state and the error."""
    if outcome.state != FINISHED:
        return f"{outcome.state}: {outcome.error}" if outcome.error else outcome.state
    final = summary.read_document(outcome.folder)["final"]
    spent = "cached" if outcome.cached else duration(outcome.seconds)
    return f"accuracy {percent(final['accuracy_mean'])}, worst {percent(final['accuracy_worst'])}  {spent}"
