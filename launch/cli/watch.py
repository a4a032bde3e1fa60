"""`dpcfl watch`: follows a run that other processes write, from the files of its folder alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from dpcfl_net.core.errors import ConfigError, RunFailed
from dpcfl_net.core.locks import is_held
from dpcfl_net.core.run_folder import RunFolder, SweepFolder, no_run
from dpcfl_net.experiment import config as configuration
from dpcfl_net.launch.cli.progress import ENDED, ProgressTail, ProgressView
from dpcfl_net.launch.cli.screen import PlainLines, Screen, open_screen
from dpcfl_net.launch.cli.steps import printable
from dpcfl_net.results import summary
from dpcfl_net.results.run_files import read_mapping, report_command, resume_command
from dpcfl_net.results.run_view import is_run

if TYPE_CHECKING:
    from dpcfl_net.launch.feed import RoundFeed
    from dpcfl_net.report.trackers.base import Tracker

POLL_S = 1.0
# Seconds without a lock and without new lines after which a run counts as dead: a network file system shows both late.
QUIET_S = 5.0
FINISHED, FAILED = 0, 4  # exit codes


@dataclass(frozen=True)
class Look:
    """A run at one time.

    Attributes:
        view: Its progress.
        held: True if a launcher holds the folder, False if none does, None if unknown.
    """

    view: ProgressView
    held: bool | None

    @property
    def ended(self) -> bool:
        """True if the run wrote its end; a launcher that holds the folder may be resuming it."""
        return self.view.state == "finished" or (self.view.state in ENDED and not self.held)

    @property
    def dead(self) -> bool:
        """True if no process is left that could write the end of the run."""
        return self.held is False and self.view.state not in ENDED

    @property
    def complete(self) -> bool:
        """True if a run of manually started processes has all rounds."""
        return self.held is None and bool(self.view.rounds) and self.view.last_line >= (self.view.rounds or 0)


def watch(
    folder: Path,
    *,
    once: bool = False,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    trackers: Sequence[Tracker] = (),
) -> int:
    """Show a run until it ends; one that has ended, once.

    The folder is only read, about once a second. If the launcher was killed, run.json still says `running`: the run is reported
    as dead, since no process holds its lock.

    Args:
        folder: The run folder.
        once: Show the run once and return.
        console: Where to show it; None: stdout.
        sleep: Waits some seconds.
        clock: Monotonic seconds.
        trackers: Get all rounds, also the earlier ones.

    Returns:
        The exit code: 0 if the run is finished or `once` is set, 4 if it failed, was interrupted or died.

    Raises:
        ConfigError: If the folder does not exist or holds no run, or `once` is set with trackers.
        RunFailed: If a tracker fails, or the folder is removed.
    """
    check(folder)
    if once and trackers:
        raise ConfigError("--once takes no --track: to send the rounds of a run, also of one that has ended, leave out --once")
    console = console or Console(highlight=False)
    tail = ProgressTail(folder)
    found = look(tail)
    if once:
        _picture(tail, found, console)
        return FINISHED
    feed = _Feed(folder, trackers)
    if not found.ended:
        found = _follow(tail, found, console, sleep, clock, feed.update)
    elif console.is_terminal:
        _picture(tail, found, console)
    else:
        lines = PlainLines(console)
        lines.update(found.view)
        lines.print_all()
    feed.end()
    return _report_end(folder, found, console)


def document(folder: Path) -> dict[str, Any]:
    """Return the progress of a run for `--once --json`.

    Args:
        folder: The run folder.

    Returns:
        folder, and the fields of `ProgressView` without texts for the terminal; a cluster has name, clients, accuracy and change.

    Raises:
        ConfigError: As `check`.
    """
    check(folder)
    tail = ProgressTail(folder)
    found = look(tail)
    view = tail.view(dead=True) if found.dead else found.view
    fields = (
        "name", "algorithm", "state", "round", "rounds", "epsilon", "epsilon_spent", "epsilon_round", "insecure", "started", "wall_s",
        "seconds_left",
    )  # fmt: skip
    return {
        "folder": folder, **{key: getattr(view, key) for key in fields},
        "steps": [{"name": name, "seconds": seconds} for name, seconds in view.steps],
        "clusters": [dict(zip(("name", "clients", "accuracy", "change"), row, strict=True)) for row in view.clusters],
        "workers": view.workers, "pause": view.pause or None, "warnings": view.warnings,
    }  # fmt: skip


def check(folder: Path) -> None:
    """Raise ConfigError if a folder does not exist or holds no run, not even one that is being prepared."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a run folder: it {'is a file' if folder.exists() else 'does not exist (yet)'}")
    if SweepFolder(folder).sweep.is_file() or (not is_run(folder) and not is_held(folder)):
        raise no_run(folder, "it holds no file of a run")


def look(tail: ProgressTail) -> Look:
    """Read the lock, then the files: a launcher writes the end of the run before it releases the lock."""
    held = is_held(tail.folder)
    return Look(tail.view(), held)


def _follow(
    tail: ProgressTail,
    found: Look,
    console: Console,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
    on_look: Callable[[], None],
) -> Look:
    """Show the run until it ends, dies or is complete; return the last look. RunFailed if the folder is removed."""
    size, changed = tail.size, clock()
    with open_screen(console) as screen:
        while not found.ended and not found.complete:
            screen.update(found.view)
            on_look()
            gone = not tail.folder.is_dir()  # its lock is then unknown, as in a run of manually started processes
            if tail.size != size or not (found.dead or gone):
                size, changed = tail.size, clock()
            elif clock() - changed >= QUIET_S:
                if gone:
                    raise RunFailed(f"{tail.folder} was removed or renamed while it was watched")
                found = Look(tail.view(dead=True), held=False)
                break
            sleep(POLL_S)
            found = look(tail)
        screen.update(found.view)
        if isinstance(screen, PlainLines):
            screen.print_all()
    return found


class _Feed:
    """Gives the rounds of a run to trackers, once it has a run.json.

    Args:
        folder: The run folder.
        trackers: The trackers; one that fails ends the command.
    """

    def __init__(self, folder: Path, trackers: Sequence[Tracker]) -> None:
        self._folder, self._trackers = folder, trackers
        self._feed: RoundFeed | None = None

    def update(self, *, ended: bool = False) -> None:
        if self._feed is None and self._trackers and RunFolder(self._folder).run.exists():
            from dpcfl_net.launch.feed import RoundFeed

            config = configuration.read_kept(RunFolder(self._folder).config)
            self._feed = RoundFeed(self._folder, config, self._trackers, earlier=True, warn=_fail)
        if self._feed is not None:
            self._feed.update(ended=ended)

    def end(self) -> None:
        self.update(ended=True)
        if self._feed is not None:
            self._feed.end()


def _fail(text: str) -> None:
    raise RunFailed(text)


def _picture(tail: ProgressTail, found: Look, console: Console) -> None:
    console.print(Screen(console).draw(tail.view(dead=True) if found.dead else found.view))


def _report_end(folder: Path, found: Look, console: Console) -> int:
    """Print the result of a finished run, or why the run has not finished."""
    view = found.view
    if view.state == "finished":
        PlainLines(console).finish(summary.read_document(folder))
        return FINISHED
    after = f"after round {view.round}" + (f" of {view.rounds}" if view.rounds else "")
    if found.complete:
        said = f"{folder} has no launcher; {after} nothing is left to do; write its report with: {report_command(folder)}"
        code = FINISHED
    else:
        error = read_mapping(RunFolder(folder).run, []).get("error")
        if view.state == "failed" and error:
            console.print(Text(f"failed: {printable(error)}"), soft_wrap=True)
        lock = RunFolder(folder).lock
        state = f"dead: run.json says 'running', and no process holds {lock}" if found.dead else view.state
        resume = resume_command(folder)
        said, code = f"stopped {after}, {state}; resume with: {resume}", FAILED
    console.print(Text(said), soft_wrap=True)
    return code
