"""Addresses of `dpcfl serve` and their answers: the list, a run, a sweep, a comparison, and the state of each page as JSON."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.launch.serve.library import Library, Shown, version_of
from dpcfl_net.launch.serve.page_cache import PageCache, Render
from dpcfl_net.report.page import render
from dpcfl_net.report.pages import html, study
from dpcfl_net.report.run_list import ListedRun, runs_page
from dpcfl_net.report.served import Pair, Served, facts, tab
from dpcfl_net.report.sweep import comparison_page, sweep_page
from dpcfl_net.results.comparison import Comparison
from dpcfl_net.results.listing import RUN, SWEEP, Found
from dpcfl_net.results.overview import RUNNING
from dpcfl_net.results.run_view import read_unfinished

Query = Mapping[str, Sequence[str]]
HOME: Pair = ("All runs", "/")
STATE = "state"  # last part of the address of a page's state
OFTEN_S, SELDOM_S = 2, 10  # between two questions of a page: while a run goes on, and otherwise
MOST_COMPARED = 200
NAMED = 6  # runs that a comparison links


@dataclass(frozen=True)
class Answer:
    """Answer to a request.

    Attributes:
        status: HTTP status.
        body: Content.
        kind: Media type.
        version: Version of the content; empty if it has none.
        nonce: Value that the scripts of a page carry.
    """

    status: int
    body: bytes
    kind: str = "text/html; charset=utf-8"
    version: str = ""
    nonce: str = ""


class Site:
    """Answers requests about a folder of runs.

    Args:
        folder: The folder.

    Raises:
        ConfigError: If it cannot be listed.
    """

    def __init__(self, folder: Path) -> None:
        self.library = Library(folder)
        self._pages = PageCache()

    def answer(self, path: str, query: Query) -> Answer:
        """Answer a request.

        Args:
            path: Path of the address.
            query: Its parameters.
        """
        parts = [part for part in path.split("/") if part]
        wants_state = parts[-1:] == [STATE]
        try:
            match parts[:-1] if wants_state else parts:
                case []:
                    return self._list(wants_state)
                case [("run" | "sweep") as kind, id]:
                    return self._one(kind, id, wants_state)
                case ["compare"] if not wants_state:
                    return self._compare(query)
        except ConfigError as error:
            return refusal(404, "This page cannot be shown", error.problems, wants_state)
        return refusal(404, "There is no such page", ["The list of runs has the addresses of all pages."], wants_state)

    def _list(self, wants_state: bool) -> Answer:
        lines, notes, root = self.library.lines(), self.library.listing().notes, str(self.library.root)
        version = version_of(lines, notes)
        counts = _counts(lines)
        if wants_state:
            return _state(version, counts, any(line.state == RUNNING for line in lines))

        def draw(nonce: str) -> str:
            served = Served(nonce, scripts=("runs.js",)).following(f"/{STATE}", version, counts)
            return runs_page(root, lines, notes, served)

        return self._page("list", version, draw)

    def _one(self, kind: str, id: str, wants_state: bool) -> Answer:
        found = self.library.find(kind, id)
        if found is None:
            said = [
                f"No {kind} has this address: it was removed or moved, or it is in another folder than {self.library.root}."
            ]
            return refusal(404, f"There is no such {kind}", said, wants_state)
        shown = self.library.shown(found)
        own = facts(shown.overview, "round" if kind == RUN else "runs")
        if wants_state:
            return _state(shown.version, own, shown.overview.state == RUNNING)

        def draw(nonce: str) -> str:
            served = Served(nonce, links=(HOME,), tab=tab(shown.overview)).following(
                f"/{kind}/{id}/{STATE}", shown.version, own
            )
            return (_run if kind == RUN else _sweep)(found, shown, served)

        return self._page((kind, id), shown.version, draw)

    def _compare(self, query: Query) -> Answer:
        ids = list(dict.fromkeys(query.get("id", ())))
        known = self.library.listing().found
        chosen = [known[id] for id in ids if id in known]
        if not chosen or len(chosen) < len(ids) or len(chosen) > MOST_COMPARED:
            said = f"{len(ids)} given, {len(chosen)} found: must be 1 to {MOST_COMPARED} runs or sweeps, all in {self.library.root}."
            return refusal(404, "Choose what to compare", [f"Tick runs or sweeps in the list. {said}"])
        versions = [self.library.shown(found).version for found in chosen]
        for found in chosen:
            if found.kind == SWEEP:
                self.library.runs_of(found.folder)  # refuses runs outside of the served folder
        try:
            comparison = Comparison.of([found.folder for found in chosen], force=True)
        except ConfigError as error:
            return refusal(409, "These runs cannot be compared", error.problems)
        forced = query.get("force") == ["1"]
        if comparison.marked and not forced:
            reasons = [f"{folder.name}: {one}" for folder, text in comparison.marked.items() for one in text.split("; ")]
            anyway = "/compare?" + urlencode([("id", id) for id in ids] + [("force", "1")])
            return refusal(409, "These runs are not comparable", reasons, way=("Compare anyway, with a mark", anyway))

        def draw(nonce: str) -> str:
            links = [(found.place, f"/{found.kind}/{found.id}") for found in chosen[:NAMED]]
            lead = [f"{len(comparison)} runs." if len(comparison) > 1 else "1 run."]
            served = Served(nonce, links=(HOME, *links))
            return comparison_page("Comparison", lead, comparison, served)

        return self._page(("compare", *ids, forced), version_of(*versions), draw)

    def _page(self, key: object, version: str, draw: Render) -> Answer:
        page = self._pages.page(key, version, draw)
        return Answer(200, page.body, version=page.version, nonce=page.nonce)


def refusal(status: int, headline: str, paragraphs: Sequence[str], as_json: bool = False, way: Pair | None = HOME) -> Answer:
    """Return a page of words, or for a question about the state the same as JSON.

    Args:
        status: HTTP status.
        headline: What is the matter.
        paragraphs: Reasons, and what to do.
        as_json: The page is asked for its state.
        way: (text, address) of a link; None: none.
    """
    if as_json:
        said = " ".join(f"{text.rstrip('.')}." for text in (headline, *paragraphs))
        return Answer(status, json.dumps({"said": said}).encode(), "application/json")
    nonce = secrets.token_urlsafe(16)
    links = (HOME,) if way is not None else ()
    page = html(
        "message.html.j2", [], served=Served(nonce, links=links), title=headline, paragraphs=paragraphs, way=way if way != HOME else None
    )  # fmt: skip
    return Answer(status, page.encode(), nonce=nonce)


def _run(found: Found, shown: Shown, served: Served) -> str:
    return render(read_unfinished(found.folder, shown.overview.state), served=served)


def _sweep(found: Found, shown: Shown, served: Served) -> str:
    if shown.overview.done:
        return sweep_page(found.folder, served)
    said = f"None of its {shown.overview.total} runs has finished; the comparison appears here after the first one."
    return study(title=found.folder.name, lead=[said], served=served)


def _state(version: str, own: Sequence[Pair], running: bool) -> Answer:
    body = json.dumps({"version": version, "facts": list(own), "again_s": OFTEN_S if running else SELDOM_S})
    return Answer(200, body.encode(), "application/json", version_of(body))


def _counts(lines: Sequence[ListedRun]) -> tuple[Pair, ...]:
    """How many there are of each state, running ones first."""
    runs = [line for line in lines if line.found.kind == RUN]
    states = [line.state for line in runs]
    first = sorted(set(states), key=lambda state: (state != RUNNING, state))
    return (("runs", str(len(runs))), *((state, str(states.count(state))) for state in first))
