"""Finished runs that all test processes of one session share."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dpcfl_net.core.locks import locked


def session_folder(factory: pytest.TempPathFactory) -> Path:
    """Temporary folder of the whole session; each process of pytest-xdist has its own below it."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@contextmanager
def shared_run(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Path]) -> Iterator[Path]:
    """Yield a run folder that only the first test process makes; the others wait for it.

    A test that changes a run changes a copy: files that are new, missing or changed at the end of the session are an error.

    Args:
        factory: The fixture `tmp_path_factory`.
        name: Name of the run, unique in the session.
        make: Runs below the empty folder that it is given and returns the run folder.
    """
    shared = session_folder(factory) / "shared"
    shared.mkdir(exist_ok=True)
    out, record = shared / name, shared / f"{name}.json"
    with locked(shared / f"{name}.lock"):
        if not record.exists():
            shutil.rmtree(out, ignore_errors=True)  # what a failed attempt of another process left
            out.mkdir()
            made = make(out)
            record.write_text(json.dumps([str(made), _files(made)]))
    folder, files = json.loads(record.read_text())
    yield Path(folder)
    now = _files(Path(folder))
    assert now == files, f"tests changed {folder}: {sorted(dict(now.items() ^ files.items()))}"


def _files(folder: Path) -> dict[str, str]:
    """Size and time of the last change of each file."""
    found = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {str(path.relative_to(folder)): f"{stat.st_size} bytes, {stat.st_mtime_ns}" for path, stat in sorted(found.items())}
