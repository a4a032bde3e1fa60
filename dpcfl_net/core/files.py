"""Bounded reads of files that users name; each error is one sentence with the path."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from dpcfl_net.core.errors import ConfigError

MOST_BYTES = 256 << 20
MOST_SHOWN = 80
_PART = 1 << 20
# Errors of the machine, not of the command line: the run fails with exit code 4.
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
    errno.EMFILE: "too many open files (raise the limit: ulimit -n)",
    errno.ENXIO: "is a socket, or a pipe that no process reads",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ELOOP: "too many symbolic links",
}


def check_text(text: str, name: str) -> None:
    """Check that a path or another word of the operating system is Unicode: JSON, YAML and HTML hold nothing else.

    Args:
        text: The word, in which Python marks bytes that are not in the system's encoding.
        name: Its name in the error.

    Raises:
        ConfigError: If it has such bytes.
    """
    try:
        text.encode()
        return
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        help_ = "" if encoding == "utf-8" else ", the encoding of this system: set PYTHONUTF8=1"
    try:
        shown = repr(os.fsencode(text))
    except UnicodeEncodeError:  # a surrogate that stands for no byte: only Python code can pass one
        shown = repr(text)
    raise ConfigError(f"{name} is {shown}, which is not {encoding.upper()}{help_}")


def in_home(path: str | os.PathLike[str], name: str) -> Path:
    """Replace a leading `~` or `~USER` of a path by the home folder.

    Args:
        path: The path.
        name: Its name in the error.

    Raises:
        ConfigError: If the home folder is unknown: there is no such user, or neither HOME nor an entry in /etc/passwd.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        start = Path(path).parts[0]
        raise ConfigError(f"{name} is {shown(str(path))}: {start} is not a known home folder; write the whole path") from None


def given_path(path: str | os.PathLike[str], name: str) -> Path:
    """Return a path that a user gave; empty text, as of an unset variable, would be the current folder.

    Args:
        path: The path.
        name: Its name in the error.

    Raises:
        ConfigError: If it is empty.
    """
    if not os.fspath(path):
        raise ConfigError(f"{name} is '': must be a path; write '.' for the current folder")
    return Path(path)


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
    """Read a file to its end.

    Args:
        file: File open for reading.
        most: Limit in bytes.
        where: Start of the error message.

    Raises:
        ConfigError: If more than `most` bytes follow.
    """
    parts, left = [], most + 1  # one read would allocate `most` bytes
    while left and (part := file.read(min(left, _PART))):
        parts.append(part)
        left -= len(part)
    if not left:
        raise ConfigError(f"{where}: larger than {most:,} bytes, the limit")
    return b"".join(parts)


def lines_of(file: BinaryIO, most: int | None = None) -> Iterator[bytes]:
    """Yield the lines of a file with their ends.

    Args:
        file: File of `opened`.
        most: Limit of a line in bytes, None: MOST_BYTES. A file may state any length without taking room on the disk.

    Raises:
        ConfigError: If a line is longer.
    """
    most = MOST_BYTES if most is None else most
    while line := file.readline(most + 1):
        if len(line) > most:
            raise ConfigError(f"cannot read {file.name}: a line is longer than {most:,} bytes, the limit")
        yield line


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading.

    Raises:
        ConfigError: If it is missing, is no regular file or cannot be read.
    """
    if "\0" in str(path):
        raise ConfigError(f"cannot read {shown(str(path))}: a path must not contain a null character")
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"cannot read {path}: {_kind(mode)}")
            yield file
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {reason(error)}") from None


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """Read a regular file as UTF-8 without a byte order mark.

    Raises:
        ConfigError: As `read_bytes`, or if the content is not UTF-8.
    """
    try:
        return read_bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: not UTF-8 text (byte {error.start})") from None


def read_json(path: str | Path, most: int = MOST_BYTES) -> Any:
    """Read a regular file as JSON.

    Raises:
        ConfigError: As `read_text`, or if the content is not JSON.
    """
    return parse_json(read_text(path, most), str(path))


def write_text(path: str | Path, text: str, mode: int = 0o666) -> None:
    """Write a file that the user names; it may be a device or an open pipe, so it is not replaced atomically.

    Args:
        path: The file.
        text: Its content.
        mode: Permissions of a regular file, before the umask; an existing file loses those that are not among them.

    Raises:
        ConfigError: As `writing`; a named pipe without a reader cannot be written.
        OSError: As `writing`.
    """
    with writing(path):
        # Without O_NONBLOCK a named pipe without a reader would block.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, mode)
        os.set_blocking(handle, True)
        with open(handle, "w", encoding="utf-8", newline="") as file:
            found = os.fstat(handle).st_mode
            if stat.S_ISREG(found) and found & 0o666 & ~mode:
                os.fchmod(handle, found & mode)
            file.write(text)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Name a path that the user gave in the errors of writing there.

    Args:
        path: The file or folder.

    Raises:
        ConfigError: If it cannot be written: no such folder, no permission, or not a name of a file.
        OSError: If the machine has no room or no open files left.
    """
    if "\0" in str(path):
        raise ConfigError(f"cannot write {shown(str(path))}: a path must not contain a null character")
    try:
        with naming(path):
            yield
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise
        raise ConfigError(f"{path}: {reason(error)}") from None


def read_stdin(most: int) -> str:
    """Read standard input to its end as UTF-8.

    Raises:
        ConfigError: If it is longer than `most` bytes or is not UTF-8.
    """
    content = read_at_most(sys.stdin.buffer, most, "cannot read standard input")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read standard input: not UTF-8 text (byte {error.start})") from None


def parse_json(text: str, where: str) -> Any:
    """Parse JSON.

    Args:
        text: The text.
        where: Start of the error message.

    Raises:
        ConfigError: If the text is not JSON, nests too deeply or holds a number with too many digits.
    """

    def refuse(name: str) -> float:
        raise ConfigError(f"{where} is not JSON: {name} is no number of JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise ConfigError(f"{where} is not readable JSON: it is nested too deeply") from None
    except ValueError:
        raise ConfigError(f"{where} is not readable JSON: a number has too many digits") from None


def read_object(path: str | Path, kinds: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """Read a JSON object and check the types of its fields.

    Raises:
        ConfigError: As `read_json` and `check_fields`, or if the value is not an object.
    """
    document = read_json(path)
    if not isinstance(document, dict):
        kind = _NAMES.get(type(document), type(document).__name__)
        raise ConfigError(f"{path} is damaged: it must hold a JSON object, not {kind}")
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


def shown(value: Any) -> str:
    """Return the repr of a value for a message, cut to `MOST_SHOWN` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python limits the digits of an integer that it formats
        return "a number with thousands of digits"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text):,} characters)"


def reason(error: OSError) -> str:
    """Describe an operating system error in a few words."""
    return _REASONS.get(error.errno or 0) or (error.strerror or str(error)).lower()


def used_up(error: BaseException, nameless: str = "a file") -> str | None:
    """Say what the machine has no more of; None for an error of another kind.

    Args:
        error: Any error.
        nameless: What a file is called that the error does not name.

    Returns:
        The file, and that it has no room or cannot be opened; or that no thread can be started.
    """
    if isinstance(error, OSError) and error.errno in EXHAUSTED:
        return f"{error.filename or nameless}: {reason(error)}"
    if isinstance(error, RuntimeError) and str(error).startswith("can't start new thread"):
        return "no further thread can be started: raise the limit of processes (ulimit -u, or pids.max of a container)"
    return None


class naming:
    """Set the file name of an OSError to `path`: a failed write names no file, a failed draft names the draft.

    A class, since every write enters it, and a generator takes three times as long.

    Args:
        path: The file or folder.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, OSError):
            error.filename = str(self._path)


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
    if isinstance(value, int) and float in allowed:
        return abs(value) <= sys.float_info.max  # readers convert it
    return isinstance(value, allowed)


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a named pipe", stat.S_ISSOCK: "a socket"}
    what = next((word for test, word in kinds.items() if test(mode)), "a device")
    return f"is {what}, not a file"
