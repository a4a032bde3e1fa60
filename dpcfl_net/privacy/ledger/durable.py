"""Durable file writing: what is reported as written survives a crash, whole."""

from __future__ import annotations

import os
from pathlib import Path

Buffer = bytes | bytearray | memoryview


class Disk:
    """Writes files so that a crash leaves the old content or the new; `durable=False` skips fsync and nothing else."""

    def __init__(self, durable: bool = True) -> None:
        self.durable = durable

    def sync(self, fd: int) -> None:
        """Flush one open file or folder to the device."""
        if self.durable:
            os.fsync(fd)

    def sync_folder(self, folder: Path) -> None:
        """Make creations, renames and removals in `folder` permanent."""
        if not self.durable:
            return
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def append(self, fd: int, data: Buffer) -> None:
        """Write all of `data` at the end of a file opened for appending, and flush it."""
        _write_all(fd, data)
        self.sync(fd)

    def replace(self, path: Path, *chunks: Buffer) -> None:
        """Give `path` (mode 0600) the content `chunks`, atomically: temporary file, fsync, rename, fsync of the folder."""
        temporary = path.with_name(path.name + ".tmp")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            for chunk in chunks:
                _write_all(fd, chunk)
            self.sync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        self.sync_folder(path.parent)

    def remove(self, path: Path) -> None:
        """Remove a file; a file that is already gone is no error."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        self.sync_folder(path.parent)

    def erase(self, path: Path) -> None:
        """Overwrite a secret in place, then remove it: unlinking alone leaves the bytes on most file systems."""
        try:
            fd = os.open(path, os.O_WRONLY)
        except FileNotFoundError:
            return
        try:
            _write_all(fd, bytes(os.fstat(fd).st_size))
            self.sync(fd)
        finally:
            os.close(fd)
        self.remove(path)


def _write_all(fd: int, data: Buffer) -> None:
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while view:
        view = view[os.write(fd, view) :]
