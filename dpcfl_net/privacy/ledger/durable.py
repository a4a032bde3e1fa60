"""Durable writes of a ledger: data survives a crash once the call has returned."""

from __future__ import annotations

import os
from pathlib import Path

from dpcfl_net.core.atomic import Buffer, sync_folder, write_all, write_atomically


class Disk:
    """Writes and removes a ledger's files.

    Args:
        durable: False skips fsync only.
    """

    def __init__(self, durable: bool = True) -> None:
        self.durable = durable

    def sync(self, fd: int) -> None:
        """Flush an open file to the device."""
        if self.durable:
            os.fsync(fd)

    def sync_folder(self, folder: Path) -> None:
        """Flush creations, renames and removals in a folder to the device."""
        if self.durable:
            sync_folder(folder)

    def append(self, fd: int, data: Buffer) -> None:
        """Append all bytes to a file opened for appending, and flush it."""
        write_all(fd, data)
        self.sync(fd)

    def replace(self, path: Path, *chunks: Buffer) -> None:
        """Replace a file (mode 0600) atomically; errors as `core.atomic.write_atomically`."""
        write_atomically(path, *chunks, durable=self.durable, mode=0o600)

    def remove(self, path: Path) -> None:
        """Remove a file; a missing file is no error."""
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
            write_all(fd, bytes(os.fstat(fd).st_size))
            self.sync(fd)
        finally:
            os.close(fd)
        self.remove(path)
