"""The page that lists runs and sweeps."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dpcfl_net.report.pages import html
from dpcfl_net.report.served import Served, epsilon, progress
from dpcfl_net.results.listing import SWEEP, Found
from dpcfl_net.results.number_format import percent
from dpcfl_net.results.overview import Overview


@dataclass(frozen=True)
class ListedRun:
    """A line of the list.

    Attributes:
        found: Id and place.
        overview: Its key figures; None if its files cannot be read.
        problem: Reason why they cannot.
        settings: Settings by dotted key of a run that shares name and algorithm with another.
    """

    found: Found
    overview: Overview | None
    problem: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def family(self) -> tuple[str, str, str]:
        """Kind, name and algorithm; settings tell apart runs that have these in common."""
        return self.found.kind, self.name, "" if self.overview is None else self.overview.algorithm

    @property
    def address(self) -> str:
        """Address of its page."""
        return f"/{self.found.kind}/{self.found.id}"

    @property
    def name(self) -> str:
        return self.overview.name if self.overview is not None else self.found.folder.name

    @property
    def state(self) -> str:
        return self.overview.state if self.overview is not None else "unreadable"

    @property
    def cells(self) -> list[tuple[str, str]]:
        """(label, text) of the columns after name and state."""
        if (shown := self.overview) is None:
            return []
        done = f"{progress(shown)} runs" if self.found.kind == SWEEP else progress(shown)
        return [
            ("algorithm", shown.algorithm),
            ("rounds", done),
            ("epsilon spent", epsilon(shown)),
            ("mean", percent(shown.mean)),
            ("worst", percent(shown.worst)),
            ("minority", percent(shown.minority)),
            ("start", started(shown)),
        ]


MOST_SHOWN, LONGEST = 8, 60  # settings of a line; characters of a value
COLUMNS = ("algorithm", "rounds", "epsilon spent", "mean", "worst", "minority", "start")


def runs_page(root: str, runs: Sequence[ListedRun], notes: Sequence[str], served: Served) -> str:
    """Render the list, newest first.

    Args:
        root: The listed folder.
        runs: Its runs and sweeps.
        notes: Sentences on folders that were left out.
        served: Parts of a served page.

    Returns:
        HTML.
    """
    ordered = sorted(runs, key=_age)
    telling = telling_settings(runs)
    return html("runs.html.j2", [], served=served, root=root, runs=ordered, telling=telling, columns=COLUMNS, notes=notes)


def telling_settings(runs: Sequence[ListedRun]) -> dict[str, list[str]]:
    """Find what tells runs of the same name and algorithm apart.

    Args:
        runs: Runs and sweeps of the list.

    Returns:
        Settings as they are written on the command line, `local.lr=0.1`, by id; no entry for a run that nothing tells apart.
    """
    alike: dict[tuple[str, str, str], list[ListedRun]] = {}
    for run in runs:
        if run.settings:
            alike.setdefault(run.family, []).append(run)
    found = {}
    for group in alike.values():
        keys = dict.fromkeys(key for run in group for key in run.settings)
        apart = [key for key in keys if len({run.settings.get(key) for run in group}) > 1]
        for run in group:
            if said := [f"{key}={_cut(run.settings.get(key, 'null'))}" for key in apart]:
                more = len(said) - MOST_SHOWN
                found[run.found.id] = said[:MOST_SHOWN] + ([f"and {more} more"] if more > 0 else [])
    return found


def started(shown: Overview) -> str:
    """Format the start in local time; a dash if it is unknown."""
    return "–" if shown.started is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(shown.started))


def _cut(value: str) -> str:
    return value if len(value) <= LONGEST else f"{value[: LONGEST - 1]}…"


def _age(run: ListedRun) -> tuple[float, str]:
    began = run.overview.started if run.overview is not None else None
    return (math.inf if began is None else -began, run.found.place)
