"""Readers for files of a run folder that may be missing, damaged or still growing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpcfl_net.core import runlog, yaml_file
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import lines_of, opened, parse_json, read_text
from dpcfl_net.core.locks import is_running
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.results.number_format import number

JsonLine = dict[str, Any]


class JsonlTail:
    """Reads complete lines of a growing JSON-lines file from where the last call ended.

    Attributes:
        path: The file.
        offset: Bytes read so far.
        damaged: Damaged lines so far, which are left out.
        partial: True if the file ends within a line.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.damaged, self.partial = path, 0, 0, False

    def new(self) -> list[JsonLine]:
        """Return the lines added since the last call; a file that shrank is read from its start.

        Raises:
            ConfigError: If the file cannot be read.
        """
        if not self.path.exists():
            return []
        with opened(self.path) as file:
            if file.seek(0, 2) < self.offset:
                self.offset = 0
            file.seek(self.offset)
            self.partial = False
            return [line for raw in lines_of(file) if (line := self._read(raw)) is not None]

    def _read(self, raw: bytes) -> JsonLine | None:
        """Parse a line; None if it is damaged, or cut at the end of the file."""
        self.partial = not raw.endswith(b"\n")
        if self.partial:
            return None
        self.offset += len(raw)
        line = runlog.parse(raw, self.path.name)
        if line is None:
            self.damaged += 1
            return None
        line.pop("loss_by_client", None)  # no reader of growing files shows it, and it has a number for each client
        return line


def read_mapping(path: Path, notes: list[str]) -> JsonLine:
    """Read a JSON or YAML mapping.

    Args:
        path: The file.
        notes: Receives a sentence if the file is damaged.

    Returns:
        The mapping; empty if the file is missing or damaged.
    """
    if not path.exists():
        return {}
    try:
        text = read_text(path)
        found = yaml_file.parse(text, path.name) if path.suffix == ".yaml" else parse_json(text, path.name)
    except ConfigError:
        found = None
    if isinstance(found, dict):
        return found
    notes.append(f"{path.name} is damaged and was left out")
    return {}


def actual_state(folder: Path, run: Mapping[str, Any]) -> str:
    """Return the state of a run: that of run.json, or `interrupted` if it says `running` and no process holds the folder.

    A lock that belongs to another user cannot be read: then run.json is believed.

    Args:
        folder: Run folder.
        run: Content of run.json.

    Returns:
        `running`, `finished`, `failed`, `interrupted`; `unknown` without a state in run.json.
    """
    state = str(run.get("state") or "unknown")
    try:
        return "interrupted" if state == "running" and not is_running(folder) else state
    except PermissionError:
        return state


def completed_rounds(folder: Path, run: Mapping[str, Any]) -> int:
    """Return the number of completed rounds: run.json holds it after the end of a run, metrics.jsonl before.

    Args:
        folder: Run folder.
        run: Content of run.json.

    Raises:
        ConfigError: If metrics.jsonl cannot be read.
    """
    ended = whole(run.get("rounds_done")) or 0
    if run.get("state") != "running":
        return ended
    return finished_rounds(folder) or ended


def wall_seconds(folder: Path, run: Mapping[str, Any]) -> float:
    """Return the duration of a run in real seconds: run.json holds it after the end of a run, before it those until its start.

    Args:
        folder: Run folder.
        run: Content of run.json.

    Raises:
        ConfigError: If metrics.jsonl cannot be read.
    """
    known = number(run.get("wall_s")) or 0.0
    if run.get("state") != "running":
        return known
    # In virtual time `seconds` are virtual, and `wall_s` are the real ones.
    lines = runlog.each(RunFolder(folder).metrics)
    return max(known, sum(number(line.get("wall_s", line.get("seconds"))) or 0.0 for line in lines))


def finished_rounds(folder: Path) -> int:
    """Return the last round of which metrics.jsonl has the server's figures; 0 without one."""
    return max((line["round"] for line in runlog.each(RunFolder(folder).metrics) if "bytes_up" in line), default=0)


def listed(line: JsonLine, key: str) -> list[Any]:
    """Return a list field, or an empty list."""
    found = line.get(key)
    return found if isinstance(found, list) else []


def item(column: Sequence[Any], index: int) -> Any:
    """Return an item of a column; None beyond its end, since lines of a damaged run may be short."""
    return column[index] if index < len(column) else None


def mapping(line: Mapping[str, Any], key: str) -> JsonLine:
    """Return a mapping field, or an empty mapping."""
    found = line.get(key)
    return found if isinstance(found, dict) else {}


def numbers(line: JsonLine, key: str) -> list[float | None]:
    """Return a list field as numbers, None where one is not finite."""
    return [number(item) for item in listed(line, key)]


def whole(value: Any) -> int | None:
    """Return a whole number >= 0, else None."""
    found = number(value)
    return int(found) if found is not None and found >= 0 and found == int(found) else None


def resume_command(folder: Path) -> str:
    """Return the command that resumes the run of a folder."""
    word = shlex.quote(str(folder))
    if RunFolder(folder).placement.exists():
        return f"dpcfl launch --resume {word} --on ... (with the same options)"
    return f"dpcfl run --resume {word}"


def report_command(folder: Path) -> str:
    """Return the command that writes the report of a run, and its run.json again."""
    return f"dpcfl report {shlex.quote(str(folder))}"
