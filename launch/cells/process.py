"""Process that runs cells of a sweep or a tuning for another process (`local.CellProcess`), until its standard input ends.

It reads a line for each cell and writes the outcome as a line. {"config": {...}, "run": "runs/store/global-0123", "slots": 2} is a
resolved configuration and its run folder; {"cell": 3, "slots": 2} is a cell of the sweep.json in the folder of its argument.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dpcfl_net.core.errors import ConfigError, DpcflError
from dpcfl_net.core.process_log import log_if_chosen
from dpcfl_net.launch.cells.outcome import FAILED, CellOutcome, one_line

if TYPE_CHECKING:
    from dpcfl_net.experiment.config_schema import Config


def main(arguments: Sequence[str]) -> int:
    """Run cells as standard input asks.

    Args:
        arguments: Folder of the sweep or the tuning.

    Returns:
        The exit code.
    """
    (folder,) = arguments
    outcomes = os.dup(1)
    os.dup2(2, 1)  # other output must not mix with outcomes
    os.set_inheritable(outcomes, False)
    from dpcfl_net.launch.placement import parents

    log_if_chosen()
    parents.warm()
    cells: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_read, args=(sys.stdin, cells, busy), daemon=True).start()
    while (cell := cells.get()) is not None:
        line = _run(Path(folder), cell).to_json() + "\n"
        busy.clear()
        try:
            os.write(outcomes, line.encode())
        except BrokenPipeError:
            return 4
    return 0


def _read(source: TextIO, cells: queue.SimpleQueue[dict[str, Any] | None], busy: threading.Event) -> None:
    """Pass on the lines of the parent. Its end interrupts a cell that runs or is to run, as a signal would."""
    for line in source:
        if line.endswith("\n"):  # a parent that was killed may leave a part of a line
            busy.set()  # here, not where the cell begins: the parent may end before that
            cells.put(json.loads(line))
    cells.put(None)
    if busy.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def _run(folder: Path, cell: Mapping[str, Any]) -> CellOutcome:
    from dpcfl_net.launch.cells.run_cell import run_cell
    from dpcfl_net.launch.running import Quiet

    try:
        config, store = given(cell) if "config" in cell else _in_sweep(folder, cell["cell"])
    except DpcflError as error:
        return CellOutcome(folder, FAILED, error=one_line(error))
    return run_cell(config, store, Quiet(), cell["slots"])


def given(cell: Mapping[str, Any]) -> tuple[Config, Path]:
    """Read the resolved configuration of a line.

    Args:
        cell: The line, with config and run.

    Returns:
        The configuration, and the folder of the runs.

    Raises:
        ConfigError: If its run folder is another one than that of the line.
    """
    from dpcfl_net.experiment.config_schema import Config
    from dpcfl_net.launch.own_code import own_code
    from dpcfl_net.launch.sweep_grid import cell_folder

    config, run = Config.model_validate(cell["config"], strict=True), Path(cell["run"])
    if (found := cell_folder(config, run.parent)) != run:
        why = (
            "your own code has changed since the command began" if own_code(config) else "its resolved form cannot be read back"
        )
        raise ConfigError(f"the configuration of {run} belongs to {found}: {why}")
    return config, run.parent


def _in_sweep(folder: Path, index: int) -> tuple[Config, Path]:
    """Configuration of a cell that sweep.json names, and the folder of the runs."""
    from dpcfl_net.launch.sweeps import read_cell

    cell, store = read_cell(folder, index)
    return cell.config, store
