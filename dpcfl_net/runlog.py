"""A run folder's growing files: one JSON object a line, each written by one call, readable after a crash."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Lines:
    """Appends JSON lines to a file; a line is written whole, so several processes may append to one file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, line: dict[str, Any]) -> None:
        """Append one object; NaN becomes null."""
        os.write(self._handle, (json.dumps(_finite(line), separators=(",", ":")) + "\n").encode())

    def close(self) -> None:
        os.close(self._handle)


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may be missing or torn at its end."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")]


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
