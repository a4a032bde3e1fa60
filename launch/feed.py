"""Gives the rounds of a run to callbacks and trackers, as the files of its folder grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np

from dpcfl_net.core import runlog
from dpcfl_net.core.errors import StopRun
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.report.trackers.base import Tracker
from dpcfl_net.results.rounds import RoundMetrics, RoundTail
from dpcfl_net.results.run import RunData

Callback = Callable[[RoundMetrics], object]


class RoundFeed:
    """Calls callbacks with each round's metrics, in order.

    A callback stops the run if it returns False or raises StopRun; another exception stops it too and is stored in `error`. Then
    only trackers get further rounds. A tracker that fails is left out from then on: the run matters more, and can be replayed to
    the tracker later. The failure is a warning of the run.

    Args:
        folder: The run folder.
        config: The run's configuration.
        callbacks: Callbacks and trackers.
        earlier: Begin with the rounds that the folder already holds; otherwise with those that follow.
        warn: Called with the failure of a tracker; None: record it as a warning of the run.

    Attributes:
        last: The newest round; None before the first one.
        stopped: True if a callback stopped the run.
        error: The exception of a callback, other than StopRun.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        callbacks: Iterable[Callback],
        *,
        earlier: bool = False,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.stopped = False
        self.error: BaseException | None = None
        self._folder, self._callbacks = folder, list(callbacks)
        self._tail = RoundTail(folder, config.rounds, _interval(config))
        known = [] if earlier else self._tail.new(ended=True)
        self.last = known[-1] if known else None
        self._warn = warn or self._record
        self._begun = False

    def update(self, *, ended: bool = False) -> None:
        """Read new rounds; the run has written its first run.json.

        Args:
            ended: True if all processes of the run have ended.
        """
        if not self._begun:
            self._begun = True
            first = 1 if self.last is None else self.last.round + 1
            for tracker in self._trackers():
                self._guarded(tracker, partial(tracker.begin, RunData(self._folder), first))
        for metrics in self._new(ended=ended):
            stopped, self.last = self.stopped, metrics
            for callback in list(self._callbacks):
                if isinstance(callback, Tracker):
                    self._guarded(callback, partial(callback, metrics))
                elif not stopped and self.error is None:
                    self._call(callback, metrics)

    def end(self) -> None:
        """Give the trackers the remaining rounds, also of a run that did not finish, and end them; the last run.json is written."""
        if not self._begun or not self._folder.exists():
            return
        for metrics in self._new(ended=True):
            for tracker in self._trackers():
                self._guarded(tracker, partial(tracker, metrics))
        for tracker in self._trackers():
            self._guarded(tracker, partial(tracker.end, RunData(self._folder)))

    def _new(self, *, ended: bool) -> list[RoundMetrics]:
        """Read new rounds, and give the trackers the epsilons of earlier rounds that came with them: before those of new rounds."""
        found = self._tail.new(ended=ended)
        for tracker in self._trackers() if self._tail.late_epsilons else ():
            self._guarded(tracker, partial(tracker.add_epsilons, self._tail.late_epsilons))
        return found

    def _call(self, callback: Callback, metrics: RoundMetrics) -> None:
        try:
            answer = callback(metrics)
            self.stopped = self.stopped or (isinstance(answer, (bool, np.bool_)) and not answer)
        except StopRun:
            self.stopped = True
        except BaseException as error:
            self.stopped, self.error = True, error

    def _trackers(self) -> list[Tracker]:
        return [callback for callback in self._callbacks if isinstance(callback, Tracker)]

    def _guarded(self, tracker: Tracker, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            self._callbacks.remove(tracker)
            said = " ".join(str(error).split()) or type(error).__name__
            self._warn(f"tracker {type(tracker).__name__} failed and gets no more rounds: {said}; replay the run to it later")

    def _record(self, text: str) -> None:
        runlog.append(RunFolder(self._folder).warnings, {"view": "launcher", "time": time.time(), "text": text})


def _interval(config: Config) -> int:
    """Interval of evaluations that may arrive; with auto in any round, and those that do not are waited for during two rounds."""
    return 1 if config.output.evaluate_every == "auto" else config.output.evaluate_every
