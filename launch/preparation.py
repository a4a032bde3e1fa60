"""Times the steps of a run's preparation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dpcfl_net.core import runlog
from dpcfl_net.core.clock import since_epoch
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.results.number_format import number

LAUNCHER = "launcher"  # name of this process in spans.jsonl


class Steps:
    """Steps that follow one another, and their seconds.

    Args:
        clock: Monotonic seconds.

    Attributes:
        done: Name and seconds of each step that has ended.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.done: list[tuple[str, float]] = []
        self._clock = clock
        self._running: tuple[str, float] | None = None

    def begin(self, step: str) -> None:
        """End the running step and begin another one."""
        self.end()
        self._running = step, self._clock()

    def end(self) -> None:
        """End the running step, if there is one."""
        if self._running is not None:
            self.done.append(self._running_step(*self._running))
            self._running = None

    @property
    def running(self) -> tuple[str, float] | None:
        """Name of the running step and its seconds so far; None between steps."""
        running = self._running  # read once: a screen draws in another thread
        return None if running is None else self._running_step(*running)

    def summary(self) -> str:
        """Describe the steps that have ended in one line; empty without one."""
        if not self.done:
            return ""
        return f"prepared in {sum(seconds for _, seconds in self.done):.1f} s ({listed(self.done)})"

    def _running_step(self, step: str, began: float) -> tuple[str, float]:
        return step, self._clock() - began


def listed(steps: Sequence[tuple[str, float]]) -> str:
    """Join the names and seconds of steps."""
    return "; ".join(f"{step}, {seconds:.1f} s" for step, seconds in steps)


class StepRecorder:
    """Tells a display of each step, and records its time in spans.jsonl, as a span of the launcher in round 0.

    Args:
        folder: The run folder.
        on_step: Called with each step before it begins.
    """

    def __init__(self, folder: Path, on_step: Callable[[str], None]) -> None:
        self._path, self._on_step = RunFolder(folder).spans, on_step
        self._running: tuple[str, float] | None = None

    def begin(self, step: str) -> None:
        """End the running step and begin another one."""
        self.end()
        self._on_step(step)
        self._running = step, time.monotonic()

    def end(self) -> None:
        """End the running step, if there is one."""
        if self._running is None:
            return
        (step, began), self._running = self._running, None
        start, end = since_epoch(began, time.monotonic())
        runlog.append(self._path, {"who": LAUNCHER, "what": step, "round": 0, "start": start, "end": end})


def read_step(span: dict[str, Any]) -> tuple[str, float] | None:
    """Return name and seconds of a step that `StepRecorder` wrote as a line of spans.jsonl; None for other spans."""
    start, end = number(span.get("start")), number(span.get("end"))
    if span.get("who") != LAUNCHER or start is None or end is None:
        return None
    return str(span.get("what")), end - start
