"""Runs and sweeps below a folder, each with an id by which a page can name it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import reason
from dpcfl_net.core.run_folder import RunFolder, SweepFolder
from dpcfl_net.results.number_format import counted

MOST_DEPTH = 6  # folders between the listed one and a run
MOST_FOLDERS = 20_000  # that one listing opens
RUN, SWEEP = "run", "sweep"
ID_LENGTH = 16  # hexadecimal digits


@dataclass(frozen=True)
class Found:
    """A run or sweep of a listing.

    Attributes:
        id: Digest of `place`: the same in every listing of the same folder.
        kind: RUN or SWEEP.
        folder: Its folder.
        place: Path from the listed folder, for display; "." for the listed folder itself.
    """

    id: str
    kind: str
    folder: Path
    place: str


@dataclass(frozen=True)
class Listing:
    """Runs and sweeps below a folder.

    Attributes:
        root: The listed folder, without links.
        found: Runs and sweeps by id.
        notes: Sentences on folders that were left out.
    """

    root: Path
    found: dict[str, Found] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def list_runs(root: Path) -> Listing:
    """Find the runs and sweeps in a folder and below it.

    Links to folders are not followed, folders within a run and hidden folders are not searched.

    Args:
        root: The folder.

    Raises:
        ConfigError: If it is missing, is no folder or cannot be read.
    """
    root = Path(os.path.realpath(root))
    try:
        with os.scandir(root):
            pass
    except OSError as error:
        raise ConfigError(f"cannot list {root}: {reason(error)}") from None
    notes: list[str] = []
    found = {item.id: item for item in _walk(root, notes)}
    return Listing(root, found, tuple(notes))


def leads_out(root: Path, folder: Path) -> str:
    """Return the path of the first link in a run folder whose target is outside of `root`; empty if there is none.

    Args:
        root: The listed folder, without links.
        folder: A run folder; the folder itself, its files and its attacks are checked, since those are read for a page.

    Raises:
        OSError: If the folder cannot be read.
    """
    attacks = RunFolder(folder).attacks
    for place in (folder, attacks) if attacks.is_dir() else (folder,):
        if not inside(root, place):
            return str(place)
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.is_symlink() and not inside(root, Path(entry.path)):
                    return entry.path
    return ""


def inside(root: Path, path: Path) -> bool:
    """Return True if a path, with its links resolved, is `root` or below it."""
    return Path(os.path.realpath(path)).is_relative_to(root)


def _walk(root: Path, notes: list[str]) -> Iterator[Found]:
    """Search breadth first, so that the bound on folders leaves out the deepest."""
    level, opened = [root], 0
    for _ in range(MOST_DEPTH + 1):
        below: list[Path] = []
        for folder in level:
            opened += 1
            if opened > MOST_FOLDERS:
                notes.append(f"only the first {MOST_FOLDERS:,} folders were searched")
                return
            if kind := _kind(folder):
                yield _found(root, folder, kind)
            if kind != RUN:
                below += _folders(root, folder, notes)
        level = below
    if level:
        notes.append(f"not searched: {counted(len(level), 'folder')} more than {MOST_DEPTH} levels down")


def _kind(folder: Path) -> str:
    """RUN, SWEEP, or empty for another folder; run.json alone is not enough, since other programs write such files."""
    run = RunFolder(folder)
    if SweepFolder(folder).sweep.is_file():
        return SWEEP
    return RUN if run.config.is_file() and (run.protocol.is_file() or run.run.is_file()) else ""


def _found(root: Path, folder: Path, kind: str) -> Found:
    place = str(folder.relative_to(root))
    digest = hashlib.sha256(os.fsencode(place)).hexdigest()[:ID_LENGTH]
    return Found(digest, kind, folder, os.fsencode(place).decode("utf-8", "replace"))


def _folders(root: Path, folder: Path, notes: list[str]) -> list[Path]:
    """Subfolders to search."""
    found: list[Path] = []
    try:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                if entry.is_symlink() and not inside(root, Path(entry.path)):
                    notes.append(f"{Path(entry.path).relative_to(root)} is a link that leads out of {root} and is not followed")
                elif not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    found.append(Path(entry.path))
    except FileNotFoundError:  # removed since its parent was read
        return []
    except OSError as error:
        notes.append(f"cannot read {folder.relative_to(root)}: {reason(error)}")
    return found
