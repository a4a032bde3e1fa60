"""A time budget: cells that have not started when it is spent stay as they are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpcfl_net.launch.cells.outcome import WAITING, CellOutcome
from dpcfl_net.launch.cells.queue import CellPlace


class InTime:
    """A place that starts no cell after a time.

    Args:
        place: Where cells run.
        folders: Run folder of each cell.
        until: Monotonic time after which no cell starts; None: no limit.

    Attributes:
        late: Numbers of the cells that did not start.
    """

    def __init__(self, place: CellPlace, folders: Sequence[Path], until: float | None) -> None:
        self._place, self._folders, self._until = place, folders, until
        self._told = 0
        self.late: list[int] = []

    def free(self) -> bool:
        """See `CellPlace`."""
        return self._place.free()

    def start(self, index: int, left: int) -> None:
        """See `CellPlace`."""
        if self._until is not None and time.monotonic() > self._until:
            self.late.append(index)
        else:
            self._place.start(index, left)

    def wait(self, also: Sequence[Any], timeout_s: float) -> list[tuple[int, CellOutcome]]:
        """See `CellPlace`. Late cells have ended at once, as WAITING."""
        late, self._told = self.late[self._told :], len(self.late)
        ended = self._place.wait(also, 0 if late else timeout_s)
        return [*ended, *((index, CellOutcome(self._folders[index], WAITING)) for index in late)]

    def stop(self) -> list[tuple[int, CellOutcome]]:
        """See `CellPlace`."""
        return self._place.stop()

    def close(self) -> None:
        """See `CellPlace`."""
        self._place.close()
