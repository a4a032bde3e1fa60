"""Durable writes of a ledger: data survives a crash once the call has returned."""

from __future__ import annotations

import os
from itertools import chain, takewhile
from pathlib import Path

from dpcfl_net.core.atomic import Buffer, replacing, sync_folder, write_all
from dpcfl_net.core.files import naming


class Disk:
    """Writes a ledger's files.

    Args:
        durable: False skips only the flushes: a crash of the process loses nothing then, a crash of the machine may.
    """

    def __init__(self, durable: bool = True) -> None:
        self.durable = durable

    def sync(self, fd: int) -> None:
        """Flush the content of an open file to the device, and its length if that has changed."""
        if self.durable:
            os.fdatasync(fd)

    def sync_folder(self, folder: Path) -> None:
        """Flush creations, renames and removals in a folder to the device."""
        if self.durable:
            sync_folder(folder)

    def make_folder(self, folder: Path) -> None:
        """Create a folder (mode 0700) and those above it that are missing, durably: a lost folder takes its files along.

        Args:
            folder: The folder; nothing happens if it is there.
        """
        if not self.durable:  # a run in one process makes one for each client of a round
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return
        missing = list(takewhile(lambda each: not each.exists(), chain([folder], folder.parents)))
        for created in reversed(missing):
            self._sync_name(created.parent)  # another process may have created it, and been killed before it flushed the name
            created.mkdir(mode=0o700 if created == folder else 0o777, exist_ok=True)
        if missing:
            self._sync_name(folder)

    def _sync_name(self, folder: Path) -> None:
        """Flush the name of a folder, unless this user cannot have created it."""
        if os.access(folder.parent, os.W_OK):
            self.sync_folder(folder.parent)

    def sync_tree(self, folder: Path) -> None:
        """Flush a folder, its name and all files in it and below, also what another process wrote there without a flush.

        The files are written again first: if a flush has failed, the system takes their content for written, and the next flush does
        not write it. Names need no such care: after a failed write of a folder, a file system with a journal takes no more writes until
        it is mounted again.
        """
        if self.durable:
            for parent, _, names in os.walk(folder):
                for name in names:
                    path = Path(parent, name)
                    with naming(path), path.open("r+b", buffering=0) as file:
                        self.write_at(file.fileno(), 0, file.read())
                        os.fsync(file.fileno())
                sync_folder(Path(parent))
            sync_folder(folder.parent)

    def write_at(self, fd: int, offset: int, *chunks: Buffer) -> None:
        """Overwrite a part of an open file in place, without a flush."""
        left = [memoryview(chunk).cast("B") for chunk in chunks if len(chunk)]
        while left:
            done = os.pwritev(fd, left, offset)
            offset += done
            while left and done >= left[0].nbytes:
                done -= left.pop(0).nbytes
            if done:
                left[0] = left[0][done:]

    def replace(self, path: Path, *chunks: Buffer, zeros: int = 0) -> None:
        """Replace a file (mode 0600) atomically; errors as `core.atomic.write_atomically`.

        Args:
            path: The file.
            chunks: New content in order.
            zeros: Zero bytes after it. Without flushes they are a hole; with flushes they are written, so that a later flush of
                an overwritten part has no new blocks to note.
        """
        with replacing(path, durable=self.durable, mode=0o600) as file:
            for chunk in chunks:
                write_all(file.fileno(), chunk)
            if self.durable:
                write_all(file.fileno(), bytes(zeros))
            elif zeros:
                os.ftruncate(file.fileno(), os.lseek(file.fileno(), 0, os.SEEK_CUR) + zeros)
