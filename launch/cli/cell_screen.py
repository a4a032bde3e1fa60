"""Terminal output of cells that run at the same time: a live table with a row per cell, or a line per cell that ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dpcfl_net.launch.cells.outcome import FAILED, FINISHED, IN_USE, RUNNING, WAITING, CellOutcome
from dpcfl_net.launch.cells.queue import CellWatcher
from dpcfl_net.launch.cli.progress import ProgressTail, ProgressView
from dpcfl_net.launch.cli.steps import Unshifted, can_redraw
from dpcfl_net.launch.sweeps import Sweep, outcome_line
from dpcfl_net.results import summary
from dpcfl_net.results.number_format import duration, percent

STYLES = {RUNNING: "green", FINISHED: "", FAILED: "bold red", IN_USE: "cyan", WAITING: "dim"}
ORDER = (RUNNING, IN_USE, FAILED, WAITING, FINISHED)  # rows that stay if the terminal is too small for all
FRAME = 6  # lines of the terminal besides the rows
REFRESH_S = 0.5
Row = tuple[str, ...]


@dataclass(frozen=True)
class ShownCells:
    """Cells that a screen shows.

    Attributes:
        title: Name of the sweep or the tuning.
        total: Number of cells.
        labels: Label of each cell that is known; there may be more of them later.
        folders: Run folder of each of them.
    """

    title: str
    total: int
    labels: Sequence[str]
    folders: Sequence[Path]

    @classmethod
    def of(cls, sweep: Sweep) -> ShownCells:
        """Return the cells of a sweep."""
        return cls(sweep.folder.name, len(sweep.cells), [cell.label for cell in sweep.cells], sweep.folders())


class CellLines(CellWatcher):
    """Prints one line per cell that ended, for logs and pipes.

    Args:
        cells: The cells.
        console: Where to print; None: stdout.
    """

    def __init__(self, cells: ShownCells, console: Console | None = None) -> None:
        self.console, self._cells, self._told = console or Console(highlight=False), cells, set[int]()

    def ended(self, number: int, outcome: CellOutcome) -> None:
        """Print the outcome of a cell.

        Args:
            number: Number of the cell, from 1.
            outcome: Its outcome.
        """
        self.say(outcome_line(number, self._cells.total, self._cells.labels[number - 1], outcome))

    def update(self, running: Sequence[int], in_use: Sequence[int]) -> None:
        for index in in_use:
            if index not in self._told and not running:
                self.say(f"waiting for {self._cells.labels[index]}, which another process runs")
                self._told.add(index)

    def close(self) -> None:
        """Lines stay."""

    def say(self, line: str) -> None:
        """Print a line."""
        self.console.print(Text(line), soft_wrap=True)


class CellScreen(CellLines):
    """Live screen with a row per cell, below the lines of cells that ended.

    Args:
        cells: The cells.
        console: The terminal; None: stdout.
        clock: Seconds since any start.
    """

    def __init__(self, cells: ShownCells, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(cells, console)
        self._clock, self._start, self._drawn = clock, clock(), -REFRESH_S
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._tails: dict[int, ProgressTail] = {}
        self._outcomes: dict[int, CellOutcome] = {}
        self._accuracy: dict[int, str] = {}

    def ended(self, number: int, outcome: CellOutcome) -> None:
        self._outcomes[number - 1] = outcome
        self._tails.pop(number - 1, None)
        if outcome.state == FINISHED:
            self._accuracy[number - 1] = percent(summary.read_document(outcome.folder)["final"]["accuracy_mean"])
        super().ended(number, outcome)

    def update(self, running: Sequence[int], in_use: Sequence[int]) -> None:
        if self._clock() - self._drawn < REFRESH_S:
            return
        self._drawn = self._clock()
        if not self._live.is_started:
            self._live.start()
        self._live.update(Unshifted(self.draw(running, in_use)), refresh=True)

    def close(self) -> None:
        if self._live.is_started:
            self._live.stop()

    def draw(self, running: Sequence[int], in_use: Sequence[int]) -> RenderableType:
        """Render the screen.

        Args:
            running: Cells that run here.
            in_use: Cells that other processes run.
        """
        total, known = self._cells.total, len(self._cells.labels)
        failed = sum(outcome.state == FAILED for outcome in self._outcomes.values())
        head = f"{len(self._outcomes)} of {total} cells ended, {len(running)} run"
        head += f", {failed} failed" if failed else ""
        states = {index: outcome.state for index, outcome in self._outcomes.items()}
        states |= dict.fromkeys(in_use, IN_USE) | dict.fromkeys(running, RUNNING)
        chosen = self._chosen([states.get(index, WAITING) for index in range(known)])
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for title in ("cell", "state", "round", "accuracy", "epsilon", "left"):
            table.add_column(title, justify="left" if title in ("cell", "state") else "right", no_wrap=True)
        for index in chosen:
            state = states.get(index, WAITING)
            row = self._row(index, state)
            table.add_row(self._cells.labels[index], Text(state, style=STYLES.get(state, "")), *row)
        parts: list[RenderableType] = [
            Text.assemble((head, "bold"), f"  {duration(self._clock() - self._start)} elapsed"),
            # Without padding the bar ends without a newline and the next line would be cut off.
            Padding(ProgressBar(total=total, completed=len(self._outcomes)), 0),
            table,
        ]
        if len(chosen) < total:
            parts.append(Text(f"and {total - len(chosen)} more", style="dim"))
        return Panel(Group(*parts), title=Text(self._cells.title, style="bold"), title_align="left", border_style="dim")

    def _chosen(self, states: Sequence[str]) -> list[int]:
        """Choose the cells that fit into the terminal, in the order of the grid."""
        most = max(3, self.console.height - FRAME - 1)
        ranks = {state: rank for rank, state in enumerate(ORDER)}
        by_rank = sorted(range(len(states)), key=lambda index: (ranks.get(states[index], len(ORDER)), index))
        return sorted(by_rank[:most])

    def _row(self, index: int, state: str) -> Row:
        """Round, accuracy, epsilon and remaining time of a cell."""
        if state == FINISHED:
            return "", self._accuracy.get(index, ""), "", ""
        if state not in (RUNNING, IN_USE):
            return "", "", "", ""
        view = self._tails.setdefault(index, ProgressTail(self._cells.folders[index])).view()
        rounds = f"{view.round}/{view.rounds}" if view.rounds else "starting"
        left = duration(view.seconds_left) if view.seconds_left is not None else ""
        return rounds, _accuracy(view), view.epsilon_text, left


def open_cell_screen(cells: ShownCells) -> CellLines:
    """Open a live screen in a terminal, else lines."""
    console = Console(highlight=False)
    return CellScreen(cells, console) if can_redraw(console) else CellLines(cells, console)


def _accuracy(view: ProgressView) -> str:
    """Mean accuracy over the clients of all true clusters."""
    known = [(clients, accuracy) for _, clients, accuracy, _ in view.clusters if accuracy is not None]
    clients = sum(count for count, _ in known)
    return percent(sum(count * accuracy for count, accuracy in known) / clients) if clients else ""
