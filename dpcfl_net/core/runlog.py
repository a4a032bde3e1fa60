"""A run folder's growing files: one JSON object a line, each written by one call, readable after a crash."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import check_fields, naming, read_bytes

REQUIRED = {"metrics.jsonl": ("view", "round"), "clusters.jsonl": ("view", "round")}
# Fields that are read again; others are for people.
FIELDS: dict[str, tuple[type, ...]] = {
    "view": (str,), "round": (int,), "time": (float,), "bytes_up": (int,), "bytes_down": (int,), "assignment": (list,),
    "epsilon_spent_by_client": (list,), "accuracy_by_client": (list,), "loss_by_client": (list,),
}  # fmt: skip


class Lines:
    """Appends JSON lines to a file, each by one call, so that several processes may append to one file.

    A fragment that a crash or a full disk left at the end is ended first, so that no line is lost beside it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._end_fragment()

    def write(self, line: dict[str, Any]) -> None:
        """Append one object; NaN becomes null. OSError, as of a full disk, if it cannot be written whole."""
        data = (json.dumps(_finite(line), separators=(",", ":")) + "\n").encode()
        with naming(self._path):
            written = os.write(self._handle, data)
            while written < len(data):  # the disk is filling up: the rest is written, or the next call says why not
                written += os.write(self._handle, data[written:])

    def _end_fragment(self) -> None:
        size = os.fstat(self._handle).st_size
        if size and os.pread(self._handle, 1, size - 1) != b"\n":
            os.write(self._handle, b"\n")

    def close(self) -> None:
        os.close(self._handle)


def read(path: Path) -> list[dict[str, Any]]:
    """The objects of a file that may be missing, or hold damaged lines: these are left out (`unreadable` counts them).

    ConfigError if the file cannot be read.
    """
    return [found for line in _lines(path) if (found := parse(line, path.name)) is not None]


def unreadable(path: Path) -> int:
    """How many lines `read` leaves out."""
    return sum(parse(line, path.name) is None for line in _lines(path))


def parse(line: bytes, name: str) -> dict[str, Any] | None:
    """The object of one line of the file called `name`; None if it is damaged: cut, or without a field that is read again."""
    try:
        found = json.loads(line)
        if not isinstance(found, dict) or any(key not in found for key in REQUIRED.get(name, ())):
            return None
        check_fields(found, name, FIELDS)
    except (ValueError, RecursionError, ConfigError):
        return None
    return found


def _lines(path: Path) -> list[bytes]:
    return [line for line in read_bytes(path).split(b"\n")[:-1] if line] if path.exists() else []


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file whole; a reader never sees half of it. ConfigError for what is there and is no regular file."""
    if path.exists() and not path.is_file():  # replacing a device would take it away from every other process
        raise ConfigError(f"cannot write {path}: it is there and is not a regular file")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with naming(path):
        try:
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, path)
        except OSError:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise


_log: ContextVar[TextIO | None] = ContextVar("log", default=None)  # None: stderr, which is a process's own log


def say(text: str) -> None:
    """Write one line to the process's log (stderr, or the file of `saying_to`): facts about the process, never about data."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=_log.get() or sys.stderr, flush=True)


@contextmanager
def saying_to(path: Path) -> Iterator[None]:
    """Append what `say` writes to a file, for a run inside a process whose stderr belongs to its user."""
    with path.open("a", encoding="utf-8") as file:
        token = _log.set(file)
        try:
            yield
        finally:
            _log.reset(token)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
