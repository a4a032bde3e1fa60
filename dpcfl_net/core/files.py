"""Reads files that users name: regular files of bounded size, as text or JSON; every failure is one sentence with the path."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from dpcfl_net.core.errors import ConfigError

MOST_BYTES = 256 << 20
_PART = 1 << 20
# Errors of the machine rather than of the command line: a run fails of them (exit code 4).
EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG}
_REASONS = {
    errno.ENOENT: "no such file or folder",
    errno.EEXIST: "exists already and is not a folder",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.EISDIR: "is a folder, not a file",
    errno.ENOTEMPTY: "the folder is not empty",
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.EROFS: "the file system is read-only",
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EMFILE: "too many open files",
    errno.ENXIO: "is a socket, or a pipe that no process reads",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ELOOP: "too many symbolic links",
}


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Read a regular file.

    Args:
        path: The file; a named pipe without a writer does not block.
        most: Limit in bytes.

    Returns:
        The content.

    Raises:
        ConfigError: If it is missing, no regular file, larger than the limit, or cannot be read.
    """
    with opened(path) as file:
        return read_at_most(file, most, f"cannot read {path}")


def read_at_most(file: BinaryIO, most: int, where: str) -> bytes:
    """Read to the end; ConfigError, beginning with `where`, if that is more than `most` bytes."""
    parts, left = [], most + 1  # a single read would set aside as much memory as it may return
    while left and (part := file.read(min(left, _PART))):
        parts.append(part)
        left -= len(part)
    if not left:
        raise ConfigError(f"{where}: larger than {most:,} bytes, the most that is read")
    return b"".join(parts)


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; ConfigError as `read_bytes`."""
    if "\0" in str(path):
        raise ConfigError(f"cannot read {shown(str(path))}: a path holds no null character")
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            mode = os.fstat(handle).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"cannot read {path}: {_kind(mode)}")
            yield file
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {reason(error)}") from None


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """Read a regular file as UTF-8, without its byte order mark; ConfigError as `read_bytes`, and for other bytes."""
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: not UTF-8 text (byte {error.start})") from None


def read_json(path: str | Path, most: int = MOST_BYTES) -> Any:
    """Read a regular file as JSON; ConfigError as `read_text`, and for other text."""
    return parse_json(read_text(path, most), str(path))


def write_text(path: str | Path, text: str) -> None:
    """Write a file that the user names, a device or an open pipe too; OSError, with the path, if that cannot be done."""
    with naming(path):
        # A named pipe without a reader is an error, not a wait.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        os.set_blocking(handle, True)
        with open(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)


def read_stdin(most: int) -> str:
    """Read standard input to its end as UTF-8; ConfigError if it is longer than `most` bytes, or no text."""
    content = read_at_most(sys.stdin.buffer, most, "cannot read standard input")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read standard input: not UTF-8 text (byte {error.start})") from None


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text; ConfigError, beginning with `where`, if it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ConfigError(f"{where} is not JSON that can be read: it is nested too deeply") from None
    except ValueError:
        raise ConfigError(f"{where} is not JSON that can be read: a number has too many digits") from None


def read_object(path: str | Path, kinds: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """Read a JSON object whose fields have the right types; ConfigError as `read_json` and `check_fields`."""
    document = read_json(path)
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is damaged: it must hold a JSON object, not {_article(document)}")
    check_fields(document, str(path), kinds)
    return document


def check_fields(document: Mapping[str, Any], where: str, kinds: Mapping[str, tuple[type, ...]]) -> None:
    """Check the types of known fields.

    Args:
        document: Fields by name; those that are absent or not in `kinds` are not checked.
        where: The file, and the line if there are several, for the message.
        kinds: Allowed types by field. `int` does not allow a Boolean; `float` allows an integer.

    Raises:
        ConfigError: For the first field of another type.
    """
    for name, allowed in kinds.items():
        if name in document and not _fits(document[name], allowed):
            names = " or ".join(_NAMES[kind] for kind in allowed)
            raise ConfigError(f"{where} is damaged: {name} is {shown(document[name])}, must be {names}")


def shown(value: Any, most: int = 80) -> str:
    """A value as a message shows it: its repr, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def reason(error: OSError) -> str:
    """What an error of the operating system means, in a few words."""
    return _REASONS.get(error.errno or 0) or (error.strerror or str(error)).lower()


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Make an OSError name `path`: one of a write to a full disk names no file, one of a draft names the draft."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def _fits(value: Any, allowed: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in allowed
    return isinstance(value, (*allowed, int) if float in allowed else allowed)


def _article(value: Any) -> str:
    return _NAMES.get(type(value), type(value).__name__)


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a named pipe", stat.S_ISSOCK: "a socket"}
    what = next((word for test, word in kinds.items() if test(mode)), "a device")
    return f"is {what}, not a file"
