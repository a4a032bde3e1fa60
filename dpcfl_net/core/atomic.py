"""Atomic and durable writes of files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.files import naming

Buffer = bytes | bytearray | memoryview
DRAFT = ".tmp"  # suffix of a file that replaces another once it is complete


def write_atomically(path: Path, *chunks: str | Buffer, mode: int = 0o666) -> None:
    """Replace a file atomically: readers see the old content or the new content, also after a crash of this process.

    Args:
        path: The file; its folder must exist.
        chunks: New content in order; text is written as UTF-8.
        mode: Permission bits of the new file, reduced by the process's umask.

    Raises:
        ConfigError: If the path exists and is not a regular file.
        OSError: If the file cannot be written; the error names `path`.
    """
    with replacing(path, mode=mode) as file:
        for chunk in chunks:
            write_all(file.fileno(), chunk.encode() if isinstance(chunk, str) else chunk)


@contextmanager
def replacing(path: Path, *, durable: bool = False, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a draft that replaces `path` when the `with` block ends without an error.

    Args:
        path: The file; its folder must exist.
        durable: Flush the file and its folder to the device before the block is left.
        mode: As for `write_atomically`.

    Yields:
        The draft, open for writing.

    Raises:
        ConfigError: As `write_atomically`.
        OSError: As `write_atomically`.
    """
    if path.exists() and not path.is_file():  # replacing a device node would remove it for every process
        raise ConfigError(f"cannot write {path}: it exists and is not a regular file")
    # Not the process id: threads share one, and so may processes of several hosts or containers that share the folder.
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}{DRAFT}")
    with naming(path):
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(draft, path)
        except (Exception, KeyboardInterrupt, SystemExit):  # Ctrl-C and TERM, too
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        if durable:
            sync_folder(path.parent)


def write_all(handle: int, data: Buffer) -> None:
    """Write all bytes to an open descriptor, in as many calls as the system needs."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while view:
        view = view[os.write(handle, view) :]


def sync_file(path: Path) -> None:
    """Flush a file to the device, also what was written to it through other descriptors; an OSError names the file."""
    with naming(path):
        _sync(os.open(path, os.O_RDONLY))


def sync_folder(folder: Path) -> None:
    """Flush creations, renames and removals in a folder to the device; an OSError names the folder."""
    with naming(folder):
        _sync(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))


def _sync(handle: int) -> None:
    """Flush an open file or folder to the device, and close it."""
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_drafts(folder: Path) -> None:
    """Remove drafts that a crash left in a folder; the caller must hold the lock of every writer there."""
    for draft in folder.glob(f".*{DRAFT}"):
        draft.unlink()
