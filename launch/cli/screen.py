"""What a terminal shows of a run: one live screen on a tty, one line a round elsewhere, the result at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dpcfl_net.launch.cli.progress import AWAY, GONE, SENDING, TRAINING, WAITING, ProgressTail, ProgressView, tail_progress
from dpcfl_net.results.number_format import duration, number, percent, plain, yes
from dpcfl_net.results.privacy_statement import statement
from dpcfl_net.results.run_files import mapping
from dpcfl_net.results.tables import Table as Comparison

__all__ = ["PlainLines", "ProgressTail", "ProgressView", "Screen", "open_screen", "print_summary", "tail_progress"]

GLYPHS = {WAITING: "·", TRAINING: "▶", SENDING: "↑", GONE: "✕", AWAY: "○"}
ASCII_GLYPHS = {WAITING: ".", TRAINING: ">", SENDING: "^", GONE: "x", AWAY: "o"}
STYLES = {WAITING: "dim", TRAINING: "green", SENDING: "cyan", GONE: "bold red", AWAY: "dim"}
WARNINGS, ROWS, WIDE, STRIP = 3, 12, 1000, 120
# Other processes' words end up here: a control character in one must not steer the terminal.
CONTROL = dict.fromkeys((*range(32), *range(127, 160)), "?")


def open_screen(console: Console | None = None) -> Screen | PlainLines:
    """The live screen where there is a terminal to draw on, else plain lines."""
    console = console or Console(highlight=False)
    live = console.is_terminal and not console.is_dumb_terminal
    return Screen(console) if live else PlainLines(console)


class PlainLines:
    """One line for every finished round and every warning: for logs and pipes."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._lines = self._warnings = 0

    def update(self, view: ProgressView) -> None:
        """Print what is new since the last call."""
        for warning in view.warnings[self._warnings :]:
            self._print(f"warning: {warning}")
        for line in view.lines[self._lines :]:
            self._print(line)
        self._lines, self._warnings = len(view.lines), len(view.warnings)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Print the result and the privacy statement of run.json."""
        print_summary(summary, console=self.console)

    def close(self) -> None:
        """Nothing to give back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _print(self, line: str) -> None:
        # A log's line is never folded at the width of a terminal that is not there.
        self.console.print(Text(_tame(line)), soft_wrap=True)


class Screen:
    """One live screen; `close()` (or leaving the `with`) gives the terminal back, also after an error."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.time) -> None:
        self.console = console or Console(highlight=False)
        self._clock = clock
        self._live = Live(console=self.console, auto_refresh=False, transient=True)

    def update(self, view: ProgressView) -> None:
        """Draw this look at the run in place of the last one."""
        if not self._live.is_started:
            self._live.start()
        self._live.update(self.draw(view), refresh=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Take the screen down and print the result and the privacy statement of run.json."""
        self.close()
        print_summary(summary, console=self.console)

    def close(self) -> None:
        """Take the screen down; may be called twice."""
        if self._live.is_started:
            self._live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def draw(self, view: ProgressView) -> RenderableType:
        """The whole screen for one view."""
        parts: list[RenderableType] = [self._progress(view)]
        if view.clusters:
            parts.append(_clusters(view))
        if view.grouping:
            parts.append(Text(f"the server's groups: {view.grouping}", style="dim"))
        if view.workers:
            parts += [Text(), self._workers(view.workers)]
        parts += [Text(f"! {_tame(warning)}", style="yellow") for warning in view.warnings[-WARNINGS:]]
        title = Text.assemble((_tame(view.name), "bold"), f" · {_tame(view.algorithm)}" if view.algorithm else "")
        return Panel(Group(*parts), title=title, title_align="left", border_style="red" if view.insecure else "dim")

    def _progress(self, view: ProgressView) -> RenderableType:
        elapsed = self._clock() - view.started if view.started is not None else None
        when = f"{duration(elapsed)} elapsed" if elapsed is not None else "starting"
        if view.seconds_left is not None and view.round < (view.rounds or 0):
            when += f", about {duration(view.seconds_left)} left"
        of = f"/{view.rounds}" if view.rounds else ""
        lines: list[RenderableType] = [Text.assemble((f"round {view.round}{of}", "bold"), f"  {when}")]
        if view.rounds:
            # A bare bar ends without a new line, and what follows it would be cut off.
            lines.append(Padding(ProgressBar(total=view.rounds, completed=view.round), 0))
        if view.epsilon_stated:
            lines.append(Text.assemble("epsilon ", (view.epsilon_text, "bold red" if view.epsilon is None else "bold")))
        if view.insecure:
            lines.append(Text("INSECURE: the epsilon of this run does not hold", style="bold red"))
        return Group(*lines)

    def _workers(self, phases: Sequence[str]) -> RenderableType:
        glyphs = GLYPHS if self.console.encoding.lower().startswith("utf") else ASCII_GLYPHS
        counts = Counter(phases)
        shown = phases if len(phases) <= STRIP else [phase for phase in phases if phase != AWAY]
        strip = Text.assemble("workers ", *((glyphs[phase], STYLES[phase]) for phase in shown[:STRIP]))
        if len(shown) > STRIP:
            strip.append(f" and {len(shown) - STRIP} more", "dim")
        legend = [
            part
            for phase in glyphs
            if counts[phase]
            for part in ((glyphs[phase], STYLES[phase]), (f" {counts[phase]} {phase}  ", "dim"))
        ]
        return Group(strip, Text.assemble(*legend))


class OneLine:
    """The round that a sweep's present run is in, on one line that goes away; nothing where there is no terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def update(self, view: ProgressView) -> None:
        """Say how far this run is."""
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            return
        if not self._live.is_started:
            self._live.start()
        left = f", about {duration(view.seconds_left)} left" if view.seconds_left is not None else ""
        self._live.update(Text(f"{_tame(view.algorithm)}: round {view.round}/{view.rounds or '?'}{left}"), refresh=True)

    def close(self) -> None:
        """Take the line away; may be called twice."""
        if self._live.is_started:
            self._live.stop()


def print_summary(run: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = (), console: Console | None = None) -> None:
    """Print a run.json's result and its privacy statement; beside other runs the statement is its headline and alerts."""
    console = console or Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("", "accuracy", "minority", "worst", "clusters", "epsilon"):
        table.add_column(title, justify="left" if not title else "right")
    for one in (run, *others):
        table.add_row(*_result(one))
    console.print()
    console.print(table)
    if len({_terms(one) for one in (run, *others)}) > 1:
        console.print(Text("! these runs are not at the same privacy: their accuracies do not compare", style="yellow"))
    if run.get("state") not in (None, "finished"):
        console.print(Text(f"! the run is {_tame(run['state'])} after {run.get('rounds_done', 0)} rounds", style="yellow"))
    _print_statement(run, console, whole=not others)


def print_table(shown: Comparison) -> None:
    """Print a comparison. Its lines are as long as they are: a figure that is cut off is of no use to anybody."""
    console = Console(highlight=False, width=WIDE)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, title in enumerate(shown.columns):
        table.add_column(_tame(title), justify="right" if index else "left")
    for row in shown.rows:
        table.add_row(*(Text(_tame(cell)) for cell in row))
    console.print()
    console.print(table)
    console.print(Text(shown.caption, style="dim"))


def _result(run: Mapping[str, Any]) -> list[Text]:
    final, privacy = mapping(run, "final"), mapping(run, "privacy")
    epsilon = "inf" if "epsilon" in privacy and number(privacy["epsilon"]) is None else plain(privacy.get("epsilon"))
    if privacy.get("insecure"):
        epsilon += "!"
    found = yes(final.get("clusters_recovered"))
    return [
        Text(_tame(run.get("algorithm") or run.get("name") or "run"), overflow="ellipsis"),
        *(Text(percent(final.get(key))) for key in ("accuracy_mean", "accuracy_minority", "accuracy_worst")),
        Text({"yes": "recovered", "no": "missed"}.get(found, found)),
        Text(epsilon),
    ]


def _terms(run: Mapping[str, Any]) -> tuple[Any, ...]:
    privacy = mapping(run, "privacy")
    return tuple(str(privacy.get(key)) for key in ("epsilon", "delta", "unit", "adjacency", "trust", "insecure"))


def _print_statement(run: Mapping[str, Any], console: Console, whole: bool) -> None:
    said = statement(mapping(run, "privacy"))
    console.print()
    console.print(Text.assemble("Privacy: ", (_tame(said.headline), "bold")))
    for alert in said.alerts:
        console.print(Text(_tame(alert), style="bold red"))
    if not whole:
        return
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", max_width=18)
    table.add_column()
    for label, text in said.facts:
        table.add_row(label, Text(_tame(text)))
    for label, items in (("Covered", said.covered), ("Not covered", said.not_covered)):
        if items:
            table.add_row(label, Text(_tame("; ".join(items))))
    console.print(Padding(table, (0, 0, 0, 2)))


def _clusters(view: ProgressView) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for title in ("true cluster", "clients", "accuracy", "change"):
        table.add_column(title, justify="left" if title == "true cluster" else "right")
    for label, clients, accuracy, change in view.clusters[:ROWS]:
        table.add_row(_tame(label), str(clients), percent(accuracy), "" if change is None else f"{100 * change:+.1f}")
    if len(view.clusters) > ROWS:
        table.add_row(f"and {len(view.clusters) - ROWS} more", "", "", "")
    return table


def _tame(text: Any) -> str:
    return str(text).translate(CONTROL)
