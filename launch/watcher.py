"""Progress displays that also give the rounds of a run to callbacks and trackers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpcfl_net.core.errors import StopRun
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.launch.cells.queue import CellWatcher
from dpcfl_net.launch.cli.progress import ProgressView
from dpcfl_net.launch.feed import Callback, RoundFeed
from dpcfl_net.launch.progress_bar import Bar
from dpcfl_net.launch.running import ProgressDisplay


class Watcher(ProgressDisplay):
    """Progress bar with callbacks.

    Args:
        folder: The run folder; rounds that it already holds are not reported.
        config: The run's configuration.
        callbacks: Called with each round's metrics, see `RoundFeed`.
        bar: The progress bar.
        title: Text before the bar.
    """

    def __init__(self, folder: Path, config: Config, callbacks: Sequence[Callback], bar: Bar, title: str) -> None:
        self.feed = RoundFeed(folder, config, callbacks)
        self._bar, self._title, self._rounds = bar, title, config.rounds

    def prepare(self, step: str) -> None:
        self._bar.prepare(self._title, step)

    def update(self, view: ProgressView) -> None:
        """Show the round; StopRun once a callback has stopped the run."""
        self.feed.update()
        accuracy = self.feed.last.accuracy if self.feed.last is not None else None
        self._bar.update(self._title, view.round, self._rounds, accuracy, view.seconds_left)
        if self.feed.stopped:
            raise StopRun

    def close(self) -> None:
        self._bar.close()


class TrackedScreen:
    """A screen whose run is also given to trackers (see `running.ProgressDisplay`).

    Args:
        screen: The screen.
        feed: Trackers of the run.
    """

    def __init__(self, screen: ProgressDisplay, feed: RoundFeed) -> None:
        self.prepare, self.close, self._screen, self._feed = screen.prepare, screen.close, screen, feed

    def update(self, view: ProgressView) -> None:
        self._feed.update()
        self._screen.update(view)


class CellsBar(CellWatcher):
    """Progress bar of a sweep whose cells run at the same time.

    Args:
        bar: The progress bar.
        title: Text before the bar.
        total: Number of cells.
    """

    def __init__(self, bar: Bar, title: str, total: int) -> None:
        self._bar, self._title, self._total, self._done = bar, title, total, 0

    def ended(self, number: int, cell: object, outcome: object) -> None:
        """Count a cell that ended."""
        self._done += 1

    def update(self, running: Sequence[int], in_use: Sequence[int]) -> None:
        self._bar.update(f"{self._title}: cells", self._done, self._total, None, None)

    def close(self) -> None:
        self._bar.close()
