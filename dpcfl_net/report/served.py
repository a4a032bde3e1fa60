"""Parts that `dpcfl serve` adds to a page: the bar at its top, and the scripts that keep it up to date."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dpcfl_net.results.number_format import percent, spent_of
from dpcfl_net.results.overview import RUNNING, Overview

Pair = tuple[str, str]


@dataclass(frozen=True)
class Served:
    """What a served page has beside a file.

    Attributes:
        nonce: Value that the page's policy demands of each script.
        state_url: Address of the page's state as JSON; empty for a page that does not change.
        version: Version of the content that the page shows.
        facts: (label, value) pairs in the bar.
        links: (text, address) pairs in the bar.
        scripts: Files of this package, after that of the figures.
        drawn: True if figures may appear while the page is shown.
        tab: Text of the browser's tab; empty: the page's title.
    """

    nonce: str
    state_url: str = ""
    version: str = ""
    facts: tuple[Pair, ...] = ()
    links: tuple[Pair, ...] = ()
    scripts: tuple[str, ...] = ()
    drawn: bool = False
    tab: str = ""

    def following(self, state_url: str, version: str, facts: tuple[Pair, ...]) -> Served:
        """Return the parts of a page that follows growing files."""
        return replace(self, state_url=state_url, version=version, facts=facts, scripts=("live.js", *self.scripts), drawn=True)


def facts(shown: Overview, unit: str) -> tuple[Pair, ...]:
    """Return (label, value) of a run or sweep for the bar of its page.

    Args:
        shown: Its key figures.
        unit: What `done` counts: "round" or "runs".
    """
    pairs = [
        ("state", shown.state),
        (unit, progress(shown)),
        ("accuracy", percent(shown.mean)),
        ("worst client", percent(shown.worst)),
        ("epsilon", epsilon(shown)),
    ]
    return tuple((label, value) for label, value in pairs if value != "–")


def progress(shown: Overview) -> str:
    """Format how far a run or sweep is: `12 of 40`."""
    return str(shown.done) if shown.total is None else f"{shown.done} of {shown.total}"


def epsilon(shown: Overview) -> str:
    """Format epsilon spent as `spent_of`, with a mark if it does not hold; a dash if none is stated."""
    if not shown.stated:
        return "–"
    said = spent_of(shown.epsilon, shown.spent, shown.spent_round, shown.done)
    return f"{said} (insecure)" if shown.insecure and shown.epsilon is not None else said


def tab(shown: Overview) -> str:
    """Text of the browser's tab; of a running run with the progress first, since tabs are narrow."""
    return f"{shown.done}/{shown.total} {shown.name}" if shown.state == RUNNING and shown.total else shown.name
