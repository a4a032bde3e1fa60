"""A run folder's growing files: one JSON object a line, each written by one call, readable after a crash."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpcfl_net.errors import ConfigError
from dpcfl_net.files import check_fields, naming, read_bytes

REQUIRED = {"metrics.jsonl": ("view", "round"), "clusters.jsonl": ("view", "round")}
# Fields that are read again; others are for people.
FIELDS: dict[str, tuple[type, ...]] = {
    "view": (str,), "round": (int,), "time": (float,), "bytes_up": (int,), "bytes_down": (int,), "assignment": (list,),
    "epsilon_spent_by_client": (list,), "accuracy_by_client": (list,), "loss_by_client": (list,),
}  # fmt: skip


class Lines:
    """Appends JSON lines to a file; a line is written whole, so several processes may append to one file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        if _is_torn(self._handle):  # a crash cut the last line: the next one must not continue it
            os.write(self._handle, b"\n")

    def write(self, line: dict[str, Any]) -> None:
        """Append one object; NaN becomes null."""
        with naming(self._path):
            os.write(self._handle, (json.dumps(_finite(line), separators=(",", ":")) + "\n").encode())

    def close(self) -> None:
        os.close(self._handle)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, which may be missing.

    A line that a crash has cut is left out, as it is in the report, which says so.

    Raises:
        ConfigError: If the file cannot be read, or a line lacks a field of REQUIRED or has one of FIELDS of another type.
    """
    if not path.exists():
        return []
    found = []
    for number, raw in enumerate(read_bytes(path).split(b"\n")[:-1], 1):
        line = _parse(raw)
        if line is None:
            continue
        where = f"{path}, line {number},"
        if missing := [name for name in REQUIRED.get(path.name, ()) if name not in line]:
            raise ConfigError(f"{where} is damaged: it has no {missing[0]}")
        check_fields(line, where, FIELDS)
        found.append(line)
    return found


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


def say(text: str) -> None:
    """One line of a process's own log (its stderr): facts about the process, never about data."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _is_torn(handle: int) -> bool:
    size = os.fstat(handle).st_size
    return size > 0 and os.pread(handle, 1, size - 1) != b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
