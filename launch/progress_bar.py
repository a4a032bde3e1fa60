"""Progress bar for scripts and notebooks."""

from __future__ import annotations

import sys
import uuid
from html import escape
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dpcfl_net.launch.cli.steps import StepsLive, can_redraw
from dpcfl_net.launch.preparation import Steps, listed
from dpcfl_net.results.number_format import duration, percent

WIDTH = 40  # of the bar, in characters


class Bar:
    """Shows the progress of a run; this one draws nothing."""

    def prepare(self, title: str, step: str) -> None:
        """Show a step of the preparation, before it begins.

        Args:
            title: Text before the step.
            step: Name of the step.
        """

    def update(self, title: str, done: int, total: int, accuracy: float | None, seconds_left: float | None) -> None:
        """Draw the bar.

        Args:
            title: Text before the bar.
            done: Rounds that are done.
            total: Rounds of the run.
            accuracy: Mean test accuracy, in [0, 1]; None if unknown.
            seconds_left: Expected remaining seconds; None if unknown.
        """

    def close(self) -> None:
        """Stop drawing; the last state stays. May be called twice."""


def open_bar(wanted: bool, *, keep_stdout: bool = False) -> Bar:
    """Make a bar for the notebook or terminal that this process writes to.

    Args:
        wanted: False: draw nothing.
        keep_stdout: Do not redirect sys.stdout, for the prompt of a debugger. Otherwise printed lines appear above the bar.

    Returns:
        The bar; without a terminal or notebook one that draws nothing.
    """
    if not wanted:
        return Bar()
    shell = _notebook()
    if shell is not None:
        return NotebookBar(shell)
    console = Console(stderr=True, highlight=False)
    return TerminalBar(console, redirect=not keep_stdout) if can_redraw(console) else Bar()


class TerminalBar(Bar):
    """One line on stderr."""

    def __init__(self, console: Console, redirect: bool) -> None:
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=redirect, redirect_stderr=redirect)
        self._title = ""
        self._preparation = StepsLive(console, self._step, redirect_stdout=redirect, redirect_stderr=redirect)

    def prepare(self, title: str, step: str) -> None:
        self._title = title
        self._preparation.begin(step)

    def _step(self, steps: Steps) -> Text:
        step, seconds = steps.running or ("", 0.0)
        return Text(f"{self._title} preparing: {step}, {seconds:.1f} s")

    def update(self, title: str, done: int, total: int, accuracy: float | None, seconds_left: float | None) -> None:
        self._preparation.end()
        if not self._live.is_started:
            self._live.start()
        line = Table.grid(padding=(0, 1))
        line.add_row(
            Text(title),
            ProgressBar(total=total, completed=done, width=WIDTH),
            Text(_status(done, total, accuracy, seconds_left)),
        )
        self._live.update(line, refresh=True)

    def close(self) -> None:
        self._preparation.end()
        if self._live.is_started:
            self._live.stop()


class NotebookBar(Bar):
    """One output of a notebook cell, replaced on each update; needs no widgets."""

    def __init__(self, shell: Any) -> None:
        self._shell, self._display, self._is_shown, self._drawn = shell, uuid.uuid4().hex, False, ""
        self._steps = Steps()

    def prepare(self, title: str, step: str) -> None:
        self._steps.begin(step)
        text = f"preparing: {step}"
        if done := self._steps.done:
            text += f" (so far: {listed(done)})"
        self._show(f"{escape(title)} {escape(text)}", f"{title} {text}")

    def update(self, title: str, done: int, total: int, accuracy: float | None, seconds_left: float | None) -> None:
        status = _status(done, total, accuracy, seconds_left)
        html = f"{escape(title)} <progress value='{done}' max='{total}'></progress> {escape(status)}"
        self._show(html, f"{title} {status}")

    def _show(self, html: str, text: str) -> None:
        if html == self._drawn:
            return
        data = {"text/html": html, "text/plain": text}
        self._shell.display_pub.publish(data, transient={"display_id": self._display}, update=self._is_shown)
        self._is_shown, self._drawn = True, html


def _notebook() -> Any:
    """Return the IPython shell of a notebook kernel; None elsewhere."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell if type(shell).__name__ == "ZMQInteractiveShell" else None


def _status(done: int, total: int, accuracy: float | None, seconds_left: float | None) -> str:
    parts = [f"{done}/{total}"]
    if accuracy is not None:
        parts.append(f"accuracy {percent(accuracy)}")
    if seconds_left is not None and done < total:
        parts.append(f"about {duration(seconds_left)} left")
    return ", ".join(parts)
