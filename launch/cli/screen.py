"""Terminal output of a run: live screen, plain lines, result. Drawn by rich.live; the parts below are its content."""

from __future__ import annotations

import time
from collections import Counter, deque
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

from dpcfl_net.launch.cli.output_room import STOPPED_S, has_room
from dpcfl_net.launch.cli.phases import AWAY, GONE, SENDING, TRAINING, WAITING
from dpcfl_net.launch.cli.progress import ALL_CLIENTS, DEAD, ENDED, ProgressView
from dpcfl_net.launch.cli.steps import StepsLive, Unshifted, can_redraw, draw_steps, printable
from dpcfl_net.launch.preparation import Steps, listed
from dpcfl_net.results.number_format import at_most, counted, duration, number, percent, yes
from dpcfl_net.results.privacy_statement import statement
from dpcfl_net.results.run_files import mapping, whole
from dpcfl_net.results.tables import GAP
from dpcfl_net.results.tables import Table as Comparison

GLYPHS = {WAITING: "·", TRAINING: "▶", SENDING: "↑", GONE: "✕", AWAY: "○"}
ASCII_GLYPHS = {WAITING: ".", TRAINING: ">", SENDING: "^", GONE: "x", AWAY: "o"}
STYLES = {WAITING: "dim", TRAINING: "green", SENDING: "cyan", GONE: "bold red", AWAY: "dim"}
WARNINGS, ROWS, WIDE, STRIP = 3, 12, 1000, 120
# Columns of a result; some runs lack those in MEASURED_OF_SOME: clusters of equal size have no minority.
SHARES = {
    "accuracy": "accuracy_mean", "minority": "accuracy_minority", "worst": "accuracy_worst", "central": "accuracy_central",
}  # fmt: skip
MEASURED_OF_SOME = ("accuracy_minority", "accuracy_central")


def open_screen(console: Console | None = None) -> Screen | PlainLines:
    """Open a live screen in a terminal, else plain lines."""
    console = console or Console(highlight=False)
    return Screen(console) if can_redraw(console) else PlainLines(console)


class PlainLines:
    """Prints one line per finished round and per warning, for logs and pipes. Lines that a full pipe does not take wait for it."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._lines = self._warnings = 0
        self._steps = Steps()
        self._waiting: deque[str] = deque()

    def prepare(self, step: str) -> None:
        """Print a step of the preparation."""
        self._steps.begin(step)
        self._print(f"preparing: {step}")

    def update(self, view: ProgressView) -> None:
        """Print the lines and warnings added since the last call; before the first ones the seconds of the preparation."""
        self._end_preparation()
        for warning in view.warnings[self._warnings :]:
            self._print(f"warning: {warning}")
        for line in view.lines[self._lines :]:
            self._print(line)
        self._lines, self._warnings = len(view.lines), len(view.warnings)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Print the lines that wait, the result and the privacy statement of run.json."""
        self.print_all()
        print_summary(summary, console=self.console)

    def print_all(self) -> None:
        """Print the lines that wait, however long the reader takes."""
        while self._waiting:
            self._print_next()

    def close(self) -> None:
        self._print_some(STOPPED_S)

    def _end_preparation(self) -> None:
        self._steps.end()
        if text := self._steps.summary():
            self._print(text)
        self._steps = Steps()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _print(self, line: str) -> None:
        self._waiting.append(line)
        self._print_some(0)

    def _print_some(self, patience_s: float) -> None:
        while self._waiting and has_room(self.console.file, patience_s):
            self._print_next()

    def _print_next(self) -> None:
        # Lines of a log are not wrapped: there is no terminal width.
        self.console.print(Text(printable(self._waiting.popleft())), soft_wrap=True)


class Screen:
    """Live screen of a run; `close()` or leaving the `with` block restores the terminal, also after an error."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.time) -> None:
        self.console = console or Console(highlight=False)
        self._clock = clock
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._preparation = StepsLive(self.console, draw_steps)
        self._warnings, self._earlier = list[str](), 0  # the last ones of the last view, and the number of others

    def prepare(self, step: str) -> None:
        """Draw a step of the preparation below those that are done, with a running clock."""
        self._preparation.begin(step)

    def update(self, view: ProgressView) -> None:
        """Replace the screen with the given view."""
        self._preparation.end()
        self._warnings = _last_warnings(view)
        self._earlier = len(view.warnings) - len(self._warnings)
        if not self._live.is_started:
            self._live.start()
        self._live.update(Unshifted(self.draw(view)), refresh=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Remove the screen; print the last warnings that it showed, the result and the privacy statement of run.json."""
        self.close()
        if self._earlier:
            self.console.print(Text(f"! {counted(self._earlier, 'earlier warning')}: see the report", style="yellow"))
        for warning in self._warnings:
            self.console.print(Text(f"! {printable(warning)}", style="yellow"))
        print_summary(summary, console=self.console)

    def close(self) -> None:
        """Remove the screen; may be called twice."""
        self._preparation.end()
        if self._live.is_started:
            self._live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def draw(self, view: ProgressView) -> RenderableType:
        """Render the screen for one view."""
        parts: list[RenderableType] = [self._progress(view)]
        if not view.round and view.steps:
            parts.append(Text(f"prepared: {printable(listed(view.steps))}", style="dim"))
        if view.clusters:
            parts.append(_clusters(view))
        if view.grouping:
            parts.append(Text(f"the server's clusters: {view.grouping}", style="dim"))
        if view.round and view.round == view.rounds and view.state not in (*ENDED, DEAD):
            parts.append(Text("all rounds are done; models and report are being written", style="dim"))
        elif view.workers and view.state not in (*ENDED, DEAD):
            parts += [Text(), self._workers(view.workers)]
        parts += [Text(f"! {printable(warning)}", style="yellow") for warning in _last_warnings(view)]
        title = Text.assemble((printable(view.name), "bold"), f" · {printable(view.algorithm)}" if view.algorithm else "")
        return Panel(Group(*parts), title=title, title_align="left", border_style="red" if view.insecure else "dim")

    def _progress(self, view: ProgressView) -> RenderableType:
        elapsed = self._clock() - view.clock_zero if view.clock_zero is not None else None
        timing = f"{duration(elapsed)} elapsed" if elapsed is not None else "starting"
        if view.state == DEAD:
            timing = "dead: no process runs it"
        elif view.state in ENDED:
            timing = view.state if view.wall_s is None else f"{view.state} after {duration(view.wall_s)}"
        elif not view.round and (connected := len(view.workers) - view.workers.count(AWAY)):
            timing += f", {connected} of {len(view.workers)} clients connected"
        elif view.seconds_left is not None and view.round < (view.rounds or 0):
            timing += f", about {duration(view.seconds_left)} left"
        total = f"/{view.rounds}" if view.rounds else ""
        lines: list[RenderableType] = [Text.assemble((f"round {view.round}{total}", "bold"), f"  {timing}")]
        if view.rounds:
            # Without padding the bar ends without a newline and the next line would be cut off.
            lines.append(Padding(ProgressBar(total=view.rounds, completed=view.round), 0))
        if view.epsilon_stated:
            lines.append(Text.assemble("epsilon ", (view.epsilon_text, "bold red" if view.epsilon is None else "bold")))
        if view.pause:
            lines.append(Text(printable(view.pause), style="bold yellow"))
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


class ProgressLine:
    """Shows the round of a sweep's current run on one transient line; nothing without a terminal."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def prepare(self, step: str) -> None:
        """Show a step of the preparation."""
        self._show(f"preparing: {printable(step)}")

    def update(self, view: ProgressView) -> None:
        """Show the round and the remaining time."""
        left = f", about {duration(view.seconds_left)} left" if view.seconds_left is not None else ""
        self._show(f"{printable(view.algorithm)}: round {view.round}/{view.rounds or '?'}{left}")

    def _show(self, line: str) -> None:
        if not can_redraw(self._console):
            return
        if not self._live.is_started:
            self._live.start()
        self._live.update(Unshifted(Text(line)), refresh=True)

    def close(self) -> None:
        """Remove the line; may be called twice."""
        if self._live.is_started:
            self._live.stop()


def print_summary(run: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = (), console: Console | None = None) -> None:
    """Print results as a table, and the privacy statement of the first run.

    Args:
        run: Content of run.json.
        others: Further runs of the table. With them only headline and alerts of the statement are printed.
        console: Where to print; None: stdout.
    """
    console = console or Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    shares = [
        title for title, key in SHARES.items() if key not in MEASURED_OF_SOME or any(_has(one, key) for one in (run, *others))
    ]
    for title in ("", *shares, "clusters", "epsilon"):
        table.add_column(title, justify="left" if not title else "right")
    for one in (run, *others):
        table.add_row(*_result(one, [SHARES[title] for title in shares]))
    console.print()
    _print_trimmed(console, table)
    if len({_terms(one) for one in (run, *others)}) > 1:
        console.print(Text("! these runs are not at the same privacy: do not compare their accuracies", style="yellow"))
    if run.get("state") not in (None, "finished"):
        done = whole(run.get("rounds_done")) or 0
        said = f"! the run is {printable(run['state'])} after {counted(done, 'round')}"
        console.print(Text(said, style="yellow"))
    _print_statement(run, console, whole=not others)


def print_table(comparison: Comparison, console: Console | None = None) -> None:
    """Print a comparison without shortening its cells; in a terminal, columns that do not fit follow below.

    Args:
        comparison: The table.
        console: Where to print; None: stdout.
    """
    console = console or Console(highlight=False)
    wide = Console(file=console.file, force_terminal=console.is_terminal, width=WIDE, highlight=False)
    console.print()
    for part in comparison.folded(console.width) if console.is_terminal else [comparison]:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
        for index, title in enumerate(part.columns):
            table.add_column(printable(title), justify="left" if not index or part.holds_words(index) else "right")
        for row in part.rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        _print_trimmed(wide, table)
    if comparison.caption:
        console.print(Text(comparison.caption, style="dim"), soft_wrap=not console.is_terminal)


def _has(run: Mapping[str, Any], key: str) -> bool:
    return number(mapping(run, "final").get(key)) is not None


def _result(run: Mapping[str, Any], shares: Sequence[str]) -> list[Text]:
    final, privacy = mapping(run, "final"), mapping(run, "privacy")
    epsilon = "inf" if "epsilon" in privacy and number(privacy["epsilon"]) is None else at_most(privacy.get("epsilon"))
    if privacy.get("insecure"):
        epsilon += "!"
    recovered = yes(final.get("clusters_recovered"))
    return [
        Text(printable(run.get("algorithm") or run.get("name") or "run"), overflow="ellipsis"),
        *(Text(percent(final.get(key))) for key in shares),
        Text({"yes": "recovered", "no": "missed"}.get(recovered, recovered)),
        Text(epsilon),
    ]


def _terms(run: Mapping[str, Any]) -> tuple[Any, ...]:
    privacy = mapping(run, "privacy")
    return tuple(str(privacy.get(key)) for key in ("epsilon", "delta", "unit", "adjacency", "trust", "insecure"))


def _print_statement(run: Mapping[str, Any], console: Console, whole: bool) -> None:
    privacy = statement(mapping(run, "privacy"))
    console.print()
    console.print(Text.assemble("Privacy: ", (printable(privacy.headline), "bold")))
    for alert in privacy.alerts:
        console.print(Text(printable(alert), style="bold red"))
    if not whole:
        return
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", max_width=18)
    table.add_column()
    for label, text in privacy.facts:
        table.add_row(label, Text(printable(text)))
    for label, items in (("Covered", privacy.covered), ("Not covered", privacy.not_covered)):
        if items:
            table.add_row(label, Text(printable("; ".join(items))))
    _print_trimmed(console, Padding(table, (0, 0, 0, 2)))


def _print_trimmed(console: Console, table: RenderableType) -> None:
    """Print a table; without a terminal its lines have no blanks at their end."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as capture:
        console.print(table)
    console.print(Text("\n".join(line.rstrip() for line in capture.get().splitlines())), soft_wrap=True)


def _last_warnings(view: ProgressView) -> list[str]:
    """Return the warnings that there is room for: the last ones, with the launcher's newest, which many missing answers would hide."""
    last = view.warnings[-WARNINGS:]
    return last if view.from_launcher in ("", *last) else [view.from_launcher, *last[1:]]


def _clusters(view: ProgressView) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    first = "" if view.clusters[0][0] == ALL_CLIENTS else "true cluster"
    for title in (first, "clients", "accuracy", "change"):
        table.add_column(title, justify="left" if title == first else "right")
    for label, clients, accuracy, change in view.clusters[:ROWS]:
        table.add_row(printable(label), str(clients), percent(accuracy), "" if change is None else f"{100 * change:+.1f}")
    if len(view.clusters) > ROWS:
        table.add_row(f"and {len(view.clusters) - ROWS} more", "", "", "")
    return table
