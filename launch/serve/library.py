"""Runs and sweeps of the served folder with their key figures, kept until their files change."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import reason
from dpcfl_net.report.run_list import ListedRun
from dpcfl_net.results.listing import RUN, Found, Listing, inside, leads_out, list_runs
from dpcfl_net.results.overview import RUNNING, Fingerprint, Overview, RunTail, fingerprint, of_sweep
from dpcfl_net.results.result import read_document

LISTED_S, REST = 0.5, 5.0  # a listing that took t seconds is used again for LISTED_S + REST * t, its lines for REST * t


@dataclass
class Known:
    """A run that was read before."""

    tail: RunTail
    files: Fingerprint
    overview: Overview


@dataclass(frozen=True)
class Shown:
    """A run or sweep at one time.

    Attributes:
        overview: Its key figures.
        version: Digest of its files and state; changes when a page of it changes.
    """

    overview: Overview
    version: str


class Library:
    """The served folder.

    Args:
        root: The folder.

    Raises:
        ConfigError: If it cannot be listed.
    """

    def __init__(self, root: Path) -> None:
        self._listing, self._until = _listed(root)
        self._lines: list[ListedRun] = []
        self._lines_until = 0.0
        self._known: dict[Path, Known] = {}
        self._lock, self._reading = threading.Lock(), threading.Lock()

    @property
    def root(self) -> Path:
        """The folder, without links."""
        return self._listing.root

    def listing(self) -> Listing:
        """Return runs and sweeps; the listing may be half a second old, in a large folder a few seconds.

        Raises:
            ConfigError: If the folder is gone.
        """
        with self._lock:
            if time.monotonic() > self._until:
                self._listing, self._until = _listed(self.root)
                folders = {found.folder for found in self._listing.found.values()}
                self._known = {folder: known for folder, known in self._known.items() if folder in folders}
            return self._listing

    def find(self, kind: str, id: str) -> Found | None:
        """Return the run or sweep of an id; only a listing makes ids, so that no request can name a path."""
        found = self.listing().found.get(id)
        return found if found is not None and found.kind == kind else None

    def lines(self) -> list[ListedRun]:
        """Return a line for each run and sweep; one that cannot be read says why.

        Raises:
            ConfigError: If the folder is gone.
        """
        with self._reading:
            if (start := time.monotonic()) > self._lines_until:
                lines = [self._line(found) for found in self.listing().found.values()]
                alike = Counter(line.family for line in lines)
                self._lines = [self._with_settings(line) if alike[line.family] > 1 else line for line in lines]
                end = time.monotonic()
                self._lines_until = end + REST * (end - start)
            return self._lines

    def shown(self, found: Found) -> Shown:
        """Read the key figures of a run or sweep.

        Raises:
            ConfigError: If it is gone, cannot be read, or leads out of the served folder.
        """
        try:
            return self._run(found.folder) if found.kind == RUN else self._sweep(found.folder)
        except FileNotFoundError:
            raise ConfigError(f"{found.place} was removed or moved") from None
        except OSError as error:
            raise ConfigError(f"cannot read {found.place}: {reason(error)}") from None

    def runs_of(self, sweep: Path) -> list[Path]:
        """Return the existing run folders of a sweep.

        Raises:
            ConfigError: If sweep.json is damaged or names a folder outside of the served folder.
        """
        folders = [(sweep / cell["folder"]).resolve() for cell in read_document(sweep)["cells"]]
        if outside := [folder for folder in folders if not inside(self.root, folder)]:
            raise ConfigError(
                f"{sweep.name} has runs outside of {self.root}, such as {outside[0]}: serve a folder that holds them, too"
            )
        return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]

    def _line(self, found: Found) -> ListedRun:
        try:
            return ListedRun(found, self.shown(found).overview)
        except ConfigError as error:
            return ListedRun(found, None, str(error))

    def _with_settings(self, line: ListedRun) -> ListedRun:
        with self._lock:
            known = self._known.get(line.found.folder)
            return line if known is None else replace(line, settings=known.tail.settings())

    def _refuse_links(self, folder: Path) -> None:
        if link := leads_out(self.root, folder):
            raise ConfigError(f"{link} is a link that leads out of {self.root}: {folder.name} is not shown")

    def _run(self, folder: Path) -> Shown:
        self._refuse_links(folder)
        with self._lock:
            files, known = fingerprint(folder), self._known.get(folder)
            if known is None:
                known = self._known[folder] = Known(tail := RunTail(folder), files, tail.read())
            elif known.files != files or known.overview.state == RUNNING:
                # Processes that are killed change no file. A run that stopped is not asked again: that takes its lock for a moment.
                known.files, known.overview = files, known.tail.read()
            return Shown(known.overview, version_of(files, known.overview.state))

    def _sweep(self, folder: Path) -> Shown:
        self._refuse_links(folder)
        cells = len(read_document(folder)["cells"])
        runs = [self._run(run) for run in self.runs_of(folder)]
        overview = of_sweep(folder.name, cells, [run.overview for run in runs])
        return Shown(overview, version_of(cells, [(run.version, run.overview.state) for run in runs]))


def _listed(root: Path) -> tuple[Listing, float]:
    """A listing and the time until which it is used."""
    start = time.monotonic()
    listing = list_runs(root)
    end = time.monotonic()
    return listing, end + LISTED_S + REST * (end - start)


def version_of(*parts: object) -> str:
    """Return a digest of anything with a repr that tells its content."""
    return hashlib.sha256(repr(parts).encode("utf-8", "replace")).hexdigest()[:24]
