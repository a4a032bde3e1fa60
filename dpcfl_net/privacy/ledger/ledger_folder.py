"""Folder of a ledger that no process needs to open: whether there is one, its lock, its newest state and its kept keys."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from dpcfl_net.core.atomic import DRAFT
from dpcfl_net.core.errors import LedgerError
from dpcfl_net.core.locks import POLL_S, PROBE_S, is_locked, try_own
from dpcfl_net.privacy.ledger.chain import LINES, read_chain
from dpcfl_net.privacy.ledger.durable import Disk
from dpcfl_net.privacy.ledger.journal import JOURNAL, Journal, may_hold_keys, read_journal
from dpcfl_net.privacy.ledger.release_store import RELEASES, ReleaseStore

LOCK = "lock"  # name of the lock file


def lock(folder: Path) -> int:
    """Take the lock of a ledger; return its descriptor, whose closing gives it back.

    Raises:
        LedgerError: "ledger-locked" if another process holds it, or has just removed the folder, as for a client that it refused.
    """
    deadline = time.monotonic() + PROBE_S  # `is_in_use` may hold it for a moment
    with suppress(FileNotFoundError):  # its holder has removed the folder
        while (handle := try_own(folder / LOCK)) is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if handle is not None:
            return handle
    raise LedgerError("ledger-locked", f"another process holds the privacy ledger in {folder}")


def is_in_use(folder: Path) -> bool | None:
    """Look whether a process holds the lock of a ledger; None if this is unknown, as for a copy without its lock file."""
    return is_locked(folder / LOCK)


def is_missing(folder: Path) -> bool:
    """Return True if a folder holds no part of a ledger, so that opening it makes a new one.

    Args:
        folder: Folder of the ledger; may be missing.
    """
    names, results = ([path.name for path in part.iterdir()] if part.is_dir() else [] for part in (folder, folder / RELEASES))
    return is_new(names, [name for name in results if not name.endswith(DRAFT)])


def is_new(names: Sequence[str], results: Sequence[str]) -> bool:
    """Return True if there is no part of a ledger among the names of a folder and of its stored results."""
    return not {LINES, JOURNAL} & set(names) and not results


def read_state(folder: Path, job: str) -> bytes | None:
    """Read the newest client state of a job without the ledger's lock; None before the first.

    Args:
        folder: Folder of the ledger.
        job: Hash of the signed protocol.

    Raises:
        LedgerError: If the ledger is damaged.
    """
    chain = read_chain(Path(folder))
    slots = {} if chain.image is None else chain.image.slots
    pending = [number for number, slot in slots.items() if slot.key is not None and not slot.answered]
    return ReleaseStore(Path(folder) / RELEASES, Disk(False), chain.entries, pending).state(job)


def erase_kept_keys(folder: Path, *, durable: bool = True) -> None:
    """Erase the keys of answered requests in the ledger of a run that has ended; see `Ledger.erase_answered`.

    Args:
        folder: Folder of a ledger that no process holds.
        durable: False skips the flush.

    Raises:
        LedgerError: "ledger-locked" or "ledger-broken".
    """
    path = folder / JOURNAL
    if not may_hold_keys(path):
        return
    with ExitStack() as stack:
        stack.callback(os.close, lock(folder))
        image = read_journal(path)
        if image is not None:
            journal = stack.enter_context(closing(Journal(path, Disk(durable), image)))
            for sequence in journal.with_key(answered=True):
                journal.erase(sequence)
