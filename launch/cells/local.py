"""Several cells at once on this machine, each process one cell after another, so that it loads the libraries once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from dpcfl_net.core.cores import usable_cores
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.run_folder import SweepFolder
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.launch.cells.outcome import FAILED, FINISHED, INTERRUPTED, CellOutcome
from dpcfl_net.launch.cells.queue import CellPlace
from dpcfl_net.launch.placement.base import end_of_process
from dpcfl_net.launch.sweep_grid import cell_folder

# The module path of this process, in which a configuration's own functions may be.
MAIN = "import sys; sys.path[:] = {path!r}; from dpcfl_net.launch.cells.process import main; sys.exit(main(sys.argv[1:]))"
STOP_S, END_S = 3.5, 0.3  # Ctrl-C ends everything within 5 s
CODE_S = 2.0  # time for a process to end after its output has ended


class CellProcess:
    """A process of `cells.process`.

    Args:
        folder: Folder of the sweep or the tuning.
        log: File for its standard error.
    """

    def __init__(self, folder: Path, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("ab") as errors:
            self._log_start = errors.tell()
            # New session: Ctrl-C reaches only the sweep, which ends all cells in order.
            self._process = subprocess.Popen(
                [sys.executable, "-c", MAIN.format(path=sys.path), str(folder)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=errors, start_new_session=True, bufsize=0,
            )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self.outcomes = self._process.stdin, self._process.stdout

    def start(self, cell: Mapping[str, Any], slots: int) -> None:
        """Start a cell; `outcome` tells if the process has ended.

        Args:
            cell: As `cells.process` takes it.
            slots: Workers that may compute at once.
        """
        line = memoryview(json.dumps({**cell, "slots": slots}).encode() + b"\n")
        try:
            while line:  # a signal may interrupt the write of a long line
                line = line[self._commands.write(line) :]
        except BrokenPipeError:
            return

    def outcome(self, folder: Path) -> CellOutcome:
        """Wait for the outcome of the cell in a run folder."""
        line = self.outcomes.readline()
        if not line.endswith(b"\n"):
            return CellOutcome(folder, FAILED, error=self._failure())
        outcome = CellOutcome.from_json(folder, line)
        if outcome.state == INTERRUPTED:  # by a signal to this process, not to the sweep
            return CellOutcome(folder, FAILED, seconds=outcome.seconds, error="stopped by a signal")
        return outcome

    def alive(self) -> bool:
        """Return True if it runs."""
        return self._process.poll() is None

    def interrupt(self) -> None:
        """Interrupt its cell."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL; the processes of its cell then end too, and the cell can be resumed."""
        self._process.kill()

    def hang_up(self) -> None:
        """Close its input, at whose end it exits."""
        self._commands.close()

    def close(self, patience_s: float = END_S) -> None:
        """End it, after `patience_s` seconds by SIGKILL."""
        self.hang_up()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.outcomes.close()

    def _failure(self) -> str:
        try:
            code: int | str = self._process.wait(CODE_S)
        except subprocess.TimeoutExpired:
            code = "none"
        lines = self._log.read_bytes()[self._log_start :].decode(errors="replace").strip().splitlines()
        return f"its process {end_of_process(code)}: {lines[-1] if lines else 'no message'} (log: {self._log})"


class LocalCells(CellPlace):
    """Runs cells in several processes on this machine. They share its cores in equal parts.

    Args:
        folder: Folder of the sweep or the tuning, for the logs.
        configs: Configuration of each cell; there may be more of them later.
        store: Folder of the runs.
        jobs: Cells at once.
    """

    def __init__(self, folder: Path, configs: Sequence[Config], store: Path, jobs: int) -> None:
        self._folder, self._configs, self._store, self._jobs = folder, configs, store, jobs
        self._idle: list[CellProcess] = []
        self._busy: dict[int, CellProcess] = {}
        self._started = 0

    def free(self) -> bool:
        return len(self._busy) < self._jobs

    def start(self, index: int, left: int) -> None:
        """Start a cell with an equal share of the cores, at least one."""
        while self._idle and not self._idle[-1].alive():
            self._idle.pop().close()
        if not self._idle:
            log = SweepFolder(self._folder).log(f"cells_{self._started}")
            self._idle.append(CellProcess(self._folder, log))
            self._started += 1
        self._busy[index] = self._idle.pop()
        cell = {"config": self._configs[index].model_dump(mode="json"), "run": str(self._run(index))}
        self._busy[index].start(cell, share(usable_cores(), min(self._jobs, left)))

    def wait(self, also: Sequence[Any], timeout_s: float) -> list[tuple[int, CellOutcome]]:
        indices: dict[Any, int] = {process.outcomes: index for index, process in self._busy.items()}
        ready = [indices[source] for source in wait([*indices, *also], timeout_s) if source in indices]
        return [(index, self._take(index)) for index in sorted(ready)]

    def stop(self) -> list[tuple[int, CellOutcome]]:
        """Interrupt the cells that run; one that does not end in time is killed, and can be resumed all the same."""
        for process in self._busy.values():
            process.interrupt()
        deadline, ended = time.monotonic() + STOP_S, []
        for index, process in sorted(self._busy.items()):
            if wait([process.outcomes.fileno()], max(0.0, deadline - time.monotonic())) and process.alive():
                outcome = self._take(index)
                ended.append((index, outcome if outcome.state == FINISHED else CellOutcome(self._run(index), INTERRUPTED)))
            else:
                process.kill()
                ended.append((index, CellOutcome(self._run(index), INTERRUPTED)))
                self._idle.append(self._busy.pop(index))
        return ended

    def close(self) -> None:
        processes = [*self._busy.values(), *self._idle]
        for process in processes:
            process.hang_up()
        deadline = time.monotonic() + END_S
        for process in processes:
            process.close(max(0.0, deadline - time.monotonic()))
        self._idle, self._busy = [], {}

    def _run(self, index: int) -> Path:
        return cell_folder(self._configs[index], self._store)

    def _take(self, index: int) -> CellOutcome:
        process, folder = self._busy.pop(index), self._run(index)
        self._idle.append(process)
        try:
            return process.outcome(folder)
        except ConfigError as error:
            return CellOutcome(folder, FAILED, error=str(error))


def share(cores: int, cells: int) -> int:
    """Return how many workers of each cell may compute at once.

    Rounded up, so that no core is idle; all workers of a machine together never use more than its cores.

    Args:
        cores: Cores of this machine.
        cells: Cells that run at once.
    """
    return -(-cores // cells)
