"""A run folder's growing files: one JSON object a line, each written by one call, readable after a crash."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Lines:
    """Appends JSON lines to a file, each by one call, so that several processes may append to one file.

    A fragment that a crash or a full disk left at the end is ended first, so that no line is lost beside it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._end_fragment()

    def write(self, line: dict[str, Any]) -> None:
        """Append one object; NaN becomes null. OSError, as of a full disk, if it cannot be written whole."""
        data = (json.dumps(_finite(line), separators=(",", ":")) + "\n").encode()
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
    """The objects of a file that may be missing, or hold lines that were cut: these are left out (`unreadable` counts them)."""
    return [found for line in _lines(path) if (found := _object(line)) is not None]


def unreadable(path: Path) -> int:
    """How many lines `read` leaves out."""
    return sum(_object(line) is None for line in _lines(path))


def _lines(path: Path) -> list[bytes]:
    try:
        return [line for line in path.read_bytes().split(b"\n")[:-1] if line]
    except FileNotFoundError:
        return []


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file whole; a reader never sees half of it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def say(text: str) -> None:
    """One line of a process's own log (its stderr): facts about the process, never about data."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
