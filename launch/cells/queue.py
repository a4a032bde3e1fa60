"""Order in which cells run: those that another process runs wait until it ends, and all others go first."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.locks import is_running
from dpcfl_net.launch.cells.outcome import FINISHED, IN_USE, INTERRUPTED, WAITING, CellOutcome
from dpcfl_net.launch.interrupts import Interrupts
from dpcfl_net.results import summary

POLL_S = 0.25  # between two looks at the cells


class CellPlace(Protocol):
    """Where cells run."""

    def free(self) -> bool:
        """Return True if another cell can start."""

    def start(self, index: int, left: int) -> None:
        """Start a cell.

        Args:
            index: Number of the cell, from 0.
            left: Number of cells without outcome, this one included.
        """

    def wait(self, also: Sequence[Any], timeout_s: float) -> list[tuple[int, CellOutcome]]:
        """Wait until a cell ends or an object of `also` is readable, at most `timeout_s`; return the cells that ended."""

    def stop(self) -> list[tuple[int, CellOutcome]]:
        """Interrupt the cells that run and return their outcomes."""

    def close(self) -> None:
        """End all processes."""


class CellWatcher(Protocol):
    """Shows the cells of a sweep."""

    def update(self, running: Sequence[int], in_use: Sequence[int]) -> None:
        """Show the cells that run here, and those that other processes run; called several times a second."""

    def close(self) -> None:
        """Stop drawing."""


class InThisProcess(CellPlace):
    """Runs cells one after another in this process.

    Args:
        run: Runs a cell.
    """

    def __init__(self, run: Callable[[int], CellOutcome]) -> None:
        self._run = run
        self._ended: list[tuple[int, CellOutcome]] = []

    def free(self) -> bool:
        return not self._ended

    def start(self, index: int, left: int) -> None:
        self._ended.append((index, self._run(index)))

    def wait(self, also: Sequence[Any], timeout_s: float) -> list[tuple[int, CellOutcome]]:
        if not self._ended:
            wait(also, timeout_s)
        ended, self._ended = self._ended, []
        return ended

    def stop(self) -> list[tuple[int, CellOutcome]]:
        return []

    def close(self) -> None:
        """There is no other process."""


class CellQueue:
    """Runs cells at a place.

    Args:
        folders: Run folder of each cell.
        place: Where cells run.
        on_end: Called with number (from 0) and outcome of each cell that ended.
        watcher: Shows the cells.
        until: Monotonic time after which no cell starts; None: no limit.

    Attributes:
        late: Numbers of the cells that there was no time for.
        interrupted: True after a signal; all cells may have finished nevertheless.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        place: CellPlace,
        on_end: Callable[[int, CellOutcome], None],
        watcher: CellWatcher | None = None,
        until: float | None = None,
    ) -> None:
        self._folders, self._place, self._on_end, self._watcher = list(folders), place, on_end, watcher
        self._until = math.inf if until is None else until
        self.late: list[int] = []
        self.interrupted = False
        self._waiting = deque(range(len(folders)))
        self._in_use: list[int] = []
        self._running: list[int] = []
        self._outcomes: dict[int, CellOutcome] = {}

    def add(self, folders: Sequence[Path]) -> None:
        """Add cells after the others; `on_end` may call it.

        Args:
            folders: Run folder of each cell.
        """
        self._waiting.extend(range(len(self._folders), len(self._folders) + len(folders)))
        self._folders.extend(folders)

    def run(self) -> list[CellOutcome]:
        """Run all cells, or until a signal.

        Returns:
            Outcomes in the order of the cells; WAITING for those that did not start.
        """
        try:
            with Interrupts() as interrupts:
                while len(self._outcomes) < len(self._folders) and not interrupts.count:
                    self._start()
                    self._take(self._place.wait([interrupts], POLL_S if self._running or self._in_use else 0))
                    if self._watcher is not None:
                        self._watcher.update(self._running, self._in_use)
                    if any(outcome.state == INTERRUPTED for outcome in self._outcomes.values()):
                        break
                self._take(self._place.stop())
                self.interrupted = interrupts.count > 0
        finally:
            if self._watcher is not None:
                self._watcher.close()
            self._place.close()
        return [self._outcomes.get(index, CellOutcome(folder, WAITING)) for index, folder in enumerate(self._folders)]

    def _start(self) -> None:
        if not self._waiting:
            self._waiting.extend(index for index in self._in_use if not is_running(self._folders[index]))
            self._in_use = [index for index in self._in_use if index not in self._waiting]
        while self._waiting and self._place.free():
            index = self._waiting.popleft()
            if is_running(self._folders[index]):
                self._in_use.append(index)
            elif _is_finished(self._folders[index]):
                self._end(index, CellOutcome(self._folders[index], FINISHED, cached=True))
            elif time.monotonic() > self._until:
                self.late.append(index)
                self._outcomes[index] = CellOutcome(self._folders[index], WAITING)
            else:
                self._place.start(index, len(self._folders) - len(self._outcomes))
                self._running.append(index)

    def _take(self, ended: Sequence[tuple[int, CellOutcome]]) -> None:
        for index, outcome in ended:
            self._running.remove(index)
            if outcome.state == IN_USE:
                self._in_use.append(index)
            else:
                self._end(index, outcome)

    def _end(self, index: int, outcome: CellOutcome) -> None:
        self._outcomes[index] = outcome
        self._on_end(index, outcome)


def _is_finished(folder: Path) -> bool:
    try:
        return summary.read_document(folder).get("state") == FINISHED
    except ConfigError:  # damaged: the cell reports it
        return False
