"""JSON-lines files of a run folder: appended by several processes, readable after a crash."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from dpcfl_net.core.atomic import write_all
from dpcfl_net.core.canonical import finite
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import check_fields, lines_of, naming, opened
from dpcfl_net.core.run_folder import CLUSTERS, METRICS, WARNINGS

REQUIRED = {METRICS: ("view", "round"), CLUSTERS: ("view", "round"), WARNINGS: ("time", "text")}
LONG = 1 << 16  # bytes of a line with a number for each of many clients
# Fields that the program reads; the others are for the user.
FIELDS: dict[str, tuple[type, ...]] = {
    "view": (str,), "round": (int,), "time": (float,), "seconds": (float,), "bytes_up": (int,), "bytes_down": (int,),
    "assignment": (list,), "diagnostics": (dict,), "label_accuracy": (dict,), "text": (str,),
    "epsilon_spent_by_client": (list,), "accuracy_by_client": (list,), "loss_by_client": (list,), "reported": (list,),
}  # fmt: skip


class Lines:
    """Appends JSON objects to a file, one per line and whole lines per system call, so that several processes can append to it.

    A partial last line, left by a crash or a full disk, is terminated first.

    Args:
        path: The file; its folder is created.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            with naming(path):
                os.write(self._handle, self._newline())
        except OSError:
            os.close(self._handle)
            raise

    def _newline(self) -> bytes:
        """Return what terminates the last line of the file: nothing, or a newline if it is partial."""
        size = os.fstat(self._handle).st_size
        return b"\n" if size and os.pread(self._handle, 1, size - 1) != b"\n" else b""

    def write(self, *lines: dict[str, Any]) -> None:
        """Append objects; NaN and infinity become null.

        Raises:
            OSError: If they cannot be written completely, for example on a full disk.
        """
        with naming(self._path):
            # Another process may have left a partial line on a full disk since: the next one must not become a part of it.
            data = self._newline() + "".join(_text(line) + "\n" for line in lines).encode()
            write_all(self._handle, data)  # on a full disk a second call raises

    def close(self) -> None:
        os.close(self._handle)


@contextmanager
def all_open(*paths: Path) -> Iterator[list[Lines]]:
    """Open several files inside the `with` block; if one cannot be opened, the others are closed."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Lines(path))) for path in paths]


def append(path: Path, *lines: dict[str, Any]) -> None:
    """Append objects to a file that this process does not keep open, as `Lines.write`."""
    with closing(Lines(path)) as file:
        file.write(*lines)


def _text(line: dict[str, Any]) -> str:
    try:
        return _ENCODER.encode(line)
    except ValueError:  # NaN or an infinity, which few lines hold
        return _ENCODER.encode(finite(line))


def read(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSON-lines file.

    Returns:
        The objects in order, without damaged lines; empty if the file is missing.

    Raises:
        ConfigError: If the file cannot be read.
    """
    return list(each(path))


def each(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file one by one, as `read`: with many clients a line takes megabytes."""
    return (found for line in _lines(path) if (found := parse(line, path.name)) is not None)


def unreadable(path: Path) -> int:
    """Count the damaged lines that `read` leaves out."""
    return sum(parse(line, path.name) is None for line in _lines(path))


def parse(line: bytes, name: str) -> dict[str, Any] | None:
    """Parse one line.

    Args:
        line: The line.
        name: Name of its file, which determines the required fields.

    Returns:
        The object; None if the line is not a JSON object, misses a required field or has a field of a wrong type.
    """
    try:
        found = json.loads(line, parse_float=_Floats().__getitem__ if len(line) > LONG else None, parse_constant=_refuse)
        if not isinstance(found, dict) or any(key not in found for key in REQUIRED.get(name, ())):
            return None
        check_fields(found, name, FIELDS)
    except (ValueError, RecursionError, ConfigError):
        return None
    return found


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


class _Floats(dict[str, float]):
    """Numbers by their text: equal ones of a line with a number for each client share one object."""

    def __missing__(self, text: str) -> float:
        value = self[text] = float(text)
        return value


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file that are not empty."""
    if path.exists():
        with opened(path) as file:
            for line in lines_of(file):
                if line.endswith(b"\n") and len(line) > 1:
                    yield line


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
