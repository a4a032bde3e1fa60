"""Removal of prepared runs whose process was killed before the job was complete: they hold secret keys and cannot be resumed."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from dpcfl_net.core.locks import try_own
from dpcfl_net.core.run_folder import RunFolder

_HIDDEN = re.compile(r"\..+\.[0-9a-f]{16}\.draft")


def hidden_draft(folder: Path) -> Path:
    """Return a new name beside a run folder, for a draft that gets the folder's name when it is complete.

    Args:
        folder: The run folder.
    """
    return folder.with_name(f".{folder.name}.{os.urandom(8).hex()}.draft")  # threads, containers and hosts may share the store


def remove_left_drafts(store: Path) -> None:
    """Remove the drafts below a folder whose processes have ended; a living process holds the lock of its draft.

    Args:
        store: Parent of run folders; may be missing.
    """
    if not store.is_dir():
        return
    for folder in list(store.iterdir()):
        with suppress(OSError):  # it has been renamed or removed meanwhile, or may not be removed
            if _is_draft(folder) and (handle := try_own(RunFolder(folder).lock)) is not None:
                try:
                    if _is_draft(folder):  # its process may have completed it and ended since
                        shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(handle)


def _is_draft(folder: Path) -> bool:
    """True for a folder with a lock that has the name of a draft, or is marked as incomplete and never ran."""
    files = RunFolder(folder)
    incomplete = _HIDDEN.fullmatch(folder.name) is not None or (files.preparing.exists() and not files.run.exists())
    return incomplete and files.lock.exists()
