"""Shows the steps of a preparation in a terminal, before the screen of the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from dpcfl_net.launch.preparation import Steps

REFRESH_PER_S = 4
LONG_S = 2.0  # of a step, after which a pipe or a file gets a line
LIBRARIES = "libraries"  # step
ECHO = len("^C")  # that a terminal writes behind a drawing on Ctrl-C
# Texts of other processes are shown: their control characters must not reach the terminal, nor those that reverse what follows.
CONTROL = dict.fromkeys((*range(32), *range(127, 160), *range(0x2028, 0x202F), *range(0x2066, 0x206A)), "?")


class StepsLive:
    """Transient drawing of the steps, refreshed by a thread: a step such as a noise search blocks the calling one for seconds.

    Args:
        console: The terminal.
        draw: Draws the steps.
        **options: Further options of `rich.live.Live`.

    Attributes:
        steps: The steps so far.
    """

    def __init__(self, console: Console, draw: Callable[[Steps], RenderableType], **options: Any) -> None:
        self.steps = Steps()
        self._live = Live(
            console=console,
            get_renderable=lambda: Unshifted(draw(self.steps)),
            refresh_per_second=REFRESH_PER_S,
            transient=True,
            **options,
        )

    def begin(self, step: str) -> None:
        """Draw the beginning of a step."""
        self.steps.begin(step)
        if self._live.is_started:
            self._live.refresh()
        else:
            self._live.start(refresh=True)

    def end(self) -> None:
        """End the last step and remove the drawing; may be called twice."""
        self.steps.end()
        if self._live.is_started:
            self._live.stop()

    @contextmanager
    def showing(self, step: str) -> Iterator[None]:
        """Draw one step inside the `with` block."""
        self.begin(step)
        try:
            yield
        finally:
            self.end()


def can_redraw(console: Console) -> bool:
    """True for a terminal on which a drawing can be replaced."""
    return console.is_terminal and not console.is_dumb_terminal


@dataclass(frozen=True)
class Unshifted:
    """A drawing with room for `ECHO` behind it, and for the cursor below it: what shifts a drawing leaves its first lines behind.

    An echo that wraps shifts it, and so does its end, which begins a line, at the bottom of the terminal.

    Attributes:
        drawn: The drawing; lines for which there is no room are left out.
    """

    drawn: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.drawn, options.update_width(max(1, options.max_width - ECHO)), pad=False)
        room = max(1, console.height - 1)
        for line in lines if len(lines) <= room else [*lines[: room - 1], [Segment("...")]]:
            yield from line
            yield Segment.line()


def draw_steps(steps: Steps) -> RenderableType:
    """Draw steps with their seconds; the running one last."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    for step, seconds in steps.done:
        table.add_row(Text(f"done: {printable(step)}", style="dim"), Text(f"{seconds:.1f} s", style="dim"))
    if (running := steps.running) is not None:
        table.add_row(Text(f"preparing: {printable(running[0])}"), f"{running[1]:.1f} s")
    return Panel(table, border_style="dim")


@contextmanager
def loading() -> Iterator[None]:
    """Show that libraries are loaded inside the `with` block: before a first run, and on a busy machine, this takes seconds."""
    console = Console(highlight=False)
    if can_redraw(console):
        with StepsLive(console, draw_steps).showing(LIBRARIES):
            yield
    else:
        console.print(f"preparing: {LIBRARIES}")
        yield


@contextmanager
def computing(what: str, *, on_stdout: bool = False) -> Iterator[None]:
    """Show in a terminal what is computed inside the `with` block, with a running clock; nothing in a pipe or a file.

    Args:
        what: Text before the seconds.
        on_stdout: True for the terminal of a run's screen, which --quiet turns off; False for stderr.
    """
    console = Console(stderr=not on_stdout, highlight=False)
    if can_redraw(console):
        with StepsLive(console, _draw_running, redirect_stdout=False).showing(what):
            yield
    else:
        yield


@contextmanager
def preparing(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show on stderr the steps that are begun inside the `with` block.

    A terminal shows the running one with a clock; a pipe or a file gets a line for each that is not done after `LONG_S` seconds.

    Args:
        quiet: True to show nothing.

    Yields:
        Function to call with each step before it begins.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if quiet:
        yield lambda step: None
    elif can_redraw(console):
        live = StepsLive(console, _draw_running, redirect_stdout=False)
        try:
            yield lambda step: live.begin(f"preparing: {step}")
        finally:
            live.end()
    else:
        timers: list[threading.Timer] = []

        def begin(step: str) -> None:
            if timers:
                timers.pop().cancel()
            timers.append(threading.Timer(LONG_S, console.print, [Text(f"preparing: {printable(step)}")]))
            timers[0].daemon = True
            timers[0].start()

        try:
            yield begin
        finally:
            for timer in timers:
                timer.cancel()


def _draw_running(steps: Steps) -> Text:
    return Text("" if steps.running is None else f"{printable(steps.running[0])}: {steps.running[1]:.0f} s", style="dim")


def printable(text: Any) -> str:
    """Replace control characters."""
    return str(text).translate(CONTROL)
